"""`jaxinfer info`: what a model is, from its headers alone."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.cli.command import command, print_json, print_pairs

if TYPE_CHECKING:
    from jaxinfer.checkpoints import Checkpoint

ModelArgument = Annotated[str, typer.Argument(help="Catalog name, Hugging Face folder, or .gguf file.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object, with the chat templates whole.")]


@command()
def run(model: ModelArgument, as_json: Json = False) -> None:
    """Show config, tensors, tokenizer and KV bytes of a model. Its weights are not read."""
    from jaxinfer.checkpoints import fetch

    facts = _facts(fetch.resolve(model))
    if as_json:
        print_json(facts)
    else:
        print_pairs(_pairs(facts))


def _facts(path: Path) -> dict[str, Any]:
    from jaxinfer import checkpoints, models
    from jaxinfer.kv_cache import bytes_per_token

    checkpoint = checkpoints.open_checkpoint(path)
    tensors = _tensor_types(checkpoint)
    facts: dict[str, Any] = {
        "path": str(path),
        "format": checkpoint.kind,
        "model_type": checkpoint.config.get("model_type"),
        "num_parameters": sum(kind["num_parameters"] for kind in tensors.values()),
        "bytes": sum(kind["bytes"] for kind in tensors.values()),
        "tensors": tensors,
        "refused": None,
        "config": checkpoint.config,
    }
    try:
        config = models.for_config(checkpoint.config).Config.from_hf(checkpoint.config)
    except ValueError as error:
        facts["refused"] = str(error)
    else:
        # The dtype of activations and pages is chosen when the model runs.
        facts["config"] = {k: v for k, v in dataclasses.asdict(config).items() if k != "dtype"}
        facts["kv_bytes_per_token"] = {
            dtype: config.num_layers * bytes_per_token(config.num_kv_heads, config.head_dim, dtype)
            for dtype in ("float32", "bfloat16")
        }
    return facts | _text_facts(path, checkpoint)


def _tensor_types(checkpoint: "Checkpoint") -> dict[str, dict[str, int]]:
    """Type in the file (quantization types included) -> number of tensors, parameters, bytes."""
    from jaxinfer.checkpoints import gguf

    if checkpoint.kind == "gguf":
        found = [(t.type.name, t.shape, t.nbytes) for t in gguf.read_header(checkpoint.path).tensors.values()]
    else:
        found = [(t.dtype.name, t.shape, t.nbytes) for t in checkpoint.tensors.values()]
    types: dict[str, dict[str, int]] = {}
    for name, shape, nbytes in found:
        kind = types.setdefault(name, {"num_tensors": 0, "num_parameters": 0, "bytes": 0})
        kind["num_tensors"] += 1
        kind["num_parameters"] += math.prod(shape)
        kind["bytes"] += nbytes
    return types


def _text_facts(path: Path, checkpoint: "Checkpoint") -> dict[str, Any]:
    from jaxinfer.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path, checkpoint.metadata)
    except (OSError, ValueError) as error:
        return {"tokenizer": str(error), "end_tokens": dict.fromkeys(checkpoint.end_token_ids)}
    ends = sorted(tokenizer.eos_token_ids | set(checkpoint.end_token_ids))
    return {
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_token_id,
            "adds_bos": tokenizer.adds_bos,
        },
        "end_tokens": {id_: tokenizer.id_to_token(id_) for id_ in ends},
        "chat_templates": tokenizer.chat_templates,
    }


def _pairs(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people."""
    pairs = [
        ("path", facts["path"]),
        ("format", facts["format"]),
        ("model type", str(facts["model_type"])),
        ("runs here", "yes" if facts["refused"] is None else f"no: {facts['refused']}"),
        ("parameters", f"{facts['num_parameters']:,}"),
        ("bytes", f"{facts['bytes']:,}"),
    ]
    for name, kind in facts["tensors"].items():
        sizes = f"{kind['num_tensors']:,} tensors, {kind['num_parameters']:,} parameters"
        pairs.append((f"in {name}", f"{sizes}, {kind['bytes']:,} bytes"))
    pairs += [(f"config {key}", str(value)) for key, value in facts["config"].items()]
    for dtype, count in facts.get("kv_bytes_per_token", {}).items():
        pairs.append(("KV cache", f"{count:,} bytes per token in {dtype}"))
    tokenizer = facts["tokenizer"]
    if isinstance(tokenizer, str):
        pairs.append(("tokenizer", f"none: {tokenizer}"))
    else:
        bos = f"BOS {tokenizer['bos_token_id']}, {'added' if tokenizer['adds_bos'] else 'not added'} to text"
        pairs.append(("tokenizer", f"{tokenizer['vocab_size']:,} tokens, {bos}"))
        templates = [f"{name} ({len(text):,} characters)" for name, text in facts["chat_templates"].items()]
        pairs.append(("chat template", ", ".join(templates) or "none"))
    ends = [f"{id_} {token or ''}".rstrip() for id_, token in facts["end_tokens"].items()]
    pairs.append(("end tokens", ", ".join(ends) or "none"))
    return pairs
