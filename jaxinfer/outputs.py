"""What comes back: results of requests, their logprobs and times. Host values only, no jax."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxinfer.sampling.logprob_arrays import LogprobArrays


@dataclass
class Logprob:
    logprob: float
    rank: int | None = (
        None  # 1 = the most probable token; None for logprob_token_ids that are not among the best
    )
    decoded_token: str | None = None  # text of the token alone: U+FFFD where it holds part of a character
    bytes: list[int] | None = None  # what the token stands for, exactly


@dataclass
class RequestMetrics:
    """Times of one request in seconds on one monotonic clock, None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    # one for each step that brought tokens
    token_times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def queue_s(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token on the host."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """(t_last - t_first) / (n - 1); None with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between tokens: from each step that brought some to the next that did.

        Tokens that one program of several steps draws come together, and are one step here.
        """
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: "list[dict[int, Logprob]] | LogprobArrays | None" = None  # one dict per output token
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: "list[dict[int, Logprob] | None] | LogprobArrays | None"  # entry 0 is None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    # Why this request was refused (no outputs then), or could not go on (finish_reason "error"), neighbours unaffected.
    error: str | None = None
    seed: int | None = None  # what it drew from: SamplingParams(seed=...) with it repeats the outputs


class Loglikelihood(NamedTuple):
    """How probable a continuation is after its prompt."""

    logprob: float  # of all its tokens
    is_greedy: bool  # each of its tokens is the most probable one at its place
    token_logprobs: list[float]  # one for each token of the continuation
