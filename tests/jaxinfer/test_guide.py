"""The recipes of docs/guide.md, run in their order, and what they make."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from batch_jobs import write_model

from jaxinfer import LLM
from jaxinfer.checkpoints.loading import named_leaves

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


@pytest.fixture(scope="module")
def scope(tmp_path_factory):
    """What the snippets have defined, each section's after those before it."""
    folder, before = tmp_path_factory.mktemp("guide"), Path.cwd()
    write_model(folder / "my-model")
    names: dict = {}
    os.chdir(folder)
    try:
        for section in GUIDE.read_text().split("\n## ")[1:]:
            title = section.splitlines()[0]
            blocks = re.findall(r"```python\n(.*?)```", section, re.S)
            assert blocks, f"no snippet in {title!r}"
            for code in blocks:
                exec(compile(code, f"guide: {title}", "exec"), names)
        yield names
    finally:
        os.chdir(before)


def test_a_state_dict_becomes_the_same_model(scope):
    with LLM("my-model", max_model_len=128) as llm:
        (plain,) = llm.generate("Hello?", scope["greedy"])
    with LLM("my-folder", max_model_len=128) as llm:
        (copied,) = llm.generate("Hello?", scope["greedy"])
    assert copied.outputs[0].text == plain.outputs[0].text == " Yes!"


def test_weights_that_are_updated_are_those_that_run(scope):
    with LLM("my-model", max_model_len=128) as llm:
        (expected,) = llm.generate([5, 6, 7], scope["greedy"])
    assert scope["trained_ids"] == expected.outputs[0].token_ids != scope["untrained_ids"]


def test_orbax_gives_back_the_same_tree(scope):
    trained, restored = dict(named_leaves(scope["trained"])), dict(named_leaves(scope["restored"]))
    assert trained.keys() == restored.keys()
    for name, leaf in trained.items():
        np.testing.assert_array_equal(leaf, restored[name])


def test_the_processor_pushes_the_requests_that_ask_for_it(scope):
    assert scope["pushed_ids"] == [9] * 4
    assert scope["plain_ids"] == scope["trained_ids"]


def test_embeddings_are_pooled_over_each_text_alone(scope):
    embeddings, config = np.asarray(scope["embeddings"]), scope["config"]
    assert embeddings.shape == (2, config.embed_dim)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=-1), 1, rtol=1e-5)
    tokens = scope["texts"][1]
    step = scope["batch"].pack([(tokens, 0, [3])], page_size=scope["page_size"])
    cache = scope["kv_cache"].init(scope["spec"])
    hidden, _ = scope["forward"].forward(scope["llama"], config, scope["trained"], cache, step)
    alone = np.asarray(hidden).mean(0)
    np.testing.assert_allclose(embeddings[1], alone / np.linalg.norm(alone), atol=1e-4)


def test_the_gradient_is_the_change_of_the_loss(scope):
    gradient, weights, tokens = scope["gradient"], scope["trained"], scope["texts"][0]
    leaves = jax.tree.leaves(gradient)
    assert np.isfinite(scope["value"]) and all(np.isfinite(leaf).all() for leaf in leaves)
    square = sum(float((leaf**2).sum()) for leaf in leaves)
    assert square > 0
    by = 1e-2 / np.sqrt(square)
    losses = [
        float(scope["loss"](jax.tree.map(lambda w, g, s=sign: w + s * by * g, weights, gradient), tokens))
        for sign in (1, -1)
    ]
    assert losses[0] - losses[1] == pytest.approx(2 * by * square, rel=0.05)
