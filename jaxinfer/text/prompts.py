"""What users may give as a prompt, and the token ids it means."""

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.wording import shown

Prompt = str | Seq[int] | Mapping[str, Any]

# generation_config.json's names of sampling defaults -> ours. Nothing else of that file acts, but its end ids.
GENERATION_CONFIG_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(generation_config: Mapping[str, Any] | None) -> SamplingParams:
    """vLLM's defaults, changed by what the model's author wrote into generation_config.json.

    Raises:
      ValueError: a value of the file is out of range.
    """
    config = generation_config or {}
    given = {ours: config[key] for key, ours in GENERATION_CONFIG_KEYS.items() if config.get(key) is not None}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ValueError(
            f"generation_config.json: {error}; LLM(generation_config='none') ignores it"
        ) from None


def fails_alone[Function: Callable[..., Any]](function: Function) -> Function:
    """Makes every Exception but ValueError and TypeError a ValueError that names it.

    For what reads one request: a RecursionError, MemoryError or IndexError over it fails that request alone.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            raise ValueError(
                f"the request cannot be read: {type(error).__name__}: {shown(str(error))}"
            ) from error

    return wrapped  # type: ignore[return-value]


@fails_alone
def tokenize(
    tokenizer: Tokenizer | None, prompt: Prompt, max_tokens: int | None = None
) -> tuple[str | None, list[int]]:
    """(text if known, token ids) of one prompt. Text of over `max_tokens` is refused before it is tokenized.

    Raises:
      ValueError: it is empty or too long, or text without a tokenizer, or no prompt at all.
    """
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
        if unknown or len(prompt) != 1:
            raise ValueError(
                f"a prompt dict has either prompt or prompt_token_ids; this one has "
                f"{', '.join(map(shown, list(prompt)[:4])) or 'nothing'}"
            )
        if "prompt_token_ids" in prompt:
            return None, token_ids(prompt["prompt_token_ids"])
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return None, token_ids(prompt)
    ids = _needed(tokenizer).encode(prompt, max_tokens=max_tokens) or _beginning(tokenizer)
    if not ids:
        raise ValueError("the prompt is empty, and this model has no BOS token to begin from")
    return prompt, ids


@fails_alone
def encode_pair(
    tokenizer: Tokenizer | None,
    context: str | Seq[int],
    continuation: str | Seq[int],
    max_tokens: int | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, as lm-evaluation-harness cuts them.

    Spaces at the end of the context belong to the continuation. Both are tokenized as one text, and the
    context tokenized alone says how many of its tokens are context: merges across the border are the
    continuation's. An empty context is the BOS token, or EOS where there is no BOS. Token ids are taken as
    they are. Text of over `max_tokens` is refused before it is tokenized.

    Raises:
      ValueError: the continuation is empty, one is text and the other ids, there is nothing to begin from, or
        too much.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise ValueError("a prompt and its continuation must both be text or both be token ids")
    if not isinstance(context, str) or not isinstance(continuation, str):
        before = token_ids(context) if len(context) else _beginning(tokenizer, or_eos=True)
        after = token_ids(continuation)
    elif stripped := context.rstrip():
        both = _needed(tokenizer).encode(context + continuation, max_tokens=max_tokens)
        before = _needed(tokenizer).encode(stripped)
        after = both[len(before) :]
    else:
        before = _beginning(_needed(tokenizer), or_eos=True)
        text = context + continuation
        after = _needed(tokenizer).encode(text, add_special_tokens=False, max_tokens=max_tokens)
    if not before:
        raise ValueError(
            "the prompt is empty, and this model has neither a BOS nor an EOS token to begin from"
        )
    if not after:
        raise ValueError(
            f"the continuation {shown(continuation)} has no tokens of its own after {shown(context)}"
        )
    return before, after


def encode_pairs(
    tokenizer: Tokenizer | None, contexts: Any, continuations: Seq[Any], max_tokens: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """`encode_pair` of one context for each continuation, or one for all. ValueError names the wrong pair."""
    many, single = one_or_many(contexts)
    many = many * len(continuations) if single else many
    if len(many) != len(continuations):
        raise ValueError(
            f"{len(many)} prompts for {len(continuations)} continuations; give one prompt, or one for each"
        )
    pairs = []
    for i, (context, continuation) in enumerate(zip(many, continuations, strict=True)):
        try:
            pairs.append(encode_pair(tokenizer, context, continuation, max_tokens))
        except ValueError as error:
            raise ValueError(f"pair {i}: {error}") from None
    return pairs


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer, and this LLM has none; give token ids")
    return tokenizer


def _beginning(tokenizer: Tokenizer | None, or_eos: bool = False) -> list[int]:
    """What stands for an empty text: BOS, or the (lowest) end id where a model has no BOS; may be nothing."""
    if tokenizer is None:
        return []
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return sorted(tokenizer.eos_token_ids)[:1] if or_eos else []


def one_or_many(prompts: Any) -> tuple[list[Any], bool]:
    """(prompts as a list, whether it was one alone): a string, a dict, or token ids, as a list or array.

    Many may come as any iterable, such as a generator or an array with a row for each.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts], True
    if prompts is None or not hasattr(prompts, "__iter__"):
        raise ValueError(
            f"prompts are texts or token ids, one or a list of them; {shown(prompts)} is neither"
        )
    prompts = _without_arrays(prompts)
    many = list(prompts)
    single = len(many) > 0 and not isinstance(_without_arrays(many[0]), str | Mapping | Seq)
    # What is no number either is a bad prompt among others, and fails alone.
    single = single and hasattr(many[0], "__index__")
    return ([many], True) if single else (many, False)


def _without_arrays(value: Any) -> Any:
    """NumPy's and JAX's arrays as lists, whatever else as it is."""
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0 else value


def is_single_chat(messages: Any) -> bool:
    """One conversation, a list of messages; or none, which is refused as one."""
    many = isinstance(messages, Seq) and not isinstance(messages, str | bytes) and len(messages) > 0
    return not many or isinstance(messages[0], Mapping)


def token_ids(ids: Any) -> list[int]:
    """`ids` as a list of int. Raises ValueError if there is none, or something else in it."""
    if isinstance(ids, bytes | bytearray):  # would be a list of the numbers of its bytes
        raise ValueError("a prompt of bytes is neither text nor token ids; decode it: prompt.decode('utf-8')")
    if ids is None or not hasattr(ids, "__iter__"):
        raise ValueError(f"a prompt is text or token ids; {shown(ids)} is neither")
    ids = list(_without_arrays(ids))
    if not ids:
        raise ValueError("the prompt has no tokens; give at least one")
    wrong = [i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__")]
    if wrong:
        raise ValueError(f"a prompt is text or token ids; {shown(wrong[0])} is no token id")
    return [int(i) for i in ids]


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """One value for all of `count` prompts, or a list of one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each")
    return list(value)
