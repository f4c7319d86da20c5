"""Names the copies of weights on the nodes' own disks; launch/slurm.sbatch makes them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_ssp.config.effects import is_synthetic
from llama_ssp.config.folders import read_path
from llama_ssp.config.model_files import CONFIG_FILE
from llama_ssp.config.schema import ModelConfig, RunConfig
from llama_ssp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A folder, its copy on every node, and the model's entry in the config, which takes the path of the copy."""

    entry: str
    source: Path
    target: Path

    @property
    def key(self) -> str:
        """The setting of that path."""
        return f"{self.entry}.path"

    @property
    def replaced(self) -> frozenset[str]:
        """Settings that the path takes the place of."""
        return frozenset(f"{self.entry}.{name}" for name in ("path", "hub_id", "revision"))


def stage(run: RunConfig, folder: str | None) -> list[Copy]:
    """Name the copies of target and draft below `folder`, except shipped and synthetic ones.

    Raises ConfigError without weights.
    """
    if folder is None or is_synthetic(run):
        return []
    return list(_copies(run, Path(folder)))


def _copies(run: RunConfig, folder: Path) -> Iterator[Copy]:
    for entry, model in (("model", run.model), ("draft.model", run.draft.model)):
        if model is not None and (model.path is not None or not model.shipped):
            source = _found(model)
            name = model.name.replace("/", "--")  # an id of the hub
            yield Copy(entry=entry, source=source, target=folder / f"{name}-{_fingerprint(source)}")


def _found(model: ModelConfig) -> Path:
    """Return the model's folder, or its snapshot in the hub's cache; never downloads."""
    if model.path is not None:
        source = read_path(model.path).resolve()
        if not source.is_dir():
            raise ConfigError(
                f"{model.path} is not a folder: the weights of model {model.name} cannot be copied from it"
            )
        return source
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - only staged hub models need it

    from llama_ssp.weights.hub import WEIGHTS, download_command  # noqa: PLC0415 - as above

    found = try_to_load_from_cache(str(model.hub_id), CONFIG_FILE, revision=model.revision)
    # Planning may have downloaded this one file.
    if not isinstance(found, str) or not any(Path(found).parent.glob(WEIGHTS)):
        raise ConfigError(
            f"staging copies local weights, and {model.hub_id} is not in the hub's cache: {download_command(model)}"
        )
    return Path(found).parent


def _fingerprint(source: Path) -> str:
    """Hash paths, sizes and times of all files: a copy is made once and then trusted."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
