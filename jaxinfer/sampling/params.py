"""What a user asks for: `SamplingParams`, with vLLM's field names and defaults. Host values only, no jax.

A value outside its range raises ValueError with the field, the value and the range; a field of vLLM that does not act
here raises TypeError with what to use instead. Limits that need the model (vocabulary, `max_model_len`) are checked
when the request is submitted.
"""

import math
import numbers
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.text.wording import shown

# Caps that keep one request from starving the others; all are documented in the field list of SamplingParams.
MAX_N = 1024
MAX_LOGPROBS = 20
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


def integer(name: str, value: Any, low: int, high: int) -> int:
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
    return tuple(integer(f"an id of {name}", v, 0, MAX_TOKENS) for v in _many(name, values, cap))


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

        put("n", integer("n", self.n, 1, MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), -2, 2))
        put("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True))
        put("temperature", _real("temperature", self.temperature, 0, 100))
        put("top_p", _real("top_p", self.top_p, 0, 1, open_low=True))
        put("min_p", _real("min_p", self.min_p, 0, 1))
        put("top_k", max(0, integer("top_k", self.top_k, -1, MAX_TOKENS)))
        if self.seed is not None:
            seed = integer("seed", self.seed, -1, 2**64 - 1)
            put("seed", None if seed == -1 else seed)
        put("min_tokens", integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 0, MAX_TOKENS))
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, integer(name, getattr(self, name), -1, MAX_LOGPROBS))
        if self.truncate_prompt_tokens is not None:
            kept = integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS)
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


SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


def _logit_bias(bias: Any) -> dict[int, float]:
    """Keys as token ids (JSON gives them as strings of digits), values in [-100, 100]."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={shown(bias)} must be a dict of token id to number")
    if len(bias) > MAX_BIAS_ENTRIES:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {MAX_BIAS_ENTRIES} are allowed")
    result = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = integer("a key of logit_bias", token, 0, MAX_TOKENS)
        result[token] = _real(f"logit_bias[{token}]", value, -100, 100)
    return result
