"""Finds a model's files: in the user's folder, the shipped pair, or the Hugging Face hub.

For a hub model one rank per node should call this first; the others then find the files in the cache (HF_HOME). Module
`checkpoint` checks the files. Does not import torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from huggingface_hub import constants, errors, get_token, model_info, snapshot_download, try_to_load_from_cache

from llama_ssp import manifest
from llama_ssp.architectures.model_files import GPTQ_FILE, MODELOPT_FILE, other_kind, read_json
from llama_ssp.catalogue import CONFIG_FILE, ModelConfig, is_hub_id, read_path
from llama_ssp.errors import CheckpointError
from llama_ssp.settings.draft_heads import head_file
from llama_ssp.settings.weight_changes import CHANGES, WeightChange, changes_of
from llama_ssp.text import messages

WEIGHTS = "model*.safetensors"
# Only weights named as by save_pretrained: some repositories hold a second copy under another name.
_FILES = [WEIGHTS, "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]


def resolve(model: ModelConfig) -> Path:
    """Find the folder of a model by `path`, `shipped` or `hub_id`, in this order; download it if necessary.

    ConfigError if `path` is invalid; CheckpointError if the hub lacks or denies the model, or cannot be reached.
    """
    if model.path is not None:
        return read_path(model.path)
    if model.shipped:
        places = Path(str(files("llama_ssp"))), *(manifest.FOLDER / extension for extension in manifest.present())
        folders = [place / "shipped" / model.name for place in places]
        return next(filter(Path.is_dir, folders), folders[0])
    if model.hub_id is None:
        raise CheckpointError(f"model {model.name} names no files: {messages.said('model.path', 'DIR')} is required")
    with _one_sentence(model):
        folder = Path(snapshot_download(model.hub_id, revision=model.revision, allow_patterns=_FILES))
    if not any(folder.glob(WEIGHTS)):
        names = _names(model)  # the client also returns a folder of its cache if it did not reach the hub
        has_them = any(Path(name).match(WEIGHTS) for name in names)
        said = other_kind(f"{model.hub_id} on the hub", folder, names)
        raise CheckpointError(said or _without_weights(model, folder, has_them=has_them))
    return folder


def folder_here(model: ModelConfig) -> Path | None:
    """Find the folder of a model, which may lack its weights, on this machine; None for one outside the hub's cache."""
    if model.path is not None or model.shipped or model.hub_id is None:
        return resolve(model)
    found = try_to_load_from_cache(model.hub_id, CONFIG_FILE, revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def resolve_changes(model: ModelConfig) -> list[tuple[WeightChange, Path]]:
    """Find the files of a model's changes: folders that exist, or the hub's for ids; raises as `resolve`."""
    return [(change, _folder_of(change, given)) for change, given in changes_of(model)]


def _folder_of(change: WeightChange, given: str) -> Path:
    if (folder := read_path(given)).is_dir() or not is_hub_id(given):
        return folder
    with _one_sentence(ModelConfig(name=given, hub_id=given)):
        return Path(snapshot_download(given, allow_patterns=[change.config, change.weights]))


def find_config(model: ModelConfig, *, is_enough: bool = False) -> Path:
    """Find a folder with the config.json of a model of the hub, downloading this file alone; raises as `resolve`.

    `is_enough` says that nothing else will be read, so that an error asks for nothing else.
    """
    wanted = [CONFIG_FILE, *(change.config for change in CHANGES.all().values()), MODELOPT_FILE, GPTQ_FILE]
    file = CONFIG_FILE if is_enough else None
    with _one_sentence(model, file):
        # Asks the hub once before it looks into the cache; `hf_hub_download` repeats a failed request for 23 s.
        folder = Path(snapshot_download(str(model.hub_id), revision=model.revision, allow_patterns=wanted))
    if (folder / CONFIG_FILE).is_file():
        return folder
    names = _names(model)
    if said := other_kind(f"{model.hub_id} on the hub", folder, names):
        raise CheckpointError(said)
    is_elsewhere = constants.HF_HUB_OFFLINE or CONFIG_FILE in names
    with _one_sentence(model, file):
        raise (errors.LocalEntryNotFoundError if is_elsewhere else errors.EntryNotFoundError)(CONFIG_FILE)


def _names(model: ModelConfig) -> list[str]:
    """The names of a model's files on the hub, in a single request; none with HF_HUB_OFFLINE."""
    if constants.HF_HUB_OFFLINE:
        return []
    with _one_sentence(model):
        return [file.rfilename for file in model_info(str(model.hub_id), revision=model.revision).siblings or []]


@contextmanager
def _one_sentence(model: ModelConfig, file: str | None = None) -> Iterator[None]:
    """Turn the errors of the hub's client into CheckpointError."""
    try:
        yield
    except Exception as error:  # the client's network error classes differ between its versions
        raise CheckpointError(_sentence(model, error, file)) from error


def _sentence(model: ModelConfig, error: Exception, file: str | None) -> str:
    """The cause and a remedy. The order matters, because some error classes are subclasses of others."""
    where, download = f"{model.hub_id} on the hub", " ".join(filter(None, (download_command(model), file)))
    page, cache = f"https://huggingface.co/{model.hub_id}", constants.HF_HUB_CACHE
    match error:
        case errors.GatedRepoError() if get_token():
            said = (
                f"is gated, and the account of this login has no access: ask for it on {page}, or log in with another "
                "one: hf auth login"
            )
        case errors.GatedRepoError():
            said = f"is gated: accept its terms on {page} and run: hf auth login"
        case errors.RevisionNotFoundError():
            said = f"has no revision {model.revision!r}: another {messages.key_of('model.revision')} is required"
        case errors.RepositoryNotFoundError():
            said = "does not exist or is private: check the spelling, or log in with: hf auth login"
        case errors.HFValidationError():
            where = repr(model.hub_id)
            said = f"is no hub id: owner/name is required, or {messages.said('model.path', 'DIR')}"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            said = f"is not in {cache} and HF_HUB_OFFLINE is set: run {download} on a network"
        case errors.LocalEntryNotFoundError():
            said = (
                f"cannot be reached and is not in {cache}: check the network, or run {download} where there is one, "
                f"with HF_HOME on a disk that this machine sees, or give {messages.said('model.path', 'DIR')} instead"
            )
        case errors.EntryNotFoundError():
            said = f"has no {CONFIG_FILE}: a model that transformers can read is required"
        case _:
            reason = " ".join(str(error).split())
            said = f"could not be downloaded ({reason}): try {download}, or {messages.said('model.path', 'DIR')}"
    return f"{where} {said}"


def _without_weights(model: ModelConfig, folder: Path, *, has_them: bool) -> str:
    """Why a folder of the cache has no weights; `has_them` says whether the hub has."""
    if constants.HF_HUB_OFFLINE or has_them:
        offline = ", and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        return (
            f"of {model.hub_id} only other files than weights are in {constants.HF_HUB_CACHE}{offline}: run "
            f"{download_command(model)} on a network"
        )
    fault = (
        f"{model.hub_id} on the hub has no weights in safetensors (model.safetensors, or shards and their index), and "
        "no others are read: choose another repository, or "
    )
    file = folder / CONFIG_FILE
    if file.is_file() and head_file(read_json(file), file):
        download = f"{download_command(model)} --local-dir DIR"
        return (
            fault + f"run {download} and give {messages.said('draft.model.path', 'DIR')}, which says how to convert it"
        )
    return fault + f"save it with save_pretrained and give {messages.said('model.path', 'DIR')}"


def download_command(model: ModelConfig) -> str:
    """The command that downloads a model."""
    return f"hf download {model.hub_id}" + (f" --revision {model.revision}" if model.revision else "")
