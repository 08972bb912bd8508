"""A request that has no token to draw, or whose logits are not finite, ends with an error, and it alone."""

import asyncio
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
import text_fixtures
from engines import PLANTED_VOCAB, drain, greedy_params, make_engine, planted_table, submit
from engines import generate as generate_ids
from tiny_models import write_hf
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.llm import LLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tools.batch_runner.tasks import parse
from jaxinfer.tools.batch_runner.window import Window

VOCAB = 320
OPTIONS = dict(
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_pages=96,
    page_size=8,
    decode_steps=4,
)
FEW_PROGRAMS = dict(buckets=Buckets(((32, 4),), (4,), 4, (4,)), few_rows="full", background_compile=False)
TOKENIZER = text_fixtures.byte_level()
A, B, POISON = (TOKENIZER.token_to_id(char) for char in "abZ")
END = TOKENIZER.token_to_id("<|im_end|>")
# fields -> the number of the output token at which nothing is left
EMPTY = {
    "allowed and bad": (dict(allowed_token_ids=[A], bad_words=["a"]), 1),
    "only the end, too early": (dict(allowed_token_ids=[END], min_tokens=5), 1),
    "a bad word of three tokens": (dict(allowed_token_ids=[A], bad_words=["aaa"]), 3),
    "a bad word of seven tokens": (dict(allowed_token_ids=[A], bad_words=["aaaaaaa"]), 7),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedding of the token of "Z" is NaN."""
    config, weights = planted.make_planted(planted.random_table(VOCAB, "no token"))
    weights["model.embed_tokens.weight"][POISON] = np.nan
    folder = write_hf(tmp_path_factory.mktemp("no_token") / "planted", config, weights)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(folder, TOKENIZER, text_fixtures.BYTE_LEVEL_CONFIG | template)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS, **FEW_PROGRAMS) as llm:
        yield llm


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def assert_idle(llm):
    llm.engine.drain()
    assert not llm.engine.has_unfinished and llm.engine.scheduler.allocator.num_used == 0


def assert_failed(output, number, why):
    """It ended at that output token, and what came before is there."""
    assert output.finished and output.error.startswith(f"output token {number} cannot be drawn: {why}")
    (sample,) = output.outputs
    assert sample.finish_reason == "error" and len(sample.token_ids) == number - 1


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_candidate_ends_with_an_error_and_its_neighbours_do_not_notice(
    llm, case, temperature
):
    fields, number = EMPTY[case]
    neighbours = [SamplingParams(temperature=t, seed=5, max_tokens=12) for t in (0, 1)]
    alone = [generate(llm, "xy", params)[0].outputs[0] for params in neighbours]
    failing = SamplingParams(temperature=temperature, max_tokens=12, **fields)
    first, bad, second = generate(llm, ["xy", "xy", "xy"], [neighbours[0], failing, neighbours[1]])
    assert_failed(bad, number, "no token is left")
    assert bad.outputs[0].text == "a" * (number - 1)
    for output, expected in zip((first, second), alone, strict=True):
        assert output.error is None and output.outputs[0].token_ids == expected.token_ids
    assert_idle(llm)


def test_a_single_prompt_raises_the_error(llm):
    fields, _ = EMPTY["a bad word of three tokens"]
    params = SamplingParams(temperature=0, max_tokens=9, **fields)
    with pytest.raises(ValueError, match="output token 3 cannot be drawn: no token is left"):
        generate(llm, "xy", params)
    message = [{"role": "user", "content": "xy"}]
    with pytest.raises(ValueError, match="output token 3 cannot be drawn"):
        llm.chat(message, params, use_tqdm=False)
    assert_failed(llm.chat([message], params, use_tqdm=False)[0], 3, "no token is left")
    assert_idle(llm)


def test_streams_end_with_the_error(llm):
    fields, _ = EMPTY["a bad word of seven tokens"]
    params = SamplingParams(temperature=0, max_tokens=20, **fields)
    outputs = list(llm.stream("xy", params))
    assert not any(output.finished for output in outputs[:-1])
    assert_failed(outputs[-1], 7, "no token is left")

    async def last():
        return [output async for output in llm.astream("xy", params)][-1]

    assert_failed(asyncio.run(last()), 7, "no token is left")
    assert_idle(llm)


def test_one_sample_of_several_that_fails_ends_its_request(llm):
    # A sample goes on as long as it draws "a"; after "b" nothing is left.
    params = SamplingParams(
        n=8, seed=1, max_tokens=30, allowed_token_ids=[A, B], bad_words=["ba", "bb"], temperature=3.0
    )
    (output,) = generate(llm, ["xy"], [params])
    reasons = [sample.finish_reason for sample in output.outputs]
    assert "error" in reasons and set(reasons) <= {"error", "abort", "length"}
    failed = [sample for sample in output.outputs if sample.finish_reason == "error"]
    messages = [
        f"sample {s.index}: output token {len(s.token_ids) + 1} cannot be drawn: no token" for s in failed
    ]
    assert any(output.error.startswith(message) for message in messages)
    assert all(sample.token_ids[-1] == B for sample in failed)
    assert_idle(llm)


def test_a_nan_reaches_the_request_that_meets_it_and_no_other(llm):
    params = [SamplingParams(temperature=t, seed=3, max_tokens=9) for t in (0, 0, 1, 1)]
    alone = [generate(llm, "xy", each)[0].outputs[0].token_ids for each in params]
    outputs = generate(llm, ["xy", "xZ", "xy", "xZ"], params)
    for i in (1, 3):
        assert_failed(outputs[i], 1, "the logits are not finite")
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [alone[0], alone[2]]
    # ... in the middle of several steps of one program: "Z" is drawn as token 2, and token 3 is none.
    forced = SamplingParams(
        temperature=0, max_tokens=9, bad_words=["aa", "ZZ"], allowed_token_ids=[A, POISON]
    )
    (output,) = generate(llm, ["a"], [forced])
    assert output.error.startswith(
        f"output token {len(output.outputs[0].token_ids) + 1} cannot be drawn: the log"
    )
    assert output.outputs[0].token_ids[-1] == POISON
    assert_idle(llm)


def test_prompt_logprobs_and_loglikelihood_of_nan_are_errors(llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    good, bad = generate(llm, ["axyb", "axZyb"], params)
    assert good.error is None and len(good.prompt_logprobs) == 4
    # The first of a chunk that is hit: attention of tokens before the NaN, in its block, multiplies it by 0.
    assert re.match(r"prompt token [2-4] cannot be scored: the logits are not finite", bad.error)
    assert bad.outputs[0].finish_reason == "error"
    with pytest.raises(
        RuntimeError, match=r"pair 1: prompt token \d cannot be scored: the logits are not fin"
    ):
        llm.loglikelihood(["ax", "axZ", "bx"], ["b", "b", "b"], use_tqdm=False)
    # A long one, whose first chunk has it.
    with pytest.raises(RuntimeError, match=r"pair 0: prompt token \d cannot be scored"):
        llm.loglikelihood(["aZ"], ["b" * 90], use_tqdm=False)
    assert_idle(llm)


def test_logprobs_that_are_no_numbers_are_an_error_where_only_banned_tokens_are_nan(folder):
    """A NaN column of the head alone: a row that may not draw that token has a right draw, but no logprobs."""
    with LLM(folder, **OPTIONS, **FEW_PROGRAMS) as llm:
        weights = llm.engine.weights
        llm.update_weights(weights.replace(unembed=weights.unembed.at[B].set(jnp.nan)))
        plain, banned, scored = generate(
            llm,
            ["xy"] * 3,
            [
                SamplingParams(temperature=0, max_tokens=3),
                SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[A]),
                SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[A], logprobs=1),
            ],
        )
        assert_failed(plain, 1, "the logits are not finite")
        assert banned.error is None and len(banned.outputs[0].token_ids) == 3
        assert scored.error.startswith("output token 1 has no logprob: the logits are not finite")
        assert scored.outputs[0].finish_reason == "error"


def test_weights_that_overflow_or_turn_nan_are_found_in_every_variant(folder):
    kinds = [
        dict(temperature=0),
        dict(),
        dict(top_k=3),
        dict(top_p=0.5),
        dict(top_k=100, top_p=0.9, min_p=0.1),
        dict(presence_penalty=1),
        dict(temperature=0, logprobs=2),
        dict(logprobs=2),
    ]
    params = [SamplingParams(**{"max_tokens": 4, "seed": 1} | kind) for kind in kinds]
    with LLM(folder, logprobs_mode="processed", **OPTIONS, **FEW_PROGRAMS) as llm:
        weights = llm.engine.weights
        good = [output.outputs[0].token_ids for output in generate(llm, ["xy"] * len(kinds), params)]
        for scale in (3e30, 3e38, np.nan):  # finite, but their squares, or their products, are not
            llm.update_weights(jax.tree.map(lambda leaf, scale=scale: jnp.full_like(leaf, scale), weights))
            for output in generate(llm, ["xy"] * len(kinds), params):
                assert_failed(output, 1, "the logits are not finite")
            for each in params:
                with pytest.raises(ValueError, match="output token 1 cannot be drawn"):
                    generate(llm, "xy", each)
            with pytest.raises(RuntimeError, match="not finite"):
                llm.loglikelihood("x", ["y"], use_tqdm=False)
        llm.update_weights(weights)
        again = [output.outputs[0].token_ids for output in generate(llm, ["xy"] * len(kinds), params)]
        assert again == good


@pytest.mark.parametrize("budget", [9, 32])
def test_pages_beside_a_nan_serve_nobody_else(budget):
    """Prompts that share their first two pages with one that meets a NaN, in the same chunk or a later one."""
    engine = make_engine("llama_gqa", budget=budget)
    embed = engine.weights.embed
    poison = embed.shape[0] - 1
    start = list(range(20, 36))
    (good,) = generate_ids(engine, ([*start, 7, 8], greedy_params(6)))
    engine.update_weights(engine.weights.replace(embed=embed.at[poison].set(jnp.nan)))
    bad = [*start, 7, poison, 9]
    for ids in (bad, [*bad, 1, 2, 3]):
        (failed,), (together,) = submit(engine, (ids, greedy_params(6)), ([*start, 7, 8], greedy_params(6)))
        drain(engine)
        assert failed.finish_reason == "error" and "output token 1 cannot be drawn" in failed.error
        assert together.output_token_ids == good
        assert generate_ids(engine, ([*start, 7, 8], greedy_params(6))) == [good]


def ban_after(logits, rows, params):
    """Rules out everything from the fifth token of a row on."""
    return jnp.where((rows.num_tokens >= params["from"])[:, None], -jnp.inf, logits)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_processor_that_rules_out_all(temperature):
    engine = make_engine("planted", logits_processors=(ban_after,), logits_processor_args={"from": 1000})
    bad = SamplingParams(temperature=temperature, max_tokens=20, extra_args={"from": 5})
    (failed,), (fine,) = submit(engine, ([3, 4], bad), ([3, 4], greedy_params(6)))
    drain(engine)
    assert failed.finish_reason == "error" and failed.num_output_tokens == 3
    assert failed.error.startswith("output token 4 cannot be drawn: no token is left")
    assert fine.output_token_ids == planted.greedy(planted_table(), 4, 6)


@pytest.mark.parametrize(
    "processor, got",
    [
        (lambda logits, rows, params: logits[:, :-1], "float32[1, 63]"),
        (lambda logits, rows, params: logits.astype(jnp.bfloat16), "bfloat16[1, 64]"),
        (lambda logits, rows, params: None, "NoneType[]"),
    ],
)
def test_a_processor_that_returns_another_shape_or_dtype_is_named(processor, got):
    engine = make_engine("planted", logits_processors=(processor,))
    submit(engine, ([3], greedy_params(4)))
    with pytest.raises(ValueError) as error:
        engine.step()
    assert f"returned {got}" in str(error.value) and "<lambda>" in str(error.value)


def test_a_line_of_a_batch_job_fails_alone_and_the_job_exits_with_1(folder, tmp_path):
    lines = [
        {"custom_id": "good", "prompt": "xy", "max_tokens": 3},
        {"custom_id": "nan", "prompt": "xZ", "max_tokens": 3},
        {"custom_id": "empty", "prompt": "x", "allowed_token_ids": [A], "bad_words": ["aa"]},
        {"custom_id": "scored", "prompt": "xZ", "continuation": "b"},
        {"custom_id": "chat", "messages": [{"role": "user", "content": "Z"}]},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    result = CliRunner().invoke(
        app, ["batch", str(source), "-o", str(out), "-m", str(folder), "--max-tokens=9", *options]
    )
    assert result.exit_code == 1, result.output
    records = {record["custom_id"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert len(records) == len(lines)
    source.write_text(json.dumps(lines[0]) + "\n")
    alone = tmp_path / "alone.jsonl"
    command = ["batch", str(source), "-o", str(alone), "-m", str(folder), "--max-tokens=9", *options]
    assert CliRunner().invoke(app, command).exit_code == 0
    (choice,) = json.loads(alone.read_text())["response"]["body"]["choices"]
    assert records["good"]["response"]["body"]["choices"] == [choice] and choice["text"]
    assert records["good"]["error"] is None and records["good"]["response"]["status_code"] == 200
    messages = {
        "nan": "output token 1 cannot be drawn: the logits are not finite",
        "empty": "output token 2 cannot be drawn: no token is left",
        "scored": r"prompt token \d cannot be scored: the logits are not finite",
        "chat": "output token 1 cannot be drawn: the logits are not finite",
    }
    for key, message in messages.items():
        record = records[key]
        assert re.match(message, record["error"]["message"]) and record["response"]["status_code"] != 200


def test_a_window_gives_the_error_with_the_task(llm):
    window = Window(llm)
    task = parse({"custom_id": "1", "prompt": "xZ"}, 0, SamplingParams(max_tokens=3), 0)
    assert window.add(task) is None
    finished = []
    while not finished:
        finished = window.step()
    assert finished[0][0] is task
    assert_failed(finished[0][1], 1, "the logits are not finite")
    assert len(window) == 0
    assert_idle(llm)


def test_the_evaluation_adapter_raises(llm):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'jaxinfer[eval]'")
    from lm_eval.api.instance import Instance

    from jaxinfer.tools.eval_adapter import JaxinferLM

    lm = JaxinferLM(llm)

    def requests(kind, *arguments):
        return [Instance(kind, {}, each, 0) for each in arguments]

    with pytest.raises(RuntimeError, match=r"pair 1: prompt token \d cannot be scored"):
        lm.loglikelihood(requests("loglikelihood", ("x", "b"), ("xZ", "b")), disable_tqdm=True)
    with pytest.raises(ValueError, match="request 1: output token 1 cannot be drawn"):
        until = {"until": ["\n"], "max_gen_toks": 3}
        lm.generate_until(requests("generate_until", ("x", until), ("xZ", until)), disable_tqdm=True)


def test_ray_rows_have_the_error(llm):
    pytest.importorskip("pyarrow")
    from jaxinfer.tools import ray_data

    worker = ray_data.Worker.__new__(ray_data.Worker)
    vars(worker).update(
        vars(SimpleNamespace(_model="m", _defaults=SamplingParams(max_tokens=3), _seed=0, _llm=llm))
    )
    good, bad = worker.answer([{"custom_id": "1", "prompt": "xy"}, {"custom_id": "2", "prompt": "xZ"}])
    assert good["error"] is None and good["text"] is not None
    assert bad["error"].startswith("output token 1 cannot be drawn") and bad["text"] is None


def test_the_command_line_says_it_and_exits_with_1(folder):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    result = CliRunner().invoke(app, ["generate", "xZ", "-m", str(folder), "--max-tokens=9", *options])
    assert result.exit_code == 1
    assert "output token 1 cannot be drawn: the logits are not finite" in result.output


def test_priorities_of_another_kind_fail_their_request_alone(llm):
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["xy"] * 4, params, priority=[1, "high", 0.5, np.int64(0)], use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert "priority='high' must be an integer" in outputs[1].error
    assert_idle(llm)


def test_weights_that_are_no_arrays_are_named(llm):
    before = generate(llm, "xy", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    weights = llm.engine.weights
    with pytest.raises(ValueError, match=r"unembed is a str, this model has float32\[320, 320\]"):
        llm.update_weights(weights.replace(unembed="unembed.npy"))
    with pytest.raises(ValueError, match="the tree has no leaf"):
        llm.update_weights("weights.safetensors")
    after = generate(llm, "xy", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    assert after == before


@pytest.mark.parametrize("end", [-1, PLANTED_VOCAB, 4294967295])
def test_end_ids_outside_the_vocabulary_are_refused_and_ban_no_other_id(end):
    engine = make_engine("planted")
    with pytest.raises(ValueError, match=f"end_token_ids has {end}; token ids of this model are 0 to 63"):
        submit(engine, ([3], greedy_params(4, min_tokens=3)), ends=frozenset([end]))
    assert not engine.has_unfinished
