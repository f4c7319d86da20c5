"""The checkpoints that are compared: those of the catalogue, or random Llamas, in 16 bits and widened to fp32.

Every library converts from the files in fp32. Ours keeps weights that 16 bits hold in 16 bits, so for its fp32 it reads
files whose weights have all bits of fp32.
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
RANDOM, RANDOM_DRAFT = "random-300M", "random-10M"
_RANDOM_LLAMAS = {
    RANDOM: RandomLlama(width=1024, num_layers=20, vocab_size=32000, from_16_bits=True),
    RANDOM_DRAFT: RandomLlama(width=128, num_layers=2, vocab_size=32000, from_16_bits=True),
}
_NEAR_ONE = 1 + 1 / 3 * 2.0**-10
"""Makes of weights with 11 significant bits ones with 24."""
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One model in three folders.

    Attributes:
        halves: in 16 bits.
        fp32: the same numbers in fp32.
        all_bits: numbers near them that no 16 bits hold.
    """

    halves: Path
    fp32: Path
    all_bits: Path


def stored(name: str, *, below: Path = FOLDER) -> Stored:
    """A model of the catalogue, or a random one, whose weights are drawn here; files are written where none are."""
    fp32, all_bits = below / name, below / f"{name}-all-bits"
    if name not in _RANDOM_LLAMAS:
        halves = hub.resolve(catalogue.load(name))
    else:
        halves = below / f"{name}-halves"
        if not halves.exists():
            llama = _RANDOM_LLAMAS[name]
            tensors = {each: llama.read(each) for each in llama.tensors}
            config = llama.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
            # No text is made of its tokens, but libraries want a tokenizer.
            _write(halves, tensors, config, tokenizer=hub.resolve(catalogue.load("tiny")))
    for folder, factor in ((fp32, 1.0), (all_bits, _NEAR_ONE)):
        if not folder.exists():
            widened = {each: tensor.float() * factor for each, tensor in _tensors(halves)}
            config = json.loads((halves / _CONFIG).read_text(encoding="utf-8"))
            _write(folder, widened, config | {"dtype": "float32"}, tokenizer=halves)
    return Stored(halves=halves, fp32=fp32, all_bits=all_bits)


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
