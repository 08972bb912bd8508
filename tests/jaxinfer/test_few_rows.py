"""LLM(few_rows=...): the codes of a GGUF file serve few rows, and the log says so; what cannot be is refused."""

import logging

import jax
import numpy as np
import pytest
import tokenizers
from tiny_models import make_tiny, write_gguf

from jaxinfer import LLM, SamplingParams
from jaxinfer.options.defaults import few_rows
from jaxinfer.options.device_facts import DeviceFacts, instruction_sets
from jaxinfer.text.tokenizer import Tokenizer

PROMPT = [3, 7, 11, 2, 9]


CPU = DeviceFacts("cpu", "cpu", 2**30)
AVX2 = DeviceFacts("cpu", "cpu", 2**30, instruction_sets=frozenset({"avx2"}))
TPU = DeviceFacts("tpu", "TPU v5 lite", 2**30)


@pytest.fixture
def gguf(tmp_path):
    def write(kind):
        write_gguf(tmp_path / "m.gguf", *make_tiny("llama_gqa"), tensor_type=kind)
        return tmp_path / "m.gguf"

    return write


def start(path, **options):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    )  # the files have none
    tokenizer = Tokenizer(backend, None, frozenset(), {}, {})
    return LLM(path, tokenizer=tokenizer, max_model_len=64, num_pages=12, background_compile=False, **options)


def answer(path, **options):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with start(path, **options) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        found = output.outputs[0]
        logprobs = [entry[i].logprob for entry, i in zip(found.logprobs, found.token_ids, strict=True)]
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.weights))
        assert llm.plan.weights_bytes == num_bytes
        return list(found.token_ids), logprobs, num_bytes


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_answers_as_the_matrices_do(gguf, kind):
    # The oracle is the plain product with the dequantized matrices; both are float32 sums of the same values.
    path = gguf(kind)
    full_ids, full_logprobs, full_bytes = answer(path, few_rows="full")
    ids, logprobs, num_bytes = answer(path, few_rows="packed")
    assert ids == full_ids
    np.testing.assert_allclose(logprobs, full_logprobs, atol=2e-5)
    assert num_bytes > full_bytes


def test_auto_says_what_it_took(gguf, caplog):
    with caplog.at_level(logging.INFO, "jaxinfer"):
        answer(gguf("Q4_1"))
    assert any("products of few rows" in record.getMessage() for record in caplog.records)


def test_packed_is_refused_without_codes(gguf):
    with pytest.raises(ValueError, match="no GGUF file with matrices in Q4_0"):
        start(gguf("F32"), few_rows="packed")


@pytest.mark.parametrize("option", [{"batch_invariant": True}, {"quantize": "w8a8"}])
def test_packed_is_refused_beside_other_products(gguf, option):
    with pytest.raises(ValueError, match="multiply in one way alone"):
        start(gguf("Q4_1"), few_rows="packed", **option)


def test_unknown_name_is_refused(gguf):
    with pytest.raises(ValueError, match="few_rows='int4' must be one of auto, full, packed"):
        start(gguf("Q4_1"), few_rows="int4")


def test_other_weights_need_the_full_form(gguf):
    with start(gguf("Q4_1"), few_rows="packed") as llm, pytest.raises(ValueError, match="few_rows='full'"):
        llm.update_weights(llm.engine.weights)


def test_the_table_is_asked_on_cpus_alone():
    assert few_rows("auto", TPU, True, True).value == "full"
    assert few_rows("auto", AVX2, False, True).value == "full"
    assert few_rows("auto", AVX2, True, False).value == "full"
    assert few_rows("auto", AVX2, True, True).value == "packed"
    assert few_rows("auto", CPU, True, True).value == "full"


def test_features_of_a_cpu_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 fma\n")
    assert instruction_sets(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert instruction_sets(tmp_path / "none") == frozenset()
