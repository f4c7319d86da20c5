"""The hashes of a checkpoint's files: a manifest of all, and a fingerprint that is read in milliseconds.

A manifest is written once from files known to be good, and compared before a run. It is a JSON object from each file's
path below the folder to its SHA-256, in `MANIFEST_FILE` in the same folder or anywhere else. Hidden files are ignored.

A fingerprint says which model a folder holds, by content: a run is not resumed with another one. Configuration and
tokenizer are hashed whole. Of weights, the header and a block from the middle of each tensor are: another training, a
merged adapter or another precision changes these. Times and paths do not count, so a copy is the same model.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_ssp.errors import CheckpointError
from llama_ssp.settings.model_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AGREEMENT_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILES,
    read_json,
)
from llama_ssp.weights.checkpoint import INDEX_FILE, SINGLE_FILE, summary

MANIFEST_FILE = "sha256.json"
_NUM_THREADS = 4
_SMALL_FILES = (
    CONFIG_FILE, GENERATION_CONFIG_FILE, AGREEMENT_FILE, *TOKENIZER_FILES, "chat_template.jinja", "merges.txt",
    "vocab.txt", "tokenizer.model",
)  # fmt: skip
_BLOCK_BYTES, _MOST_BLOCKS = 4096, 2048
_SHA256 = re.compile("[0-9a-f]{64}")


def write_manifest(folder: Path, file: Path | None = None) -> int:
    """Write the hash of every file of a checkpoint into `file`, or `MANIFEST_FILE` in the folder; return their number.

    CheckpointError if the folder holds no files, one of them cannot be read, or the manifest cannot be written.
    """
    manifest = file or folder / MANIFEST_FILE
    hashes = _hash_all(folder, but=manifest)
    if not hashes:
        raise CheckpointError(f"{folder} holds no files: the folder of a checkpoint is required")
    try:
        manifest.write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{manifest} cannot be written ({error.strerror}): name another one") from error
    return len(hashes)


def verify(folder: Path, file: Path | None = None) -> None:
    """Compare every file of a checkpoint with its manifest; see `write_manifest`.

    CheckpointError if the manifest is missing or damaged, or names other files or other hashes than the folder has.
    """
    manifest = file or folder / MANIFEST_FILE
    if not manifest.is_file():
        raise CheckpointError(
            f"{manifest} does not exist: verify=true needs it, and where the files are known to be good "
            f"llama-ssp manifest {folder} writes it"
        )
    wanted = read_json(manifest)
    if not wanted or not all(isinstance(value, str) and _SHA256.fullmatch(value) for value in wanted.values()):
        raise CheckpointError(f"{manifest} is no manifest from files to their SHA-256: write or copy it again")
    found = _hash_all(folder, but=manifest)
    differences = [
        f"{name} {'is missing' if name not in found else 'is not in the manifest' if name not in wanted else 'differs'}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{folder} is not what {manifest} says: {summary(differences)}; copy or download these files again"
        )


def _hash_all(folder: Path, *, but: Path) -> dict[str, str]:
    """The hash of every file below the folder by name, without manifests and hidden files."""
    own = (but, folder / MANIFEST_FILE)
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist: the folder of a checkpoint is required")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in own]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}): name another folder") from error
    by_name = {str(path.relative_to(folder)): path for path in files}
    shown = {name: path for name, path in by_name.items() if "/." not in f"/{name}"}
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(shown, threads.map(_hash, shown.values()), strict=True))


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): copy or download it again") from error


def fingerprint(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint that decides its text, by name; `checkpoint.inspect` has checked the files.

    CheckpointError if one cannot be read.
    """
    small = [name for name in _SMALL_FILES if (folder / name).is_file()]
    if (folder / SINGLE_FILE).is_file():
        weights = [SINGLE_FILE]
    else:
        small.append(INDEX_FILE)
        weights = sorted(set(read_json(folder / INDEX_FILE)["weight_map"].values()))
    try:
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in small}
        return hashes | {name: _sampled(folder / name, most_blocks=_MOST_BLOCKS // len(weights)) for name in weights}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}): copy or download it again") from error


def fingerprint_of_adapter(folder: Path) -> dict[str, str]:
    """The same for an adapter that is merged into the checkpoint."""
    try:
        config = hashlib.sha256((folder / ADAPTER_CONFIG_FILE).read_bytes()).hexdigest()
        weights = _sampled(folder / ADAPTER_FILE, most_blocks=_MOST_BLOCKS)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}): copy or download it again") from error
    return {ADAPTER_CONFIG_FILE: config, ADAPTER_FILE: weights}


def _sampled(file: Path, *, most_blocks: int) -> str:
    """Hash the size and the header of a safetensors file, and a block of each tensor; of very many, spread evenly."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        number = stream.fileno()
        first = os.pread(number, 8, 0)
        header = os.pread(number, int.from_bytes(first, "little"), 8)
        digest.update(os.fstat(number).st_size.to_bytes(8, "little") + first + header)
        ranges = sorted(tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__")
        num_blocks = min(len(ranges), max(most_blocks, 1))
        for place in range(num_blocks):
            begin, end = ranges[place * len(ranges) // num_blocks]
            middle = begin + max(0, end - begin - _BLOCK_BYTES) // 2
            digest.update(os.pread(number, min(_BLOCK_BYTES, end - begin), 8 + len(header) + middle))
    return digest.hexdigest()
