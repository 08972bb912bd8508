"""Writes tests/golden/text/sentencepiece.json: ids by the sentencepiece library (pip install sentencepiece).

With a text file as argument it first trains tests/data/shakespeare.tokenizer.model again.
"""

import json
import sys
from pathlib import Path

import sentencepiece

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
import text_fixtures as fixtures  # noqa: E402

MODEL = TESTS / "data" / "shakespeare.tokenizer.model"


def train(text_file: Path) -> None:
    lines = text_file.read_text()[:60_000].split("\n")
    with MODEL.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=480,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<think>"],
            control_symbols=["<|user|>"],
        )


def main() -> None:
    for file in sys.argv[1:]:
        train(Path(file))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    # Added tokens are left out: this library puts the prefix space before them, transformers and llama.cpp behind.
    texts = [*fixtures.TEXTS, "First Citizen:  the inn", "We are accounted poor citizens.\n"]
    cases = [
        {"text": text, "ids": processor.encode(text), "decoded": processor.decode(processor.encode(text))}
        for text in texts
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (TESTS / "golden" / "text" / "sentencepiece.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
