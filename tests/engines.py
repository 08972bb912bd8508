"""Engines over tiny models, with few and small programs that all of them share."""

import itertools
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from planted import make_planted, random_table
from tiny_models import make_tiny, write_hf

from jaxinfer import checkpoints, models
from jaxinfer.engine import Engine
from jaxinfer.options.device_facts import facts_of
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.options.resolve import resolve
from jaxinfer.programs import compile_cache
from jaxinfer.programs.background import BackgroundCompiler
from jaxinfer.programs.buckets import Buckets
from jaxinfer.request import Request, Sequence
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.weights.weight_forms import ModelFacts

compile_cache.enable(compile_cache.default_folder())

GOLDEN = Path(__file__).parent / "golden" / "tiny"
ROWS, TOKENS, STEPS, PAGE_SIZE, MODEL_LEN = 4, 32, 4, 8, 160
BUCKETS = Buckets(
    prefill=((16, ROWS), (TOKENS, ROWS)), decode=(1, ROWS), decode_steps=STEPS, multi_step=(1, ROWS)
)
PLANTED_VOCAB = 64
CPU = facts_of(jax.devices("cpu")[0])
_programs: dict[Any, Any] = {}
_ids = itertools.count()


@cache
def load(name: str) -> tuple[Any, Any, Any]:
    """(model file, config, weights) of a tiny model, of "planted" (table: `planted_table`), or of "wide"."""
    if name == "wide":  # random weights and a vocabulary that outgrows everything else
        model, config, _ = load("llama_gqa")
        config = replace(config, vocab_size=2**15)
        return model, config, model.init(config, jax.random.key(0))
    hf, tensors = make_planted(planted_table()) if name == "planted" else make_tiny(name)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoints.open_checkpoint(write_hf(Path(folder), hf, tensors))
        model = models.for_config(checkpoint.config)
        config = model.Config.from_hf(checkpoint.config)
        return model, config, checkpoints.load_weights(checkpoint, model, config, jnp.float32)


@cache
def planted_table() -> np.ndarray:
    return random_table(PLANTED_VOCAB, "engine tests")


def make_engine(
    name: str,
    *,
    num_pages: int = 96,
    budget: int = TOKENS,
    rows: int = ROWS,
    steps: int = STEPS,
    partial: int = 1,
    prefix_caching: bool = True,
    strict: bool = False,
    buckets: Buckets = BUCKETS,
    **options: Any,
) -> Engine:
    """A fresh engine, as LLM would resolve it; engines of the same model and pool share their compiled programs.

    options: other fields of LLMOptions.
    """
    model, config, weights = load(name)
    settings = LLMOptions(
        max_model_len=MODEL_LEN,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_num_partial_prefills=partial,
        decode_steps=steps,
        page_size=PAGE_SIZE,
        enable_prefix_caching=prefix_caching,
        strict_compile=strict,
        buckets=replace(buckets, decode_steps=steps),
        **{"background_compile": False} | options,
    )
    resolved = resolve(settings, ModelFacts(model, config, weights_given=True), CPU)
    spec = replace(resolved.spec, num_pages=num_pages)  # LLM would refuse a pool smaller than max_model_len
    programs = replace(resolved, spec=spec).compiler(weights=weights)
    if not strict and rows == ROWS and buckets is BUCKETS and not options:
        programs = _programs.setdefault((name, spec), programs)
    background = BackgroundCompiler(programs) if settings.background_compile else None
    engine = Engine(programs, weights, resolved.engine_config(), background=background)
    return engine


def submit(engine: Engine, *requests: tuple[list[int], SamplingParams], ends: frozenset[int] = frozenset()):
    """Queues requests; the sequences of each."""
    return [
        engine.add(Request(str(next(_ids)), tuple(int(t) for t in ids), params, ends, seed=params.seed or 0))
        for ids, params in requests
    ]


def drain(engine: Engine) -> None:
    """Steps until nothing is left, and checks that nothing leaked."""
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.allocator.check_invariants()
    assert engine.scheduler.allocator.num_used == 0


def generate(engine: Engine, *requests, ends: frozenset[int] = frozenset()) -> list[list[int]]:
    """Output ids of the first sample of each request."""
    sequences = submit(engine, *requests, ends=ends)
    drain(engine)
    return [of_request[0].output_token_ids for of_request in sequences]


def greedy_params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def assert_greedy(sequence: Sequence | list[int], golden: np.ndarray, gaps: np.ndarray) -> int:
    """Ids equal the oracle's; a first difference is tolerated only where its best two logits nearly tie.

    Returns how many tokens were compared.
    """
    ids = sequence if isinstance(sequence, list) else sequence.output_token_ids
    for i, (ours, theirs) in enumerate(zip(ids, golden.tolist(), strict=True)):
        if ours != theirs:
            assert gaps[i] < 1e-3, f"token {i}: {ours} instead of {theirs}, whose lead is {gaps[i]}"
            return i
    return len(golden)
