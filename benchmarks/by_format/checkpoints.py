"""The checkpoints that are compared: those of the catalogue, or a random Llama, in 16 bits and widened to fp32.

Every library converts from the files in fp32. Ours reads both.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp.calibration.random_llama import RandomLlama
from llama_ssp.config import catalogue
from llama_ssp.weights import hub

FOLDER = Path("outputs/by_format")
RANDOM = "random-300M"
_RANDOM_LLAMA = RandomLlama(width=1024, num_layers=20, vocab_size=32000, from_16_bits=True)
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One model in two folders."""

    halves: Path
    fp32: Path


def stored(name: str, *, below: Path = FOLDER) -> Stored:
    """A model of the catalogue, or `RANDOM`, whose weights are drawn here; files are written unless they are there."""
    fp32 = below / name
    if name != RANDOM:
        halves = hub.resolve(catalogue.load(name))
    else:
        halves = below / f"{name}-halves"
        if not halves.exists():
            tensors = {each: _RANDOM_LLAMA.read(each) for each in _RANDOM_LLAMA.tensors}
            config = _RANDOM_LLAMA.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
            # No text is made of its tokens, but libraries want a tokenizer.
            _write(halves, tensors, config, tokenizer=hub.resolve(catalogue.load("tiny")))
    if not fp32.exists():
        widened = {each: tensor.float() for each, tensor in _tensors(halves)}
        config = json.loads((halves / _CONFIG).read_text(encoding="utf-8"))
        _write(fp32, widened, config | {"dtype": "float32"}, tokenizer=halves)
    return Stored(halves=halves, fp32=fp32)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object], *, tokenizer: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / name, unfinished / name)
    (unfinished / _CONFIG).write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    save_file(tensors, unfinished / _WEIGHTS, metadata={"format": "pt"})
    unfinished.rename(folder)
