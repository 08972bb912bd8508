"""One line of the input as a request: OpenAI's batch form, or the body of it alone."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.sampling.params import SAMPLING_FIELDS, UNSUPPORTED_FIELDS, SamplingParams
from jaxinfer.tools.batch_runner.inputs import MAX_ID_CHARS, BadLine, Value, key_of

CHAT, COMPLETIONS, LOGLIKELIHOOD = "/v1/chat/completions", "/v1/completions", "/v1/loglikelihood"
ENVELOPE = {"custom_id", "method", "url", "body"}
# Fields of real files that cannot change an answer here. They are accepted and counted.
INERT = {
    "user",
    "metadata",
    "store",
    "stream",
    "stream_options",
    "model",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
# Fields of OpenAI's and vLLM's requests that do not act here -> values of them that ask for nothing.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "early_stopping": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
TEMPLATE_OPTIONS = {"tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
INTEGER_FIELDS = {
    "n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
}  # fmt: skip
FIELDS = {
    CHAT: {"messages", "max_completion_tokens", "top_logprobs", "return_token_ids"}
    | TEMPLATE_OPTIONS
    | SAMPLING_FIELDS,
    COMPLETIONS: {"prompt", "echo", "return_token_ids"} | SAMPLING_FIELDS,
    LOGLIKELIHOOD: {"prompt", "continuation", "return_token_ids"},
}
# Every token of the continuation gets its logprob, nothing is drawn.
SCORING = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
RANDOM_FIELDS = ("top_p", "top_k", "min_p")  # without a temperature these do nothing


@dataclass(frozen=True)
class Task:
    """A line that can be submitted."""

    line: int
    custom_id: str
    url: str
    prompt: str | list[int] | list[dict[str, Any]]  # text, token ids, or messages
    continuation: str | list[int] | None  # to be scored after the prompt
    params: SamplingParams  # with a definite seed
    template_options: dict[str, Any]
    echo: bool
    return_token_ids: bool
    inert: tuple[str, ...]  # fields that were accepted and do nothing


def hash64(seed: int, custom_id: str) -> int:
    """The seed of a line that names none: 64 bits that depend on the job's seed and the line's id alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {custom_id}".encode(), digest_size=8).digest())


def parse(value: Value, line: int, defaults: SamplingParams, seed: int) -> Task:
    """A line of the input, with `defaults` for the sampling fields that it leaves out.

    `null` counts as left out. Raises BadLine.
    """
    if isinstance(value, BadLine):
        raise value
    url, body = _unwrap(value)
    asks_nothing = {name for name in DEFAULTS.keys() & body.keys() if _is_default(name, body)}
    for name in body.keys() - asks_nothing:
        if name in UNSUPPORTED_FIELDS:
            raise BadLine("unknown_field", f"{name} does not act here: {UNSUPPORTED_FIELDS[name]}")
        if name not in FIELDS[url] and name not in INERT:
            only = f": only {_listed(DEFAULTS[name])} can be given" if name in DEFAULTS else ""
            raise BadLine("unknown_field", f"there is no field {name[:80]!r} in a request to {url}{only}")
    ignored = INERT | asks_nothing
    given = {name: field for name, field in body.items() if field is not None and name not in ignored}
    prompt = _messages(given) if url == CHAT else _text_or_ids(given, "prompt")
    continuation = None
    if url == LOGLIKELIHOOD:
        continuation, defaults = _text_or_ids(given, "continuation"), SCORING
    echo, return_token_ids = _flag(given, "echo"), _flag(given, "return_token_ids")
    template_options = {name: given.pop(name) for name in TEMPLATE_OPTIONS & given.keys()}
    if url == CHAT:
        _translate_chat_fields(given)
    custom_id = key_of(value, line)
    for name in INTEGER_FIELDS & given.keys():  # as some languages write them: 100.0
        if isinstance(given[name], float) and given[name].is_integer():
            given[name] = int(given[name])
    try:
        params = dataclasses.replace(defaults, **({"seed": hash64(seed, custom_id)} | given))
        if params.seed is None:  # -1 asks for a drawn one
            params = dataclasses.replace(params, seed=hash64(seed, custom_id))
        if echo and params.logprobs is not None:
            params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
    except (ValueError, TypeError) as error:
        raise BadLine("invalid_value", str(error)) from None
    inert = [name for name in body if name in ignored]
    if params.greedy and "temperature" not in given:
        inert += [f"{name} without a temperature" for name in RANDOM_FIELDS if name in given]
    return Task(
        line=line,
        custom_id=custom_id,
        url=url,
        prompt=prompt,
        continuation=continuation,
        params=params,
        template_options=template_options,
        echo=echo,
        return_token_ids=return_token_ids,
        inert=tuple(inert),
    )


