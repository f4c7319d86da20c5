"""The checkpoints that all peers read: folders that are there, or synthetic weights in bf16, written once."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.measured import ROOT
from llama_ssp import catalogue
from llama_ssp.architectures.model_files import GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from llama_ssp.weights.checkpoint import SINGLE_FILE
from llama_ssp.weights.hub import WEIGHTS
from llama_ssp.weights.source import WeightSource
from llama_ssp.weights.synthetic import synthesize


def prepare(names: Sequence[str], *, agreement: float) -> dict[Path, WeightSource]:
    """Make the folders of two names of the catalogue without weights; returns them, and what `write` writes."""
    sources = synthesize([shape for name in names if (shape := catalogue.load(name).shape)], agreement=agreement)
    parent, found = ROOT / "outputs" / "gpu_peers" / f"{'-'.join(names)}-{agreement:g}", dict[Path, WeightSource]()
    for name, source in zip(names, sources, strict=True):
        found[folder := parent / name] = source
        folder.mkdir(parents=True, exist_ok=True)
        for file in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE):
            shutil.copyfile(source.folder / file, folder / file)
        config = source.config
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
        config.save_pretrained(folder)
    return found


def write(folder: Path, source: WeightSource, *, device: torch.device) -> None:
    """Write weights, made on a device, unless they are there; the folder has them from one moment to the next."""
    if not any(folder.glob(WEIGHTS)):
        tensors = {name: source.read(name, dtype=torch.bfloat16, device=device).cpu() for name in source.tensors}
        save_file(tensors, folder / "unfinished", metadata={"format": "pt"})
        (folder / "unfinished").rename(folder / SINGLE_FILE)
