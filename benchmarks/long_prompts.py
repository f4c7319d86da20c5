"""The first token of prompts of up to 32k tokens on this CPU: time and memory of runs, beside their plans.

    .venv/bin/python -m benchmarks.long_prompts           prints a table
    .venv/bin/python -m benchmarks.long_prompts --store   and stores it in benchmarks/results/long_prompts.jsonl

The model is a narrow Llama of random weights, so that attention takes most of the time; it is read in chunks of 512
tokens. Each run is a process of its own, as a user starts it. `scores_bytes` are those that a chunk's scores of all
heads would take if they were kept: what peaks must not grow by.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.measured import ROOT, Row, markdown, store
from llama_ssp.architectures.engine import PREFILL_CHUNK
from llama_ssp.reports.provenance import processor
from llama_ssp.run.tasks.dry_run import hardware_of, plan_of_run
from llama_ssp.settings.compose import compose, to_run_config

LENGTHS, NUM_WORDS = (2048, 8192, 32768), 500
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTHS[-1] + 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_model(folder: Path) -> None:
    """Save the model, and a tokenizer whose tokens are words."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(NUM_WORDS)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def settings(model: Path, prompts: Path) -> list[str]:
    """The words of a run that stops at the first token."""
    return [
        "task=generate",
        "task.format=jsonl",
        "device=cpu",
        "draft=none",
        "model=local",
        f"model.path={model}",
        "model.dtype=fp32",
        "ignore_eos=true",
        "max_new_tokens=1",
        f"prompts={prompts}",
    ]


def measure(model: Path, length: int) -> Row:
    """Times and bytes of one run."""
    prompts = model.parent / f"{length}.jsonl"
    text = " ".join(f"t{7 * place % NUM_WORDS}" for place in range(length))
    prompts.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
    words, run_dir = settings(model, prompts), model.parent / f"run{length}"
    (composed,) = compose(words)
    config = to_run_config(composed)
    plan = plan_of_run(config, world_size=1, machine=hardware_of(config, on_cpu=True), lengths=[length])
    with subprocess.Popen(
        [sys.executable, "-m", "llama_ssp", "run", *words, f"run_dir={run_dir}"], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    [line] = map(json.loads, (run_dir / "run.jsonl").read_text(encoding="utf-8").splitlines())
    rank = plan.ranks[0]
    return {
        "tokens": length,
        "first_token_s": line["first_token_ms"] / 1e3,
        "planned_s": plan.timing.plain_prefill_s,
        "peak_bytes": 1024 * used.ru_maxrss,
        "planned_bytes": rank.total_bytes,
        "cache_bytes": rank.target_cache_bytes,
        "scores_bytes": 4 * SIZES["num_attention_heads"] * PREFILL_CHUNK * length,
    }


def text(row: Row) -> str:
    """The table, and what the peak has grown by."""
    cells: list[Row] = row["cells"]
    heads = ["tokens", "first token, s", "planned, s", "measured / planned", "peak, MiB", "planned, MiB"]
    lines = [
        [
            cell["tokens"],
            f"{cell['first_token_s']:.2f}",
            f"{cell['planned_s']:.2f}",
            f"{cell['first_token_s'] / cell['planned_s']:.2f}",
            *(f"{cell[name] / 2**20:.0f}" for name in ("peak_bytes", "planned_bytes")),
        ]
        for cell in cells
    ]
    first, last = cells[0], cells[-1]
    grown, caches, scores = (
        (last[name] - first[name]) / 2**20 for name in ("peak_bytes", "cache_bytes", "scores_bytes")
    )
    sizes = row["sizes"]
    return (
        f"{markdown(heads, lines)}\n\nA Llama of {sizes['num_hidden_layers']} layers, width {sizes['hidden_size']}, "
        f"{sizes['num_attention_heads']} heads of {sizes['head_dim']}, random weights in fp32, {row['num_threads']} "
        f"threads of an {row['processor']}, chunks of {PREFILL_CHUNK} tokens. From {first['tokens']} to "
        f"{last['tokens']} tokens the peak of the process grows by {grown:.0f} MiB, keys and values by {caches:.0f}; "
        f"kept scores of a chunk would add {scores:.0f}. The peak counts the libraries' files in memory, and a plan "
        "does not."
    )


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="keep the figures")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the prompts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model)
        cells = [measure(model, length) for length in arguments.lengths]
    row: Row = {"sizes": SIZES, "num_threads": torch.get_num_threads(), "cells": cells}
    print(text(row | {"processor": processor()}))
    if arguments.store:
        store("long_prompts", row)


if __name__ == "__main__":
    main()
