"""The README's snippet: a model, a cache and two jitted loops of one's own, without the engine."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import load

from jaxinfer import batch, kv_cache
from jaxinfer.forward import forward
from jaxinfer.sampling import sample

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


TINY = "llama_gqa"
PAGE = 8
PROMPT = [5, 6, 7, 8, 9]


def tiny(implementation, num_pages=8):
    """(model file, config, weights, an empty cache) of a tiny model."""
    model, config, weights = load(TINY)
    spec = kv_cache.KVCacheSpec(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        PAGE,
        num_pages,
        implementation=implementation,
    )
    return model, config, weights, kv_cache.init(spec)


def logits_of(model, config, weights, cache, step):
    hidden, cache = forward(model, config, weights, cache, step)
    return model.unembed(config, weights, hidden), cache


def decode_loop(implementation, pages, length):
    """f32[length, V]: logits of greedy steps, each a step of one jitted scan, after the prompt."""
    model, config, weights, cache = tiny(implementation)

    def turn(carry, _):
        cache, token, step = carry
        step = batch.next_decode(step, jnp.array([True]), PAGE).replace(token_ids=token)
        logits, cache = logits_of(model, config, weights, cache, step)
        return (cache, logits.argmax(-1).astype(jnp.int32), step), logits[0]

    first, cache = logits_of(model, config, weights, cache, batch.pack([(PROMPT, 0, pages)], page_size=PAGE))
    last = batch.pack([(PROMPT[-1:], len(PROMPT) - 1, pages)], page_size=PAGE, pages_per_row=4)
    carry = cache, first[-1:].argmax(-1).astype(jnp.int32), last
    return jax.jit(lambda *carry: jax.lax.scan(turn, carry, length=length))(*carry)[1]


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_a_loop_past_its_pages_gets_nan_and_nothing_plausible(implementation):
    room = 2 * PAGE - len(PROMPT)  # tokens that find a place in two pages
    enough = decode_loop(implementation, [1, 2, 3, 4], room + 6)
    short = decode_loop(implementation, [1, 2], room + 6)
    assert np.isfinite(enough).all()
    np.testing.assert_allclose(short[:room], enough[:room], atol=1e-4)
    assert np.isnan(short[room:]).all()
    assert int(sample.greedy(short)[room]) == -1 and int(sample.greedy(short)[0]) == int(enough[0].argmax())


def test_pack_refuses_tokens_without_a_page():
    ids = list(range(40))
    with pytest.raises(
        ValueError, match=r"row 0: tokens at positions 0 to 39 do not fit its 1 pages of 32 tokens.*: 2"
    ):
        batch.pack([(ids, 0, [1]), (ids, 0, [2, 3])], page_size=32)
    with pytest.raises(ValueError, match="row 1: tokens at positions 30 to 32 do not fit"):
        batch.pack([(ids, 0, [2, 3]), (ids[:3], 30, [1])], page_size=32)
    with pytest.raises(ValueError, match="row 0: page 0 is the null page"):
        batch.pack([(ids, 0, [1, 0])], page_size=32)
    with pytest.raises(ValueError, match="2 pages are over the bucket's pages_per_row=1"):
        batch.pack([(ids, 0, [1, 2])], page_size=32, pages_per_row=1)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_a_forward_without_jit(implementation):
    model, config, weights, cache = tiny(implementation)
    step = batch.pack([(PROMPT, 0, [1])], page_size=PAGE)
    plain, _ = logits_of(model, config, weights, cache, step)
    jitted, _ = jax.jit(partial(logits_of, model, config))(weights, cache, step)
    np.testing.assert_allclose(plain, jitted, atol=1e-4)


def loss_of(implementation, weights, fill):
    """A loss of two rows and padding, over pages that hold `fill` where nothing was written."""
    model, config, _, cache = tiny(implementation)
    cache = jax.tree.map(lambda pages: jnp.full_like(pages, fill), cache)
    step = batch.pack(
        [(PROMPT, 0, [1]), (PROMPT[:3], 0, [2])], page_size=PAGE, num_tokens=12, num_rows=3, pages_per_row=2
    )
    logits, _ = logits_of(model, config, weights, cache, step)
    scores = jax.nn.log_softmax(logits[:7])
    return -scores[jnp.arange(7), jnp.array([6, 7, 8, 9, 1, 6, 7])].mean()


def test_gradients_through_reference_are_finite_whatever_unwritten_pages_hold():
    _, _, weights, _ = tiny("reference")
    value, gradient = jax.value_and_grad(partial(loss_of, "reference"))(weights, jnp.nan)
    clean, expected = jax.value_and_grad(partial(loss_of, "reference"))(weights, 0.0)
    assert np.isfinite(value) and value == clean
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) > 1e-3
    # and right: the change of the loss along a direction
    direction = jax.tree.map(lambda leaf: jnp.sign(leaf) * jnp.abs(leaf).mean(), gradient)
    along = sum(
        float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )

    def moved(by):
        return float(loss_of("reference", jax.tree.map(lambda w, d: w + by * d, weights, direction), jnp.nan))

    assert (moved(0.002) - moved(-0.002)) / 0.004 == pytest.approx(along, rel=0.02)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_implementations_without_a_gradient_name_the_one_that_has_it(implementation):
    _, _, weights, _ = tiny(implementation)
    with pytest.raises(
        NotImplementedError, match=rf"no gradient with implementation '{implementation}'; 'reference'"
    ):
        jax.jit(jax.grad(partial(loss_of, implementation)))(weights, 0.0)
