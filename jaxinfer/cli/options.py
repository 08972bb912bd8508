"""Options of `generate` and `chat`: one for each field of SamplingParams, and those of LLM that act here.

None has a default of its own: what is not given stays what SamplingParams and LLM say, but for the constants
below.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args

import typer

from jaxinfer.options.llm_options import DEFAULTS, LLMOptions, kinds
from jaxinfer.sampling.params import SamplingParams

TEMPERATURE = 0.0  # greedy: the same command gives the same text
MAX_TOKENS = 256  # a whole answer, where SamplingParams has vLLM's 16
DECODE_STEPS = 1  # where somebody reads along: text appears token by token, and one program less is compiled
MAX_ROWS = DEFAULTS["max_num_seqs"]  # of the samples of one prompt, run at the same time

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Catalog name, Hugging Face folder, or .gguf file.", metavar="MODEL"),
]
MetricsJson = Annotated[
    Path | None,
    typer.Option(help="Write all counts and times here at the end.", metavar="FILE", dir_okay=False),
]
System = Annotated[str | None, typer.Option(help="The system message of the chat.", metavar="TEXT")]

SAMPLING_HELP = {
    "n": "Samples of the prompt.",
    "presence_penalty": "Subtracted from the logit of each token that the output has, -2 to 2.",
    "frequency_penalty": "Subtracted for each time that the output has the token, -2 to 2.",
    "repetition_penalty": "Divides the logits of tokens of prompt and output, over 0 to 100.",
    "temperature": "0 to 100; 0 is greedy.",
    "top_p": "Keep the most probable tokens that sum to this, over 0 to 1.",
    "top_k": "Keep so many of the most probable tokens; 0 keeps all.",
    "min_p": "Drop tokens under this share of the best probability, 0 to 1.",
    "seed": "Of the random numbers, 0 to 2^64 - 1.",
    "stop": "Text that ends the output; may be given again.",
    "stop_token_ids": "Token id that ends the output; may be given again.",
    "bad_words": "Text that must not be written; may be given again.",
    "logit_bias": "Added to the logit of a token; may be given again.",
    "allowed_token_ids": "Only these tokens may be written; may be given again.",
    "include_stop_str_in_output": "Whether the stop text is part of the output.",
    "ignore_eos": "Whether to go on past the model's end tokens.",
    "min_tokens": "No end before so many tokens.",
    "max_tokens": "End after so many tokens; none: when the model's context is full.",
    "logprobs": "Log-probabilities of so many top tokens (-1: all) beside each token.",
    "prompt_logprobs": "Likewise for the prompt's tokens.",
    "logprob_token_ids": "Report the log-probability of this token too; may be given again.",
    "truncate_prompt_tokens": "Keep the last so many tokens of the prompt; -1: as many as the model takes.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "detokenize": "Whether to write text; without it, token ids.",
    "extra_args": "Values for logits processors, as one JSON object.",
}
# What `generate` shows only with --json.
JSON_ONLY = ("logprobs", "prompt_logprobs", "logprob_token_ids")
# Without a temperature these would do nothing, in silence.
NEED_TEMPERATURE = ("top_p", "top_k", "min_p", "seed")


def _int_or_none(text: str) -> int | str:
    return text if text == "none" else int(text)


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN_ID=NUMBER") from None


# Type of a field, without its None -> (type of the option, its settings)
OPTION_TYPES: dict[Any, tuple[Any, dict[str, Any]]] = {
    bool: (bool, {}),
    int: (int, {}),
    float: (float, {}),
    Collection[str]: (list[str], {"metavar": "TEXT"}),
    Collection[int]: (list[int], {"metavar": "TOKEN_ID"}),
    Mapping[int, float]: (list[Any], {"parser": _bias, "metavar": "TOKEN_ID=NUMBER"}),
    Mapping[str, Any]: (Any, {"parser": _json_value, "metavar": "JSON"}),
}


def _option(
    name: str, kind: Any, section: str, help_: str, default: Any, **settings: Any
) -> inspect.Parameter:
    if default not in (None, ()):
        help_ = f"{help_} [{default}]"
    info = typer.Option(help=help_, rich_help_panel=section, show_default=False, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _sampling_option(field: dataclasses.Field[Any], note: str = "") -> inspect.Parameter:
    kinds = set(get_args(field.type)) if isinstance(field.type, UnionType) else {field.type}
    default = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}.get(field.name, field.default)
    help_ = SAMPLING_HELP.get(field.name, "").removesuffix(".") + f"{note}."
    (kind,) = kinds - {NoneType}
    option_type, settings = OPTION_TYPES[kind]
    if default is not None and NoneType in kinds:  # None is a value of its own, not the lack of one
        option_type, settings = Any, {"parser": _int_or_none, "metavar": "INTEGER|none"}
    return _option(field.name, option_type, "Sampling", help_, default, **settings)


SAMPLING = [_sampling_option(field) for field in dataclasses.fields(SamplingParams)]
GENERATE_SAMPLING = [
    _sampling_option(field, "; needs --json" if field.name in JSON_ONLY else "")
    for field in dataclasses.fields(SamplingParams)
]


def _engine_option(field: dataclasses.Field[Any], default: Any) -> inspect.Parameter:
    """The option of a field of LLMOptions; the first sentence of what is said of it there is its help."""
    wanted, members = field.metadata["command"], kinds(field)
    kind = members[0] if wanted is True else wanted
    help_ = field.metadata["doc"].partition(". ")[0].rstrip(".") + "."
    bounds = {"min": field.metadata["minimum"], "max": field.metadata["maximum"]}
    settings = {"metavar": field.metadata["metavar"]} | (bounds if kind in (int, float) else {})
    return _option(field.name, kind, "Engine", help_, default, **settings)


_FIELDS = [field for field in dataclasses.fields(LLMOptions) if field.metadata["command"]]
# Of commands that answer one prompt, and of those that keep the device busy.
_ONE_PROMPT = {"decode_steps": DECODE_STEPS, "max_num_seqs": "the samples"}
ENGINE = [_engine_option(field, _ONE_PROMPT.get(field.name, field.default)) for field in _FIELDS]
THROUGHPUT_ENGINE = [_engine_option(field, field.default) for field in _FIELDS]


def without(options: list[inspect.Parameter], *names: str) -> list[inspect.Parameter]:
    return [option for option in options if option.name not in names]


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """From the options that were given. Raises typer.BadParameter for what SamplingParams refuses."""
    return _usage(SamplingParams, **sampling_fields(options))


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams from the options that were given, and the defaults of this command line.

    Raises typer.BadParameter for what does nothing, and for what SamplingParams refuses.
    """
    names = {option.name for option in SAMPLING}
    given = {name: value for name, value in options.items() if name in names}
    if "temperature" not in given:
        inert = [name for name in NEED_TEMPERATURE if name in given]
        if inert:
            raise typer.BadParameter(
                f"{flag(inert[0])} does nothing at the temperature 0 that is the default here; "
                "give --temperature too"
            )
    given = {name: None if value == "none" else value for name, value in given.items()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    fields = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS} | given
    _usage(SamplingParams, **fields)
    return fields


def write_json(path: Path, value: Any) -> None:
    """One JSON object for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def engine_options(options: Mapping[str, Any], num_samples: int | None = None) -> dict[str, Any]:
    """Keyword arguments of LLM, from the options that were given.

    Args:
      num_samples: of one prompt, which is all that runs; None: as LLM has it, to keep the device busy.
    """
    given = {name: value for name, value in options.items() if name in {field.name for field in _FIELDS}}
    if given.get("compilation_cache_dir") == "none":
        given["compilation_cache_dir"] = None
    if num_samples is None or "programs" in given:  # which come with their options
        return given
    return {"decode_steps": DECODE_STEPS, "max_num_seqs": min(num_samples, MAX_ROWS)} | given


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _usage[T](build: Callable[..., T], **arguments: Any) -> T:
    try:
        return build(**arguments)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
