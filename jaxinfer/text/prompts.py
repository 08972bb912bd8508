"""What users may give as a prompt, and the token ids it means."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jaxinfer.request import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer

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


def tokenize(tokenizer: Tokenizer | None, prompt: Prompt) -> tuple[str | None, list[int]]:
    """(text if known, token ids) of one prompt.

    Raises:
      ValueError: it is empty, or text without a tokenizer, or no prompt at all.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise ValueError(
                f"a prompt dict has prompt or prompt_token_ids; this one has {sorted(prompt) or 'nothing'}"
            )
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            return text, token_ids(prompt["prompt_token_ids"])
        prompt = text  # type: ignore[assignment]
    if not isinstance(prompt, str):
        return None, token_ids(prompt)
    ids = _needed(tokenizer).encode(prompt) or _beginning(tokenizer)
    if not ids:
        raise ValueError("the prompt is empty, and this model has no BOS token to begin from")
    return prompt, ids


def encode_pair(
    tokenizer: Tokenizer | None, context: str | Seq[int], continuation: str | Seq[int]
) -> tuple[list[int], list[int]]:
    """Token ids of a context and of what follows it, as lm-evaluation-harness cuts them.

    Spaces at the end of the context belong to the continuation. Both are tokenized as one text, and the
    context tokenized alone says how many of its tokens are context: merges across the border are the
    continuation's. An empty context is the BOS token, or EOS where there is no BOS. Token ids are taken as
    they are.

    Raises:
      ValueError: the continuation is empty, one is text and the other ids, or there is nothing to begin from.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise ValueError("a prompt and its continuation must both be text or both be token ids")
    if not isinstance(context, str) or not isinstance(continuation, str):
        before = token_ids(context) if len(context) else _beginning(tokenizer, or_eos=True)
        after = token_ids(continuation)
    elif stripped := context.rstrip():
        before = _needed(tokenizer).encode(stripped)
        after = _needed(tokenizer).encode(context + continuation)[len(before) :]
    else:
        before = _beginning(_needed(tokenizer), or_eos=True)
        after = _needed(tokenizer).encode(context + continuation, add_special_tokens=False)
    if not before:
        raise ValueError(
            "the prompt is empty, and this model has neither a BOS nor an EOS token to begin from"
        )
    if not after:
        raise ValueError(f"the continuation {continuation!r} has no tokens of its own after {context!r}")
    return before, after


def encode_pairs(
    tokenizer: Tokenizer | None, contexts: Any, continuations: Seq[Any]
) -> list[tuple[list[int], list[int]]]:
    """`encode_pair` of one context for each continuation, or one for all. ValueError names the wrong pair."""
    many = [contexts] * len(continuations) if is_single(contexts) else list(contexts)
    if len(many) != len(continuations):
        raise ValueError(
            f"{len(many)} prompts for {len(continuations)} continuations; give one prompt, or one for each"
        )
    pairs = []
    for i, (context, continuation) in enumerate(zip(many, continuations, strict=True)):
        try:
            pairs.append(encode_pair(tokenizer, context, continuation))
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


def is_single(prompts: Any) -> bool:
    """One prompt: a string, a dict, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Seq)


def token_ids(ids: Any) -> list[int]:
    """`ids` as a list of int. Raises ValueError if there is none, or something else in it."""
    ids = list(ids)
    if not ids:
        raise ValueError("the prompt has no tokens; give at least one")
    wrong = [i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__")]
    if wrong:
        raise ValueError(f"a prompt is text or token ids; {wrong[0]!r} is no token id")
    return [int(i) for i in ids]


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """One value for all of `count` prompts, or a list of one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each")
    return list(value)
