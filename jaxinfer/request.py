"""What a user sends (`SamplingParams`, `Request`), what runs (`Sequence`), what comes back (`RequestOutput`).

`SamplingParams` carries vLLM's field names and defaults. A value outside its range raises ValueError with
the field, the value and the range; a field of vLLM that does not act here raises TypeError with what to
use instead. Limits that need the model (vocabulary, `max_model_len`) are checked when the request is
submitted.
"""

import enum
import hashlib
import math
import numbers
import re
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.wording import shown

if TYPE_CHECKING:
    from jaxinfer.sampling.logprob_arrays import LogprobArrays

# Caps that keep one request from starving the others; all are documented in the field list of SamplingParams.
MAX_N = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_ENTRIES = 2**22  # that one request may ask for in all: about 1 GiB of host memory
MAX_ARRAY_ENTRIES = 2**27  # likewise, where they come as arrays
MAX_LABEL_IDS = 128  # stop_token_ids and logprob_token_ids
MAX_BIAS_ENTRIES = 1024  # logit_bias and bad_words
MAX_STOP_STRINGS = 64
MAX_STRING_CHARS = 1000  # of one stop string or bad word
MAX_TOKENS = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
GREEDY_BELOW = 1e-5  # a smaller temperature is greedy, as in vLLM: dividing by it would overflow float32

UNSUPPORTED_FIELDS = {
    "best_of": "use n and choose by cumulative_logprob",
    "use_beam_search": "beam search is not a sampling mode here",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "guided_decoding": "use allowed_token_ids, or LLM(logits_processors=[...])",
    "structured_outputs": "use allowed_token_ids, or LLM(logits_processors=[...])",
    "logits_processors": "pass functions to LLM(logits_processors=[...]) and their values in extra_args",
    "output_kind": "use LLM.stream for partial outputs",
    "spaces_between_special_tokens": "text is always one decode of all ids",
    "flat_logprobs": "logprobs are one dict per token",
}


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """`value` as a finite float in [low, high] (`(low, high]` when open_low), or ValueError."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if (
        not is_number
        or not math.isfinite(value)
        or not (low < value if open_low else low <= value)
        or value > high
    ):
        raise ValueError(
            f"{name}={shown(value)} must be a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise ValueError(f"{name}={shown(value)} must be an integer in [{low}, {high}]")
    return int(value)


def _many(name: str, values: Any, cap: int | None) -> list[Any]:
    """The items of a list field; `cap` bounds its length."""
    if values is None:
        return []
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={shown(values)} must be a list")
    items = list(values)
    if cap is not None and len(items) > cap:
        raise ValueError(f"{name} has {len(items)} entries; at most {cap} are allowed")
    return items


def _token_ids(name: str, values: Any, cap: int | None) -> tuple[int, ...]:
    return tuple(_integer(f"an id of {name}", v, 0, MAX_TOKENS) for v in _many(name, values, cap))


def check_characters(name: str, text: str) -> None:
    """Raises ValueError where Python's text cannot be UTF-8: it holds half of a surrogate pair."""
    if half := _SURROGATE.search(text):
        code, before = ord(half[0]), text[max(0, half.start() - 12) : half.start()]
        place = f"after {before!r}" if before else "at its beginning"
        if 0xDC80 <= code <= 0xDCFF:  # how Python reads other bytes of a command line or a file
            raise ValueError(f"{name} is not UTF-8: byte 0x{code - 0xDC00:02x} {place}")
        raise ValueError(f"{name} has half a surrogate pair, U+{code:04X}, {place}; that is no character")


