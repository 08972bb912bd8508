"""Writes tests/golden/eval.npz: logprobs of the choices of every item of tests/eval_items.py, by transformers."""

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2 import GOLDEN, load_tokenizer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval_items import Item, make_items

OPTIONS_EVERY = 8  # of the items only these have scores of their options, which take longer


class Scorer:
    """Logprobs in float64 from float32 logits; what a prompt shares with the one before stays in the KV cache."""

    def __init__(self, file: Path) -> None:
        self.tokenizer = load_tokenizer(file)
        self.model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.prompt: list[int] = []
        self.cache: Any = None

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def forward(self, ids: list[int], keep: int) -> torch.Tensor:
        """Log-softmax at the positions of `ids`, which stand behind the first `keep` tokens of the cache."""
        surplus = 0 if self.cache is None else self.cache.get_seq_length() - keep
        if surplus:
            self.cache.crop(-surplus)
        out = self.model(torch.tensor([ids]), past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        return out.logits[0].double().log_softmax(-1)

    def score(self, item: Item, kinds: tuple[str, ...]) -> tuple[list[float], list[float], int]:
        """(logprobs of the letters, of the options, checksum of all token ids); NaN for what is not in `kinds`."""
        prompt = self.ids(item.prompt)
        shared = 0  # tokens; the last one is always computed
        while shared < min(len(prompt) - 1, len(self.prompt)) and prompt[shared] == self.prompt[shared]:
            shared += 1
        self.prompt = prompt
        last = self.forward(prompt[shared:], shared)[-1]
        letters, options, seen = [], [], []
        for kind, found in (("letters", letters), ("options", options)):
            for text in item.continuations(kind):
                ids = self.ids(item.prompt + text)
                assert ids[: len(prompt)] == prompt
                after = ids[len(prompt) :]
                total = float(last[after[0]]) if kind in kinds else float("nan")
                if kind in kinds and len(after) > 1:
                    rest = self.forward(after[:-1], len(prompt))
                    total += sum(float(rest[i, token]) for i, token in enumerate(after[1:]))
                found.append(total)
                seen += ids
        return letters, options, zlib.crc32(np.array(seen, "<i4").tobytes())


@torch.inference_mode()
def main(file: Path) -> None:
    scorer = Scorer(file)
    items = make_items()
    scored = []
    for i, item in enumerate(items):
        scored.append(scorer.score(item, ("letters", "options") if i % OPTIONS_EVERY == 0 else ("letters",)))
        if i % 20 == 0:
            print(f"{i}/{len(items)}", flush=True)
    letters, options, checksums = (np.array(column) for column in zip(*scored))  # noqa: B905
    for name, values in (("letters", letters), ("options", options)):
        here = ~np.isnan(values[:, 0])
        best = np.sort(values[here], axis=1)
        right = (values.argmax(1) == [item.answer for item in items])[here].mean()
        print(f"{name}: accuracy {right:.3f}, smallest lead {(best[:, -1] - best[:, -2]).min():.6f}")
    np.savez_compressed(
        GOLDEN / "eval.npz",
        letters=letters.astype("f4"),
        options=options.astype("f4"),
        checksums=checksums.astype("u4"),
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: eval_scores.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf")
    main(Path(sys.argv[1]).resolve())
