"""Who asks for what, when: lengths like those of a real service, arriving at random."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths by their quantiles at QUANTILES, taken as independent of each other.

    In between they are interpolated, so moments are near those of the source, not equal to them.
    """

    source: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    requests_per_second: float  # seen by that service


# Microsoft Azure LLM inference trace of 2023-11-16 (Azure/AzurePublicDataset, CC-BY-4.0; Patel et al.,
# "Splitwise", ISCA 2024): 19,366 requests of a chat service and 8,819 of a code completion service, nearest-rank
# quantiles. Prompt and output lengths are nearly uncorrelated there (-0.11 and 0.00).
LENGTHS = {
    "conv": Lengths(
        "Azure LLM inference trace 2023, conversation",
        (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
        5.53,
    ),
    "code": Lengths(
        "Azure LLM inference trace 2023, code",
        (3, 17, 75, 147, 578, 1469, 2745, 5186, 7302, 7436, 7437),
        (6, 6, 6, 7, 9, 13, 24, 55, 90, 252, 1899),
        2.57,
    ),
}


@dataclass(frozen=True)
class Arrival:
    time_s: float
    prompt_len: int
    output_len: int


def quantile(table: Sequence[int], share: float) -> int:
    """The length below which `share` of the requests lie."""
    upper = min(bisect_right(QUANTILES, share), len(QUANTILES) - 1)
    low, high = QUANTILES[upper - 1], QUANTILES[upper]
    return round(table[upper - 1] + (table[upper] - table[upper - 1]) * (share - low) / (high - low))


def arrivals(
    lengths: Lengths, num_requests: int, rate: float, *, max_model_len: int, seed: int = 0
) -> Iterator[Arrival]:
    """Requests as a Poisson process, in the order of their times.

    Args:
      rate: requests per second; infinite for all at time 0.
      max_model_len: longer requests are cut to it, prompt first, as a client has to.
    """
    if rate <= 0:
        raise ValueError(f"rate={rate} must be more than 0 requests per second")
    draw = random.Random(seed)
    now = 0.0
    for _ in range(num_requests):
        now += draw.expovariate(rate) if rate != float("inf") else 0.0
        output = min(quantile(lengths.output, draw.random()), max_model_len - 1)
        prompt = min(quantile(lengths.prompt, draw.random()), max_model_len - output)
        yield Arrival(now, prompt, output)