def _strings(name: str, values: Any, cap: int) -> tuple[str, ...]:
    items = _many(name, values, cap)
    for text in items:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STRING_CHARS:
            raise ValueError(
                f"{name} holds {shown(text)}; each must be a string of 1 to {MAX_STRING_CHARS} characters"
            )
        check_characters(name, text)
    return tuple(items)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request: vLLM's names and defaults. Greedy is `temperature=0`.

    Raises ValueError (value out of range) or TypeError (a field that does not act here) on construction.
    """

    n: int = 1  # samples per prompt, 1 to 1024; they share the prompt's pages
    presence_penalty: float = 0.0  # [-2, 2], counts output tokens only
    frequency_penalty: float = 0.0  # [-2, 2], counts output tokens only
    repetition_penalty: float = 1.0  # (0, 100], counts prompt and output tokens
    temperature: float = 1.0  # [0, 100]; below 1e-5 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off; a value above the vocabulary is off too
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # [0, 2^64); None or -1: drawn by the engine
    stop: Collection[str] = ()  # None, one string, or at most 64 strings of 1 to 1000 characters
    stop_token_ids: Collection[int] = ()  # at most 128; ignore_eos does not touch them
    bad_words: Collection[str] = ()  # at most 1024, each 1 to 1000 characters
    logit_bias: Mapping[int, float] | None = None  # at most 1024 entries, each in [-100, 100]
    allowed_token_ids: Collection[int] | None = None  # not empty
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # switches off every end id of the model, not stop_token_ids
    min_tokens: int = 0  # no end before this many tokens: the first that may end is number min_tokens + 1
    max_tokens: int | None = 16  # None: up to max_model_len; 0: score the prompt only
    # Top entries per output token, 0 to 20, or -1 for the whole vocabulary (at most 2^22 entries a request).
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # likewise per prompt token, always of the raw distribution
    logprob_token_ids: Collection[int] | None = None  # at most 128: report these ids too, per output token
    truncate_prompt_tokens: int | None = (
        None  # keep the last so many prompt tokens; -1: all that fit beside max_tokens
    )
    skip_special_tokens: bool = True
    detokenize: bool = True
    extra_args: Mapping[str, Any] | None = None  # for LLM(logits_processors=[...])

    def __new__(cls, *args: Any, **kwargs: Any) -> "SamplingParams":
        for name in kwargs:
            if name in UNSUPPORTED_FIELDS:
                raise TypeError(f"SamplingParams has no {name}: {UNSUPPORTED_FIELDS[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1, MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), -2, 2))
        put("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True))
        put("temperature", _real("temperature", self.temperature, 0, 100))
        put("top_p", _real("top_p", self.top_p, 0, 1, open_low=True))
        put("min_p", _real("min_p", self.min_p, 0, 1))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, MAX_TOKENS)))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -1, 2**64 - 1)
            put("seed", None if seed == -1 else seed)
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 0, MAX_TOKENS))
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name), -1, MAX_LOGPROBS))
        if self.truncate_prompt_tokens is not None:
            kept = _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS)
            if kept == 0:
                raise ValueError("truncate_prompt_tokens=0 must be -1 or at least 1")
            put("truncate_prompt_tokens", kept)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be True or False")

        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        put("stop", _strings("stop", stop, MAX_STOP_STRINGS))
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: stop strings are matched in text")
        put("bad_words", _strings("bad_words", self.bad_words, MAX_BIAS_ENTRIES))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_LABEL_IDS))
        if self.logprob_token_ids is not None:
            put("logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LABEL_IDS))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids, None))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] leaves no token to sample; None means all are allowed")
        if self.logit_bias is not None:
            put("logit_bias", _logit_bias(self.logit_bias))
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ValueError(f"extra_args={shown(self.extra_args)} must be a dict")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def wants_logprobs(self) -> bool:
        """Whether output tokens come with logprobs."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on which tokens came so far (penalties, bad words)."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.bad_words)


def _logit_bias(bias: Any) -> dict[int, float]:
    """Keys as token ids (JSON gives them as strings of digits), values in [-100, 100]."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={shown(bias)} must be a dict of token id to number")
    if len(bias) > MAX_BIAS_ENTRIES:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {MAX_BIAS_ENTRIES} are allowed")
    result = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = _integer("a key of logit_bias", token, 0, MAX_TOKENS)
        result[token] = _real(f"logit_bias[{token}]", value, -100, 100)
    return result


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
        object.__setattr__(self, "priority", _integer("priority", self.priority, -MAX_TOKENS, MAX_TOKENS))

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
    token_times: array = field(default_factory=lambda: array("d"))  # one for each step that brought tokens

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
