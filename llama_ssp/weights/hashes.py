"""The fingerprint of a checkpoint, which is read in milliseconds.

A fingerprint says which model a folder holds, by content: a run is not resumed with another one. Configuration and
tokenizer are hashed whole. Of weights, the header and a block from the middle of each tensor are: another training, a
merged adapter or another precision changes these. Times and paths do not count, so a copy is the same model.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from llama_ssp.architectures.model_files import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILES,
    read_json,
)
from llama_ssp.catalogue import CONFIG_FILE
from llama_ssp.errors import CheckpointError
from llama_ssp.settings.weights import WEIGHTS
from llama_ssp.weights.checkpoint import INDEX_FILE, SINGLE_FILE

_SMALL_FILES = (*TOKENIZER_FILES, "chat_template.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
_BLOCK_BYTES, _MOST_BLOCKS = 4096, 2048


def fingerprint(folder: Path) -> dict[str, str]:
    """The hash of each file that decides a checked checkpoint's text, by name; CheckpointError if one is unreadable."""
    of_sources = [name for source in WEIGHTS.all().values() for name in source.small_files]
    names = (CONFIG_FILE, GENERATION_CONFIG_FILE, *of_sources, *_SMALL_FILES)
    small = [name for name in names if (folder / name).is_file()]
    if (folder / SINGLE_FILE).is_file():
        weights = [SINGLE_FILE]
    else:
        small.append(INDEX_FILE)
        weights = sorted(set(read_json(folder / INDEX_FILE)["weight_map"].values()))
    return hashed(folder, small, weights)


def hashed(folder: Path, small: Sequence[str], weights: Sequence[str]) -> dict[str, str]:
    """The hashes of small files of a folder, and of files of weights; raises as `fingerprint`."""
    try:
        hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in small}
        return hashes | {name: _sampled(folder / name, most_blocks=_MOST_BLOCKS // len(weights)) for name in weights}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}): copy or download it again") from error


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
