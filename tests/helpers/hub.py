"""A cache of the Hugging Face hub, laid out as its client does, with models that nobody downloaded."""

from collections.abc import Iterable
from pathlib import Path

from llama_ssp import catalogue
from llama_ssp.weights import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shipped(name: str) -> Path:
    """The folder of a model that comes with the package."""
    return hub.resolve(catalogue.load(name))


def put(cache: Path, hub_id: str, files: Iterable[Path]) -> Path:
    """Put files into a cache (`HF_HOME/hub`) as the newest revision of a model; returns the folder of its snapshot."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file.name).symlink_to(file)
    return snapshot
