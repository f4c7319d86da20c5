"""A user's own folder of options."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

OwnConf: TypeAlias = Callable[[str, str], Path]
"""Writes a file into the folder: its path below the folder, and its text; returns its whole path."""

MODEL = """
name: mine
hub_id: acme/mine
default_draft: 7B
shape: {model_type: llama, num_hidden_layers: 3, hidden_size: 128, num_attention_heads: 4, num_key_value_heads: 4,
  head_dim: 32, intermediate_size: 256, vocab_size: 32000, max_position_embeddings: 512}
"""
MACHINE = """
name: mybox
device: cuda
gpu: Toy-9000
num_gpus: 2
memory_bytes: 80000000000
context_bytes: 500000000
collective_bytes: 100000000
bandwidth_bytes_per_s: 1.0e12
flops_per_s: {fp16: 1.0e14}
kernel_s: 3.0e-6
launch_s: 6.0e-6
link: {bandwidth_bytes_per_s: 1.0e11, latency_s: 1.0e-5}
"""
EXPERIMENT = """
# @package _global_
defaults:
  - override /task: latency
  - override /model: mine
max_new_tokens: 7
"""
PAIRS = """
pairs:
  - {target: mine, draft: 7B, acceptance: 0.61}
"""


def writer(folder: Path) -> OwnConf:
    def write(name: str, text: str) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.lstrip("\n"), encoding="utf-8")
        return file

    return write


def write_all(write: OwnConf) -> None:
    for name, text in (
        ("model/mine.yaml", MODEL),
        ("hardware/mybox.yaml", MACHINE),
        ("experiment/paper.yaml", EXPERIMENT),
        ("pairs.yaml", PAIRS),
    ):
        write(name, text)
