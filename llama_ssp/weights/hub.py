"""Finds a model's files: in the user's folder, the shipped pair, or the Hugging Face hub.

For a hub model one rank per node should call this first; the others then find the files in the cache (HF_HOME). Module
`checkpoint` checks the files.
"""

from importlib.resources import files
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download

from llama_ssp.config.paths import read_path
from llama_ssp.config.schema import ModelConfig
from llama_ssp.errors import CheckpointError

# Only weights named as by save_pretrained: some repositories hold a second copy under another name.
_FILES = ["model*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]


def resolve(model: ModelConfig) -> Path:
    """Find the folder of a model by `path`, `shipped` or `hub_id`, in this order; download it if necessary.

    ConfigError if `path` is invalid; CheckpointError if the hub lacks or denies the model, or cannot be reached.
    """
    if model.path is not None:
        return read_path(model.path)
    if model.shipped:
        return Path(str(files("llama_ssp"))) / "shipped" / model.name
    if model.hub_id is None:
        raise CheckpointError(f"model {model.name} names no files: model.path=DIR is required")
    try:
        return Path(snapshot_download(model.hub_id, revision=model.revision, allow_patterns=_FILES))
    except Exception as error:  # the client's network error classes differ between its versions
        raise CheckpointError(_sentence(model, error)) from error


def _sentence(model: ModelConfig, error: Exception) -> str:
    """The cause and a remedy. The order matters, because some error classes are subclasses of others."""
    where = f"{model.hub_id} on the hub"
    revision = f" --revision {model.revision}" if model.revision else ""
    download = f"hf download {model.hub_id}{revision}"
    match error:
        case errors.GatedRepoError():
            return f"{where} is gated: accept its terms on https://huggingface.co/{model.hub_id} and run: hf auth login"
        case errors.RevisionNotFoundError():
            return f"{where} has no revision {model.revision!r}: another model.revision is required"
        case errors.RepositoryNotFoundError():
            return f"{where} does not exist or is private: check model.hub_id, or log in with: hf auth login"
        case errors.HFValidationError():
            return f"{model.hub_id!r} is no hub id: owner/name is required, or model.path=DIR"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"{where} is not in {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: run {download} on a network"
        case _:
            reason = " ".join(str(error).split())
            return f"{where} could not be downloaded ({reason}): try {download}, or model.path=DIR"
