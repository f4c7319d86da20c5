"""Every precision of the shipped pair on one rank, plain and speculative: `python -m benchmarks.precisions --store`.

All candidates are in memory at once and take turns on the same prompt; a time is that of a plain step, or of a round,
after the prefill.
"""

import argparse
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import transformers

from benchmarks.decoding import load_pair, ours, prompt, run_config
from benchmarks.measured import Row, markdown, store
from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import SspError
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.weights import model_bytes
from llama_ssp.reports.provenance import processor
from llama_ssp.run.calibration import interleave

if TYPE_CHECKING:
    from llama_ssp.extensions.benchmark.benchmark import Ours

TARGET, DRAFT, NUM_DRAFT_TOKENS = "tiny", "tiny-draft", 4
PROMPT_TOKENS, NEW_TOKENS = 32, 40
ALONE, BOTH, FP32 = "1 rank, target alone", "1 rank, both models", "fp32"
FORMS = {
    FP32: (Dtype.fp32, "none"),
    "bf16": (Dtype.bf16, "none"),
    "fp16": (Dtype.fp16, "none"),
    "int8": (Dtype.fp32, "int8"),
    "nf4": (Dtype.fp32, "nf4"),
    "int8_weight_only": (Dtype.fp32, "int8_weight_only"),
    "int8_weight_only, bf16": (Dtype.bf16, "int8_weight_only"),
}
"""Number format of both models, and quantization of the target."""


def target_of(form: str) -> ModelConfig:
    """The target's entry in a precision."""
    dtype, quantization = FORMS[form]
    return replace(catalogue.load(TARGET), dtype=dtype, quantization=quantization)


def target_bytes(form: str) -> int:
    """Bytes of the whole target, as the planner counts them."""
    model = planned_model(target_of(form), device="cpu")
    return model_bytes(inventory(model.shape), model, device="cpu").total_bytes


def measure(num_repetitions: int) -> list[Row]:
    """Measure plain steps and rounds in every precision that this machine has."""
    candidates: dict[tuple[str, str], Ours] = {}
    for form, (dtype, _) in FORMS.items():
        try:
            pair = load_pair(run_config(target_of(form), replace(catalogue.load(DRAFT), dtype=dtype)))
        except SspError as error:
            print(f"{form} is left out: {error}")
            continue
        prompts = [prompt(pair, PROMPT_TOKENS)]
        for place in (ALONE, BOTH):
            candidates[place, form] = ours(
                pair, pair.config, prompts, num_new_tokens=NEW_TOKENS, speculative=place == BOTH
            )
    turns = {" | ".join(key): candidate.ms_per_token for key, candidate in candidates.items()}
    interleave(turns, num_repetitions=num_repetitions)
    return [
        {
            "place": place,
            "form": form,
            "round_ms": statistics.median(candidate.rounds_ms),
            "tokens_per_round": candidate.tokens_per_round or 1.0,
        }
        for (place, form), candidate in candidates.items()
    ]


def text(row: Row) -> str:
    """What each precision of the target costs on one rank, for the guide."""
    cells = {(cell["place"], cell["form"]): cell for cell in row["cells"]}
    lines = []
    for form, num_bytes in row["target_bytes"].items():
        if (ALONE, form) not in cells:
            continue
        alone, both = (cells[place, form] for place in (ALONE, BOTH))
        ratios = [f"{cell['round_ms'] / cells[cell['place'], FP32]['round_ms']:.2f}" for cell in (alone, both)]
        gain = both["tokens_per_round"] * alone["round_ms"] / both["round_ms"]
        lines.append([form, f"{num_bytes / 2**20:.0f}", *ratios, f"{gain:.2f}x"])
    heads = ["target, one rank", "weights, MiB", "plain step / fp32's", "round / fp32's", "speculation gains"]
    return (
        f"{markdown(heads, lines)}\n\nMeasured on the shipped pair with {row['num_threads']} threads of an "
        f"{row['processor']}, K = {row['num_draft_tokens']}. The fp32 line keeps its weights in 16 bits."
    )


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", action="store_true", help="append to benchmarks/results/precisions.jsonl")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    row: Row = {
        "target": TARGET,
        "draft": DRAFT,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "num_threads": torch.get_num_threads(),
        "target_bytes": {form: target_bytes(form) for form in FORMS},
        "cells": measure(arguments.repetitions),
    }
    print(text(row | {"processor": processor()}))
    if arguments.store:
        store("precisions", row)


if __name__ == "__main__":
    main()
