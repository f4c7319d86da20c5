"""Where a model's files are: a folder of the user's, the pair that is shipped, or a copy from the Hugging Face hub.

Only one rank per node should call this for a hub model; the others then find the files in the cache (HF_HOME). What the
files hold is checked in `checkpoint`.
"""

from importlib.resources import files
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from llama_ssp.config.paths import read_path
from llama_ssp.config.schema import ModelConfig
from llama_ssp.errors import CheckpointError

# Weights under the names that save_pretrained gives them: some repositories hold a second copy under another name.
_FILES = ["model*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]


def resolve(model: ModelConfig) -> Path:
    """Find the folder of a model, downloading it into the hub's cache where needed.

    Args:
        model: says `path` (wins), `shipped` or `hub_id`.

    Raises:
        ConfigError: `path` is none.
        CheckpointError: the hub does not have the model, or will not hand it out, or cannot be reached.
    """
    if model.path is not None:
        return read_path(model.path)
    if model.shipped:
        return Path(str(files("llama_ssp"))) / "shipped" / model.name
    if model.hub_id is None:
        message = f"model {model.name} names no files: model.path=DIR is required"
        raise CheckpointError(message)
    try:
        return Path(snapshot_download(model.hub_id, revision=model.revision, allow_patterns=_FILES))
    # The client raises network errors of classes that differ between its versions.
    except Exception as error:
        raise CheckpointError(_sentence(model, error)) from error


def _sentence(model: ModelConfig, error: Exception) -> str:
    """What went wrong and which command would help; the order matters, since some errors are kinds of others."""
    where = f"{model.hub_id} on the hub"
    revision = f" --revision {model.revision}" if model.revision else ""
    download = f"hf download {model.hub_id}{revision}"
    match error:
        case GatedRepoError():
            return f"{where} is gated: accept its terms on https://huggingface.co/{model.hub_id} and run: hf auth login"
        case RevisionNotFoundError():
            return f"{where} has no revision {model.revision!r}: another model.revision is required"
        case RepositoryNotFoundError():
            return f"{where} does not exist or is private: check model.hub_id, or log in with: hf auth login"
        case HFValidationError():
            return f"{model.hub_id!r} is no hub id: owner/name is required, or model.path=DIR"
        case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"{where} is not in {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: run {download} on a network"
        case _:
            reason = " ".join(str(error).split())
            return f"{where} could not be downloaded ({reason}): try {download}, or model.path=DIR"
