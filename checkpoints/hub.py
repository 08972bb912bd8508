"""Models of the Hugging Face hub, by name (org/name), through `huggingface_hub`.

The library keeps the files in its own cache and honours its own settings: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME
and HF_HUB_CACHE, and the token of `hf auth login`.
"""

import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxinfer.checkpoints.fetch import FetchError
from jaxinfer.text.wording import first_line

logger = logging.getLogger(__name__)

# What the loaders read. Nothing that could run code (.py, .bin, .pt) is ever asked for.
ALLOWED = [
    "*.safetensors",
    "*.json",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
# The same weights once more, in another form: for other runtimes in subfolders, or as one file.
IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_SUFFIXES = (".gguf", ".safetensors", ".json")


def is_hub_name(model: str | Path) -> bool:
    """Whether `model` is spelled org/name, and not like the path of a file."""
    return isinstance(model, str) and NAME.fullmatch(model) is not None and not model.endswith(FILE_SUFFIXES)


def snapshot(
    name: str,
    revision: str | None = None,
    token: str | bool | None = None,
    *,
    cache_folder: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of model `name` in the hub's cache; what is missing there is downloaded.

    Args:
      name: org/name.
      revision: branch, tag or commit; None is the main branch.
      token: a token, False for none, None for the one of `hf auth login` or HF_TOKEN.
      cache_folder, endpoint: instead of the library's own HF_HUB_CACHE and HF_ENDPOINT.

    When the hub cannot be reached, refuses to answer (too many requests, no or a wrong token), or HF_HUB_OFFLINE is
    set, the revision as it lies in the cache is taken, as `huggingface_hub` itself does, and the log says so.

    Raises FetchError.
    """
    endpoint = endpoint or constants.ENDPOINT
    at = repr(name) if revision is None else f"{name!r} at revision {revision!r}"
    unreachable = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    refusal: HfHubHTTPError | None = None
    try:
        if unreachable is None:
            try:
                info = HfApi(endpoint=endpoint, token=token).model_info(name, revision=revision)
                _check_has_safetensors(info, at)
            except RevisionNotFoundError:
                raise
            except HfHubHTTPError as error:
                status = error.response.status_code
                refusal = error if status < 500 else None
                what = f"refuses with status {status}" if status < 500 else "cannot be reached"
                unreachable = f"{endpoint} {what} ({first_line(error)})"
            except HTTPError as error:
                unreachable = f"{endpoint} cannot be reached ({first_line(error)})"
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=cache_folder,
                endpoint=endpoint,
                allow_patterns=ALLOWED,
                ignore_patterns=IGNORED,
                local_files_only=unreachable is not None,
            )
        except LocalEntryNotFoundError as error:
            raise refusal or error from None
    except HFValidationError as error:
        raise FetchError(f"{name!r} is no name of a hub model ({first_line(error)})") from error
    except LocalTokenNotFoundError as error:
        raise FetchError("token=True, and no token is stored here; run `hf auth login`") from error
    except GatedRepoError as error:  # a RepositoryNotFoundError too
        raise FetchError(
            f"{name!r} is gated: accept its terms on {endpoint}/{name}, then give token=... or run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"no folder {name!r} is here, and {endpoint} has no such model that may be read with "
            f"{_whose(token)}; check the name, or give the token of somebody who may"
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(
            f"{name!r} has no revision {revision!r}; give a branch, a tag or a commit of {endpoint}/{name}"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = unreachable or f"{endpoint} was lost on the way"
        raise FetchError(
            f"{at} is not (or not all) in the cache {cache_folder or constants.HF_HUB_CACHE}, and {reason}; "
            "fetch it with a network, or give the path of a model that is already here"
        ) from error
    except HTTPError as error:
        raise FetchError(f"cannot fetch {at} from {endpoint}: {first_line(error)}; try again") from error
    except OSError as error:
        raise FetchError(
            f"cannot keep {at} in {cache_folder or constants.HF_HUB_CACHE} ({error}); free some space or make "
            "the folder writable"
        ) from error
    commit = Path(folder).name
    if unreachable is None:
        logger.info("model %s: from %s, commit %s", at, endpoint, commit)
    else:
        logger.warning("model %s: from the cache, commit %s, since %s", at, commit, unreachable)
    return Path(folder)


def _check_has_safetensors(info: ModelInfo, at: str) -> None:
    """Refuses, before anything is downloaded, a repository whose weights are never read."""
    files = [sibling.rfilename for sibling in info.siblings or []]
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return
    if any(file.endswith(".gguf") for file in files):
        raise FetchError(f"{at} has GGUF files: download the one you want, and give the path of that file")
    raise FetchError(
        f"{at} has no safetensors; other weights (.bin, .pt) are never fetched, since they can run code: "
        "choose a repository with safetensors"
    )


def _whose(token: str | bool | None) -> str:
    if token is None:
        return "the stored token, if any"
    if token is False:
        return "no token"
    return "the stored token" if token is True else "the given token"
