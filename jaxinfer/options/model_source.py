"""From the name of a model, or from a config and weights, to everything about it but its weights in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer import checkpoints, models
from jaxinfer.checkpoints import fetch, huggingface
from jaxinfer.checkpoints.files import has, inside
from jaxinfer.checkpoints.loading import Transform, leaf_sources, named_leaves
from jaxinfer.models.spec import ModelModule
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text.prompts import default_sampling_params
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.wording import first_line
from jaxinfer.weights.weight_forms import ModelFacts


@dataclass(frozen=True)
class ModelSource:
    """A model whose weights can be read."""

    facts: ModelFacts
    read_weights: Callable[[Any, Transform], Any]  # (config with its dtype decided, transform of each leaf)
    tokenizer: Tokenizer | None
    end_token_ids: frozenset[int]
    name: str  # pages are shared under equal names only
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)


def find_model(model: str | Path, options: LLMOptions, tokenizer: Tokenizer | None) -> ModelSource:
    """Finds, fetches and opens a model; `tokenizer` replaces the model's own.

    Raises:
      FetchError, CheckpointError, ValueError: it cannot be found or read, or its files are not understood.
    """
    path = fetch.resolve(model, options.revision, options.token)
    checkpoint = checkpoints.open_checkpoint(path)
    tokenizer = tokenizer or load_tokenizer(path, checkpoint.metadata)
    file = checkpoint.generation_config if options.generation_config == "auto" else None
    facts = checkpoint_facts(checkpoint)

    def read_weights(config: Any, transform: Transform) -> Any:
        dtype = jax.numpy.dtype(config.dtype)
        return checkpoints.load_weights(checkpoint, facts.module, config, dtype, transform=transform)

    return ModelSource(
        facts=facts,
        read_weights=read_weights,
        tokenizer=tokenizer,
        end_token_ids=frozenset(checkpoint.end_token_ids) | tokenizer.eos_token_ids,
        name=str(path),
        sampling_defaults=default_sampling_params(file),
    )


def checkpoint_facts(checkpoint: checkpoints.Checkpoint) -> ModelFacts:
    """What an opened checkpoint tells of its model.

    Raises:
      CheckpointError: its tensors are not those of its config.
    """
    module, config = _understood(checkpoint.config, checkpoint.path)
    sources = leaf_sources(checkpoint, module, config)
    blocks = {name: source.blocks for name, source in sources.items() if source.blocks is not None}
    return ModelFacts(module, config, blocks=blocks)


def named_facts(model: str | Path) -> ModelFacts:
    """What is known of a model by name; a config.json is enough, and no weights are read.

    Args:
      model: as of `LLM`, or a folder with nothing but a config.json, or the path of one. Of a model of the hub nothing
        else is fetched.

    Where weights are beside it, the file says whether the head is tied to the embedding. Without weights and without
    the key `tie_word_embeddings` it is not, as transformers has it for every model_type that is supported here.

    Raises:
      FetchError, CheckpointError, ValueError: it cannot be found or read, or its files are not understood.
    """
    path = _config_alone(model)
    if path is None:
        return checkpoint_facts(checkpoints.open_checkpoint(fetch.resolve(model)))
    return ModelFacts(*_understood(huggingface.read_config(path), path))


def _understood(hf: dict[str, Any], path: Path) -> tuple[ModelModule, Any]:
    """The model file and the Config of a config. Raises CheckpointError with its path where it is not supported."""
    try:
        module = models.for_config(hf)
        return module, module.Config.from_hf(hf)
    except ValueError as error:
        raise checkpoints.CheckpointError(f"{path}: {error}") from None


def _config_alone(model: str | Path) -> Path | None:
    """The config.json of a model of which nothing else is there, or looked at; None: there are weights."""
    fetch.refuse_empty(model)
    path = Path(model).expanduser()
    if str(model) in fetch.catalog():
        return None
    if path.is_dir() and not any(path.glob("*.safetensors")):
        if not has(path, "config.json"):
            raise ValueError(f"{path} has no config.json; give a folder with one, or a GGUF file")
        path = inside(path, "config.json")
    if path.suffix == ".json" and path.is_file():
        return path
    if not path.exists():
        from jaxinfer.checkpoints import hub  # here: it takes half a second that other models need not wait

        if hub.is_hub_name(model):
            return _hub_config(str(model))
    return None


def _hub_config(name: str) -> Path:
    """config.json of a model of the Hugging Face hub, and nothing else of it."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HTTPError

    cached_only = constants.HF_HUB_OFFLINE
    try:
        if not cached_only:
            try:
                huggingface_hub.HfApi().model_info(name)
            except HfHubHTTPError:  # the download below takes what is cached, or raises the same
                pass
            except HTTPError:  # unreachable: spares the half minute in which the download tries again
                cached_only = True
        return Path(huggingface_hub.hf_hub_download(name, "config.json", local_files_only=cached_only))
    except (OSError, ValueError, EntryNotFoundError) as error:
        raise fetch.FetchError(
            f"no config.json of {name!r} from the hub or its cache ({first_line(error)}); check the name, run `hf auth "
            "login` if the model is gated, or give the path of a config.json"
        ) from error


def given_model(
    config: Any, weights: Any, module: ModelModule | None, tokenizer: Tokenizer | None
) -> ModelSource:
    """A model whose weights the user has: a `Weights` tree, or nested dicts (such as a Flax tree) of its leaves.

    Raises:
      TypeError: no model file has this kind of config.
      CheckpointError: leaves are missing, superfluous or of another shape.
    """
    module = module or models.module_of(config)
    if isinstance(weights, Mapping):
        weights = checkpoints.weights_from_tree(weights, module, config)
    return ModelSource(
        facts=ModelFacts(module, config, weights_given=True),
        read_weights=partial(_transformed, weights),
        tokenizer=tokenizer,
        end_token_ids=frozenset() if tokenizer is None else tokenizer.eos_token_ids,
        name="weights given as a tree",
    )


def _transformed(weights: Any, config: Any, transform: Transform) -> Any:
    leaves = [transform(name, leaf, None) for name, leaf in named_leaves(weights)]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)