def _unwrap(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(url, body) of a line in OpenAI's form, or of a plain one."""
    custom_id = value.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS):
        raise BadLine("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
    if not value.keys() & {"body", "url", "method"}:  # plain
        body = {name: field for name, field in value.items() if name != "custom_id"}
        if ("messages" in body) == ("prompt" in body):
            raise BadLine("invalid_request", "the line needs a prompt, messages, or a url and a body")
        if "continuation" in body:
            return LOGLIKELIHOOD, body
        return (CHAT if "messages" in body else COMPLETIONS), body
    if custom_id is None:
        raise BadLine("missing_custom_id", "the line has no custom_id")
    unknown = sorted(value.keys() - ENVELOPE)
    if unknown:
        raise BadLine("unknown_field", f"there is no field {unknown[0][:80]!r} beside body")
    if value.get("method", "POST") != "POST":
        raise BadLine("invalid_request", "method must be POST")
    if value.get("url") not in list(FIELDS):
        raise BadLine(
            "unknown_url", f"url must be one of {', '.join(FIELDS)}, not {str(value.get('url'))[:80]!r}"
        )
    if not isinstance(value.get("body"), dict):
        raise BadLine("invalid_request", "body must be a JSON object")
    return value["url"], value["body"]


def _messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadLine("invalid_value", "messages must be a list of at least one object with role and content")
    return messages


def _text_or_ids(given: dict[str, Any], name: str) -> str | list[int]:
    value = given.pop(name, None)
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not isinstance(value, str) and not is_ids:
        raise BadLine("invalid_value", f"{name} must be one text, or one list of token ids")
    return value


def _is_default(name: str, body: Mapping[str, Any]) -> bool:
    """Says whether a field that does not act here has a value that asks for nothing."""
    value = body[name]
    if name == "tool_choice" and value == "none":
        return not body.get("tools")  # with tools it asks to leave them out
    # A boolean is no number: 1 == True.
    return value is None or any(
        value == default and isinstance(value, bool) == isinstance(default, bool)
        for default in DEFAULTS[name]
    )


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in (*values, None))


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if not isinstance(value, bool):
        raise BadLine("invalid_value", f"{name} must be true or false")
    return value


def _translate_chat_fields(given: dict[str, Any]) -> None:
    """OpenAI's chat names into those of SamplingParams, in place."""
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise BadLine("invalid_value", "give max_completion_tokens or max_tokens, not both")
        given["max_tokens"] = given.pop("max_completion_tokens")
    top = given.pop("top_logprobs", None)
    if isinstance(top, float) and top.is_integer():
        top = int(top)
    if "logprobs" in given:
        wanted = given.pop("logprobs")
        if not isinstance(wanted, bool):
            raise BadLine(
                "invalid_value", "logprobs must be true or false in a chat; top_logprobs says how many"
            )
        if wanted:
            given["logprobs"] = top or 0
    if top is not None and "logprobs" not in given:
        raise BadLine("invalid_value", "top_logprobs needs logprobs: true")
