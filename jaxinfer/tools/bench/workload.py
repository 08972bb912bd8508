"""Requests of a benchmark: random token ids of drawn lengths, or those of a file, and when each one comes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.metrics import Work
from jaxinfer.text.prompts import Prompt

FIRST_ID, LAST_ID = 100, 40_000  # of random prompts; most vocabularies have their special tokens elsewhere
DATASET_KEYS = {"prompt", "prompt_token_ids", "max_tokens"}


@dataclass(frozen=True)
class Offer:
    """One request."""

    prompt: Prompt  # token ids or text
    output_len: int
    time_s: float = 0.0  # when it comes, from the start of the run on


@dataclass(frozen=True)
class Lengths:
    """How lengths are drawn: "fixed" (n), "uniform" (low, high; both ends) or "lognormal" (median, sigma)."""

    kind: str
    numbers: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> "Lengths":
        """From N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA (sigma of the logarithm).

        Raises:
          ValueError: it is none of these.
        """
        kind, *parts = text.split(":") if ":" in text else ("fixed", text)
        try:
            numbers = tuple(float(part) for part in parts)
        except ValueError:
            numbers = ()
        whole = all(number == int(number) for number in numbers if math.isfinite(number))
        good = {
            "fixed": len(numbers) == 1 and whole and numbers[0] >= 1,
            "uniform": len(numbers) == 2 and whole and 1 <= numbers[0] <= numbers[1],
            "lognormal": len(numbers) == 2 and numbers[0] >= 1 and 0 <= numbers[1] <= 10,
        }
        if not good.get(kind) or not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"lengths {text!r} must be N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, with lengths of at least 1"
            )
        return Lengths(kind, numbers)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """i64[count], at least 1 each."""
        if self.kind == "fixed":
            return np.full(count, int(self.numbers[0]))
        low, high = self.numbers
        if self.kind == "uniform":
            return rng.integers(int(low), int(high) + 1, count)
        return np.maximum(1, np.rint(rng.lognormal(math.log(low), high, count))).astype(np.int64)


def random_offers(
    count: int, prompt: Lengths, output: Lengths, *, vocab_size: int, max_model_len: int, seed: int = 0
) -> list[Offer]:
    """`count` requests of random token ids; longer ones are cut to `max_model_len`, prompt first."""
    rng = np.random.default_rng(seed)
    prompts, outputs = prompt.draw(rng, count), output.draw(rng, count)
    outputs = np.minimum(outputs, max_model_len - 1)
    prompts = np.minimum(prompts, max_model_len - outputs)
    last = min(LAST_ID, vocab_size)
    first = min(FIRST_ID, last - 1)
    return [
        Offer(rng.integers(first, last, length).tolist(), int(out))
        for length, out in zip(prompts, outputs, strict=True)
    ]


def read_offers(path: Path, output: Lengths, *, count: int | None = None, seed: int = 0) -> list[Offer]:
    """The first `count` requests of a file of JSON lines: {"prompt": text} or {"prompt_token_ids": [...]}.

    `max_tokens` beside it is the output length; lines without it draw one from `output`.

    Raises:
      ValueError: a line is something else; the message has its number.
    """
    offers: list[Offer] = []
    rng = np.random.default_rng(seed)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if count is not None and len(offers) == count:
                break
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(value, dict) or ("prompt" in value) == ("prompt_token_ids" in value):
                raise ValueError(f"{path} line {number} must be an object with prompt or prompt_token_ids")
            unknown = sorted(value.keys() - DATASET_KEYS)
            if unknown:
                raise ValueError(f"{path} line {number} has {unknown[0]!r}; known are {sorted(DATASET_KEYS)}")
            length = value.get("max_tokens", int(output.draw(rng, 1)[0]))
            if not isinstance(length, int) or length < 1:
                raise ValueError(
                    f"{path} line {number}: max_tokens={length!r} must be a whole number from 1 on"
                )
            prompt = value["prompt"] if "prompt" in value else value["prompt_token_ids"]
            offers.append(Offer(prompt, length))
    if not offers:
        raise ValueError(f"{path} has no requests")
    return offers


def at_rate(offers: Sequence[Offer], rate: float, seed: int = 0) -> list[Offer]:
    """The same requests as a Poisson process of `rate` per second; infinite: all at once.

    Raises:
      ValueError: the rate is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate={rate} must be more than 0 requests per second, or inf for all at once")
    if math.isinf(rate):
        return list(offers)
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(offers)))
    return [Offer(offer.prompt, offer.output_len, float(t)) for offer, t in zip(offers, times, strict=True)]


def least_work(lengths: Sequence[tuple[int, int]]) -> Work:
    """What requests of (prompt, output) lengths need, whatever the engine does: the static card.

    Every prompt in one piece, and as few forwards as the longest output has tokens.
    """
    work = Work()
    work.add_step((0, prompt, 1) for prompt, _ in lengths)
    work.add_step((prompt, 1, output - 1) for prompt, output in lengths if output > 1)
    return work
