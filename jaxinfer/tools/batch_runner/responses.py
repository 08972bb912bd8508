"""What came back, as lines in OpenAI's batch output form."""

import codecs
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxinfer.outputs import CompletionOutput, Logprob, RequestOutput
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.tools.batch_runner.journal import sealed
from jaxinfer.tools.batch_runner.tasks import CHAT, LOGLIKELIHOOD, Task, hash64


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as one line of the output file, with a checksum of itself."""
    return sealed(json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8"))


def failure(custom_id: str, line: int, code: str, message: str) -> dict[str, Any]:
    """A line that failed. Both places where readers look for an error say the same."""
    error = {"code": code, "message": message, "line": line}
    body = {"error": error | {"type": "invalid_request_error"}}
    number = f"{hash64(0, custom_id):016x}"
    return {
        "id": f"batch_req_{number}",
        "custom_id": custom_id,
        "line": line,
        "response": {"status_code": 400, "request_id": f"req_{number}", "body": body},
        "error": error,
    }


def success(
    task: Task, output: RequestOutput, tokenizer: Tokenizer | None, *, model: str, created: int
) -> dict[str, Any]:
    """The answer to a line. `created` (seconds since 1970) is the start of the job, so that resumed jobs agree."""
    number = f"{hash64(0, task.custom_id):016x}"
    if task.url == LOGLIKELIHOOD:
        body = _loglikelihood_body(task, output)
    else:
        body = _generation_body(task, output, tokenizer, number)
    body |= {"created": created, "model": model}
    if task.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return {
        "id": f"batch_req_{number}",
        "custom_id": task.custom_id,
        "line": task.line,
        "seed": task.params.seed,
        "response": {"status_code": 200, "request_id": f"req_{number}", "body": body},
        "error": None,
    }


def _loglikelihood_body(task: Task, output: RequestOutput) -> dict[str, Any]:
    """The fields of `LLM.loglikelihood`'s result; positions of the context have no entry."""
    tokens = output.prompt_token_ids
    scored = [
        (t, at[t]) for t, at in zip(tokens, output.prompt_logprobs or [], strict=True) if at is not None
    ]
    logprobs = [entry.logprob for _, entry in scored]
    body: dict[str, Any] = {
        "object": "loglikelihood",
        "logprob": _number(sum(logprobs)),
        "is_greedy": all(entry.rank == 1 for _, entry in scored),
        "token_logprobs": [_number(logprob) for logprob in logprobs],
        "usage": _usage(len(tokens), 0),
    }
    if task.return_token_ids:
        body["token_ids"] = [token for token, _ in scored]
    return body


def _generation_body(
    task: Task, output: RequestOutput, tokenizer: Tokenizer | None, number: str
) -> dict[str, Any]:
    is_chat = task.url == CHAT
    choice = _chat_choice if is_chat else _completion_choice
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": [choice(task, output, sample, tokenizer) for sample in output.outputs],
        "usage": _usage(
            len(output.prompt_token_ids), sum(len(sample.token_ids) for sample in output.outputs)
        ),
    }
    if output.prompt_logprobs is not None and not task.echo:
        body["prompt_logprobs"] = [None if at is None else _by_id(at) for at in output.prompt_logprobs]
    return body


def _usage(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def _common(task: Task, sample: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": sample.index,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if task.return_token_ids or not task.params.detokenize:
        fields["token_ids"] = sample.token_ids
    return fields


def _chat_choice(
    task: Task, output: RequestOutput, sample: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        content = []
        for token, at in zip(sample.token_ids, sample.logprobs, strict=False):
            top = [_token_entry(tokenizer, *entry) for entry in _top(at, task.params)]
            content.append(_token_entry(tokenizer, token, at[token]) | {"top_logprobs": top})
        logprobs = {"content": content}
    message = {"role": "assistant", "content": sample.text}
    return _common(task, sample) | {"message": message, "logprobs": logprobs}


def _completion_choice(
    task: Task, output: RequestOutput, sample: CompletionOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    text, tokens = sample.text, sample.token_ids
    entries: list[dict[int, Logprob] | None] | None = None
    if sample.logprobs is not None:
        entries = [*(output.prompt_logprobs or [] if task.echo else []), *sample.logprobs]
    if task.echo:
        text = _prompt_text(task, output, tokenizer) + text
        tokens = output.prompt_token_ids + tokens
    logprobs = None if entries is None else _completion_logprobs(task, tokens, entries, tokenizer)
    return _common(task, sample) | {"text": text, "logprobs": logprobs}


def _prompt_text(task: Task, output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    if output.prompt is not None or tokenizer is None:
        return output.prompt or ""
    return tokenizer.decode(output.prompt_token_ids, task.params.skip_special_tokens)


def _completion_logprobs(
    task: Task, tokens: list[int], entries: Iterable[dict[int, Logprob] | None], tokenizer: Tokenizer | None
) -> dict[str, list[Any]]:
    """Parallel lists, one entry per token; a first token of the prompt has no logprob."""
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token, at in zip(tokens, entries, strict=False):
        result["tokens"].append(_text(tokenizer, token))
        result["text_offset"].append(offset)
        offset += len(decoder.decode(b"" if tokenizer is None else tokenizer.id_to_bytes(token)))
        if at is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_number(at[token].logprob))
        top: dict[str, float | None] = {}
        for other, entry in _top(at, task.params):
            text = _text(tokenizer, other)
            # Different tokens may be spelled alike; none is lost.
            top[f"token_id:{other}" if text in top else text] = _number(entry.logprob)
        result["top_logprobs"].append(top)
    return result


def _top(at: Mapping[int, Logprob], params: SamplingParams) -> list[tuple[int, Logprob]]:
    """The tokens of a position that were asked for: the most probable ones, and `logprob_token_ids`."""
    ranked = sorted(at.items(), key=lambda item: -item[1].logprob)
    count = len(ranked) if params.logprobs == -1 else params.logprobs or 0
    labels = set(params.logprob_token_ids or ())
    return [item for i, item in enumerate(ranked) if i < count or item[0] in labels]


def _token_entry(tokenizer: Tokenizer | None, token: int, entry: Logprob) -> dict[str, Any]:
    raw = None if tokenizer is None else list(tokenizer.id_to_bytes(token))
    return {"token": _text(tokenizer, token), "logprob": _number(entry.logprob), "bytes": raw}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text; part of a character as its bytes, as OpenAI spells them."""
    raw = b"" if tokenizer is None else tokenizer.id_to_bytes(token)
    if not raw:
        return f"token_id:{token}"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_id(at: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {"logprob": _number(entry.logprob), "rank": entry.rank} for token, entry in at.items()
    }


def _number(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None  # JSON has no infinities
