"""The README's snippet: a model, a cache and two jitted loops of one's own, without the engine."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[2] / "README.md"
GOLDEN = Path(__file__).parents[1] / "golden"


def snippet(title: str) -> str:
    """The first python block after a heading of the README."""
    text = README.read_text()
    return re.search(r"```python\n(.*?)```", text[text.index(title) :], re.S).group(1)


@pytest.fixture
def model_is_here():
    from jaxinfer.checkpoints import fetch

    if not fetch.is_here("smollm2-135m-instruct"):
        pytest.skip("run `jaxinfer fetch smollm2-135m-instruct` first")


def test_the_functional_snippet_of_the_readme_generates_the_right_tokens(model_is_here):
    code = snippet("## The functional core")
    assert len(code.splitlines()) <= 40
    scope: dict = {}
    exec(compile(code, "README", "exec"), scope)
    import json

    prompts = json.loads((GOLDEN / "smollm2.json").read_text())
    chat = next(i for i, p in enumerate(prompts) if p["name"] == "chat_capital")
    expected = np.load(GOLDEN / "smollm2.npz")["token_ids"][chat]
    assert scope["prompt"] == prompts[chat]["token_ids"]
    assert np.asarray(scope["tokens"])[:8].tolist() == expected[:8].tolist()


def test_the_script_of_the_readme_runs(model_is_here, capsys):
    exec(compile(snippet("## From a script"), "README", "exec"), {})
    assert "Paris" in capsys.readouterr().out
