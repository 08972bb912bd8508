"""What the engine is given (`Request`) and what runs (`Sequence`). Host values only, no jax."""

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jaxinfer.outputs import Logprob, RequestMetrics
from jaxinfer.sampling.params import MAX_TOKENS, SamplingParams, integer

if TYPE_CHECKING:
    from jaxinfer.sampling.logprob_arrays import LogprobArrays

MAX_LOGPROB_ENTRIES = 2**22  # that one request may ask for in all: about 1 GiB of host memory
MAX_ARRAY_ENTRIES = 2**27  # likewise, where they come as arrays


class TopK(NamedTuple):
    """Logprobs as arrays (`LogprobArrays`), with so many of the best tokens at each; None: none."""

    prompt: int | None
    output: int | None


def hash64(seed: int, name: int | str) -> int:
    """The seed of a request that names none: 64 bits that depend on the seed of all and the request's own name."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest())


@dataclass(frozen=True)
class Request:
    """What the user sent, resolved by the engine: token ids, the model's united end ids, a definite seed."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    end_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0  # seconds on the engine's monotonic clock
    priority: int = 0  # lower runs first; equal priorities in order of arrival
    seed: int = 0  # [0, 2^64): params.seed, or drawn by the engine
    score_from: int = 1  # index of the first prompt token that prompt_logprobs tell about, at least 1
    prompt: str | None = None
    cache_salt: str = (
        ""  # whatever else changes K/V for this request (adapter name): its pages are shared only within it
    )
    arrays: TopK | None = None  # logprobs in this form, instead of what params.*logprobs ask for

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(
                f"request {self.request_id}: the prompt has no tokens; give at least one (BOS will do)"
            )
        object.__setattr__(self, "priority", integer("priority", self.priority, -MAX_TOKENS, MAX_TOKENS))

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each prompt token (-1: all); None: no logprobs."""
        return self.params.prompt_logprobs if self.arrays is None else self.arrays.prompt

    @property
    def num_logprobs(self) -> int | None:
        """Likewise of output tokens."""
        if self.arrays is not None:
            return self.arrays.output
        return (self.params.logprobs or 0) if self.params.wants_logprobs else None


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no pages and no row
    RUNNING = "running"
    PREEMPTED = "preempted"  # leaves its row as soon as no step in flight can write to its pages, then waits
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """The running record of one sample of a request, written by the scheduler but for the last fields."""

    request: Request
    index: int = 0  # which of the n samples
    order: int = 0  # submission number: first come, first served within a priority
    token_ids: list[int] = field(default_factory=list)  # prompt + output, as far as the host knows them
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = 0  # prompt + output tokens at which it ends with "length"
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1  # in [0, max_num_seqs) while running
    pages: list[list[int]] = field(default_factory=list)  # of each KV group; see page_groups
    num_computed_tokens: int = 0  # tokens whose K/V is in the pages, steps in flight included
    num_pending_tokens: int = 0  # sampled by steps in flight; their ids are on the device only
    num_steps_in_flight: int = 0
    page_keys: list[bytes] = field(default_factory=list)  # prefix-cache keys of its first full pages
    num_registered_pages: int = 0
    claims: set[bytes | str] = field(default_factory=set)  # prefixes it computes while others wait for them
    num_cached_tokens: int = 0  # prompt tokens not computed, at first admission
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop id or stop string; None for an end id of the model
    # Filled by the engine:
    metrics: RequestMetrics | None = None
    logprobs: "list[dict[int, Logprob]] | LogprobArrays" = field(default_factory=list)
    prompt_logprobs: "list[dict[int, Logprob] | None] | LogprobArrays" = field(default_factory=list)
    cumulative_logprob: float = 0.0
    error: str | None = None  # why a token could not be drawn or scored, and which

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def scores_prompt(self) -> bool:
        """Whether its prefill is to find the logprobs of the prompt: the first sample's, once."""
        return (
            self.request.num_prompt_logprobs is not None and self.index == 0 and self.num_output_tokens == 0
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those sampled in flight included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def max_resident_tokens(self) -> int:
        """Tokens of it that can ever be in pages: the last one drawn is no input."""
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def ends_in_flight(self) -> bool:
        """Whether the tokens in flight bring it to its maximal length: there is nothing left to schedule."""
        return self.num_pending_tokens > 0 and self.num_tokens >= self.max_total_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def key(self) -> tuple[int, int, int]:
        """Who goes first: priority, then arrival, then sample index."""
        return (self.request.priority, self.order, self.index)

    def append(self, token: int) -> bool:
        """Takes in a sampled token. True, with the reason set, if it ends the sequence.

        End ids come before the user's stop ids, both before the length. The first token that may end the
        sequence is number min_tokens + 1.
        """
        self.token_ids.append(token)
        params = self.request.params
        if len(self.token_ids) - self.num_prompt_tokens > params.min_tokens:
            if token in self.request.end_token_ids and not params.ignore_eos:
                self.finish_reason = "stop"
            elif token in params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
        if self.finish_reason is None and len(self.token_ids) >= self.max_total_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None
