"""Writes tests/golden/text/: token ids and chat prompts of the tokenizers in tests/text_fixtures.py.

All by transformers. With the path of SmolLM2-135M-Instruct.Q4_1.gguf it also writes smollm2.json, from transformers'
own reading of the GGUF file.
"""

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
import text_fixtures as fixtures  # noqa: E402

GOLDEN = TESTS / "golden" / "text"
NOW = datetime(2025, 3, 9, 12, 30)  # also in tests/jaxinfer/test_chat.py

OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "tools": [fixtures.WEATHER_TOOL]},
    {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False, "date": "1 Jan 2000"}},
]


class PinnedClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


def chat_case(tokenizer: Any, template: str, conversation: str, options: dict[str, Any]) -> dict[str, Any]:
    case: dict[str, Any] = {"template": template, "conversation": conversation, "options": options}
    call = dict(options)
    call |= call.pop("chat_template_kwargs", {})
    try:
        case["ids"] = tokenizer.apply_chat_template(
            fixtures.CONVERSATIONS[conversation],
            chat_template=fixtures.TEMPLATES[template],
            tokenize=True,
            return_dict=False,
            **call,
        )
    except Exception as error:
        case["error"] = str(error).splitlines()[0]
    return case


def chat_cases(tokenizer: Any) -> list[dict[str, Any]]:
    return [
        chat_case(tokenizer, template, conversation, options)
        for template in fixtures.TEMPLATES
        for conversation in fixtures.CONVERSATIONS
        for options in OPTIONS
    ]


def write(name: str, value: Any) -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value)
    (GOLDEN / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    chat_template_utils.datetime = PinnedClock
    with tempfile.TemporaryDirectory() as folder:
        for name, backend, config in (
            ("byte_level", fixtures.byte_level(), fixtures.BYTE_LEVEL_CONFIG),
            ("sentencepiece", fixtures.sentencepiece(), fixtures.SENTENCEPIECE_CONFIG),
        ):
            path = fixtures.save(Path(folder) / name, backend, config)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
            write(f"chat_{name}.json", chat_cases(tokenizer))
    for file in map(Path, sys.argv[1:]):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        # transformers' reading of the file leaves digits together; this is the published pre-tokenizer.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        texts = fixtures.TRICKY + fixtures.MGSM_LINES + [" ".join(fixtures.EMOJI)]
        cases = [{"text": text, "ids": tokenizer(text).input_ids} for text in texts]
        for options in OPTIONS[:3]:
            for conversation in ("one", "system", "history", "last_assistant"):
                messages = fixtures.CONVERSATIONS[conversation]
                ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
                cases.append({"conversation": conversation, "options": options, "ids": ids})
        write("smollm2.json", cases)


if __name__ == "__main__":
    main()
