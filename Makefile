# make demo   set up, fetch a real model, answer a question
# make test   set up, fetch, run every check and test (`make test-slow` for the longer cases)

MODEL := smollm2-135m-instruct
QUESTION := What is the capital of France? Answer in one sentence.
OLDEST_JAX := 0.11.2
EXTRAS := dev
PIP_INSTALL := -m pip install -qq --disable-pip-version-check

.PHONY: setup model demo test test-slow test-smoke-oldest test-ray test-aot-smoke test-aot lint format clean

setup: .venv/installed

model: setup
	@.venv/bin/jaxinfer fetch $(MODEL)

demo: model
	@.venv/bin/jaxinfer generate --model $(MODEL) --chat "$(QUESTION)"

test: model lint
	.venv/bin/pytest -m "not slow" -n 2 --dist loadfile

test-slow: model
	.venv/bin/pytest -m slow

# The two-minute part of the suite on the oldest jax that is supported.
test-smoke-oldest: model .venv-oldest/installed
	.venv-oldest/bin/pytest -m smoke

# Two real Ray workers; in a venv of its own, since Ray is large.
test-ray: .venv-ray/installed
	.venv-ray/bin/pytest tests/jaxinfer/test_ray_data.py

# Programs and kernels through the real compilers for chips that are not here; in a venv of its own, since an
# installed compiler changes how jax starts. The second takes hours and writes docs/aot.md.
test-aot-smoke: model .venv-aot/installed
	.venv-aot/bin/python scripts/aot.py --smoke

test-aot: model .venv-aot/installed
	.venv-aot/bin/python scripts/aot.py --write docs/aot.md

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-oldest .venv-ray .venv-aot build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv-oldest/installed: AT_JAX := jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
.venv-ray/installed: EXTRAS := dev,ray
.venv-aot/installed: EXTRAS := dev,aot-tpu,aot-gpu

# A venv is made anew where its pip does not run (none yet, or cut short), and brought up to date after pyproject.toml.
%/installed: pyproject.toml
	@$*/bin/python -m pip --version >/dev/null 2>&1 || { \
	    python=$$(scripts/find_python.sh) && echo "Making $* with $$python" && "$$python" -m venv --clear $*; }
	@echo "Installing jaxinfer into $* (the first time takes a minute or two)"
	@$*/bin/python $(PIP_INSTALL) -e '.[$(EXTRAS)]' $(AT_JAX)
	@touch $@
