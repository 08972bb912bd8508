"""What tests of batch jobs share: a model, the engine that runs it, mixed requests, readers of outputs."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted
import text_fixtures
from tiny_models import write_hf

from jaxinfer.llm import LLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.tools.batch_runner import journal

VOCAB, ROWS = 320, 4
OPTIONS = [
    *("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", "16", "--decode-steps", "1"),
    *("--page-size", "16", "--num-pages", "64", "--max-model-len", "160", "--max-tokens", "8"),
]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.token_to_id({" ": "Ġ", "\n": "Ċ"}.get(char, char)) for char in text]


def write_model(folder: Path) -> SimpleNamespace:
    """A model that answers a chat with "Dublin.", continues "?" with " Yes!" and "(" with "()()..." for ever."""
    tokenizer = text_fixtures.byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    table = planted.random_table(VOCAB, "batch")
    for text in ("\nDublin.", "? Yes!"):
        table = planted.plant_chain(table, [*ids_of(tokenizer, text), end])
    table = planted.plant_chain(table, ids_of(tokenizer, "()("))
    config, weights = planted.make_planted(table)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(
        write_hf(folder, config, weights), tokenizer, text_fixtures.BYTE_LEVEL_CONFIG | template
    )
    return SimpleNamespace(path=str(folder), table=table, tokenizer=tokenizer)


@functools.cache
def cached_llm(path: str, options: tuple[tuple[str, Any], ...]) -> LLM:
    """Few programs, since most of the time of these tests is spent compiling."""
    steps = dict(options)["decode_steps"]
    buckets = Buckets(((16, ROWS),), decode=(ROWS,), decode_steps=steps, multi_step=(ROWS,))
    return LLM(path, buckets=buckets, **{"background_compile": False, **dict(options)})


def records(path: Path) -> list[dict]:
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    lines = [journal.load_record(line) for line in data.splitlines(keepends=True)]
    assert None not in lines, "a line is damaged"
    return lines  # type: ignore[return-value]


def by_id(path: Path) -> dict[str, dict]:
    found = records(path)
    result = {record["custom_id"]: record for record in found}
    assert len(result) == len(found), "an id is there twice"
    return result


def text(record: dict[str, Any]) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def mixed(count: int) -> list[dict]:
    """Requests of several lengths and kinds, sampled ones too; the ids tell their number."""
    kinds = [
        lambda i: {"prompt": f"is {i}?"},
        lambda i: {"messages": [{"role": "user", "content": f"{i}"}]},
        lambda i: {"prompt": f"{i}(", "max_tokens": 1 + i % 7},
        lambda i: {
            "prompt": f"{i} x",
            "temperature": 1.0,
            "max_tokens": 1 + i % 11,
            "return_token_ids": True,
        },
    ]
    return [kinds[i % 4](i) | {"custom_id": f"id {i}"} for i in range(count)]
