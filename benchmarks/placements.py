"""The time of a round in every placement and precision of the shipped pair: `python -m benchmarks.placements --store`.

One process measures the cells of one rank, a pair of processes those of two. All cells of a group are in memory at once
and take turns on the same prompt; a time is that of a round, or of a plain step, after the prefill, on rank 0.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.decoding import TEXT, decode_once, run_config, tokens_per_round
from benchmarks.measured import Row, group_of_ranks, markdown, store
from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import SspError
from llama_ssp.planning.memory import model_bytes
from llama_ssp.planning.spec import planned_model
from llama_ssp.ranks.world import World, start
from llama_ssp.run.calibration.interleave import interleave
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.requests import encode
from llama_ssp.run.tasks.benchmark import cut
from llama_ssp.settings import checks
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SpeculationConfig,
    TargetKind,
    TargetPlacement,
)
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request

TARGET, DRAFT, NUM_DRAFT_TOKENS = "tiny", "tiny-draft", 4
PROMPT_TOKENS, NEW_TOKENS = 32, 40
ALONE, ONE_RANK, SPLIT = "1 rank, target alone", "1 rank, both models", "target on 2 ranks"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who holds what: a line of the table.

    Attributes:
        plain: the line in which the same target decodes alone.
    """

    num_ranks: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    drafts: bool = True
    plain: str | None = None
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """Number format of both models, and how the linear layers of each are stored: a column of the table."""

    dtype: Dtype = Dtype.fp32
    target: str = "none"
    draft: str = "none"

    def entry(self, name: str) -> ModelConfig:
        """The catalogue's entry in this form."""
        quantization = self.target if name == TARGET else self.draft
        return replace(catalogue.load(name), dtype=self.dtype, quantization=quantization)


def _draft(kind: DraftLayout) -> PlacementConfig:
    return PlacementConfig(draft=DraftPlacement(kind=kind))


_SPLIT_ALONE, _REPLICATED = f"{SPLIT}, alone", _draft(DraftLayout.replicated)
PLACES = {
    ALONE: Place(drafts=False),
    ONE_RANK: Place(plain=ALONE),
    f"{ONE_RANK}, batch 8": Place(batch_size=8),
    "1 rank, the target's layers in a row": Place(
        plain=ALONE, placement=PlacementConfig(target=TargetPlacement(kind=TargetKind.accelerate))
    ),
    _SPLIT_ALONE: Place(num_ranks=2, drafts=False),
    f"{SPLIT}, draft one_rank": Place(num_ranks=2, plain=_SPLIT_ALONE),
    f"{SPLIT}, draft sharded": Place(num_ranks=2, plain=_SPLIT_ALONE, placement=_draft(DraftLayout.sharded)),
    f"{SPLIT}, draft replicated": Place(num_ranks=2, plain=_SPLIT_ALONE, placement=_REPLICATED),
    f"{SPLIT}, draft one_rank, batch 8": Place(num_ranks=2, batch_size=8),
    f"{SPLIT}, draft replicated, batch 8": Place(num_ranks=2, batch_size=8, placement=_REPLICATED),
    "target on rank 0, draft sharded over both": Place(
        num_ranks=2,
        placement=PlacementConfig(
            target=TargetPlacement(ranks=[0]), draft=DraftPlacement(kind=DraftLayout.sharded, ranks=[0, 1])
        ),
    ),
    "target on rank 0, draft own_gpu": Place(num_ranks=2, placement=_draft(DraftLayout.own_gpu)),
    "2 replicas, a rank each": Place(num_ranks=2, placement=PlacementConfig(num_replicas=2)),
}
FP32 = "fp32"
FORMS = {
    FP32: Form(),
    "bf16": Form(dtype=Dtype.bf16),
    "fp16": Form(dtype=Dtype.fp16),
    "int8": Form(target="int8"),
    "nf4": Form(target="nf4"),
    "int8_weight_only": Form(target="int8_weight_only"),
    "int8_weight_only, bf16": Form(dtype=Dtype.bf16, target="int8_weight_only"),
    "draft int8": Form(draft="int8"),
    "draft int8_weight_only": Form(draft="int8_weight_only"),
}


def config_of(place: Place, form: Form) -> RunConfig:
    """The run of a cell."""
    return run_config(
        form.entry(TARGET), form.entry(DRAFT) if place.drafts else None, placement=place.placement,
        speculation=SpeculationConfig(num_draft_tokens=NUM_DRAFT_TOKENS), batch_size=place.batch_size,
    )  # fmt: skip


@dataclass(kw_only=True)
class Cell:
    """A cell in memory, and the tokens that its counted rounds have yielded."""

    world: World
    decoder: Decoder
    requests: Sequence[Request]
    yielded: list[float] = field(default_factory=list)

    def round_ms(self, repetition: int) -> float:
        """Milliseconds of a round, all ranks beginning together."""
        self.world.comm.barrier()
        seconds, num_rounds, completions = decode_once(self.decoder, list(self.requests), seed=repetition + 1)
        if repetition >= 0:
            self.yielded += [tokens_per_round(completion) for completion in completions]
        return 1e3 * seconds / num_rounds


def prepare(place: Place, form: Form, world: World) -> Cell | str:
    """Load a cell's models and decode once; or why that cannot be."""
    config = config_of(place, form)
    try:
        checks.check(config, frozenset(), world_size=world.comm.size)
        models = load_models(config, world, find_sources(config, world))
        (prompt,) = cut(encode(TEXT, models.tokenizer), num_prompts=1, num_tokens=PROMPT_TOKENS)
        number = models.mesh.number
        requests = [
            Request(index=number, sample=sample, prompt_ids=prompt, max_new_tokens=NEW_TOKENS, num_equal_before=number)
            for sample in range(place.batch_size)
        ]
        cell = Cell(world=world, decoder=build_decoder(models, config, speculative=place.drafts), requests=requests)
        cell.round_ms(-1)
    except (SspError, NotImplementedError) as error:  # the second is torch's word for a format without a kernel
        return " ".join(str(error).split())
    return cell


def measure_group(file: Path, forms: Sequence[str], *, num_repetitions: int) -> None:
    """Measure the cells for as many ranks as there are, all of which call this; the first one writes the file."""
    with start(device=DeviceKind.cpu, timeout_s=600) as world:
        found = {
            (name, form): prepare(place, FORMS[form], world)
            for name, place in PLACES.items()
            for form in forms
            if place.num_ranks == world.comm.size and (place.drafts or FORMS[form].draft == "none")
        }
        ready = {key: cell for key, cell in found.items() if isinstance(cell, Cell)}
        turns = {" | ".join(key): cell.round_ms for key, cell in ready.items()}
        ms = interleave(turns, num_repetitions=num_repetitions, num_warmup=0)  # `prepare` has warmed up
        rows: list[Row] = []
        for (place, form), cell in found.items():
            figures: Row = {"place": place, "form": form, "refused": None, "round_ms": None, "tokens_per_round": None}
            if isinstance(cell, Cell):
                taken = statistics.median(ms[f"{place} | {form}"])
                rows.append(figures | {"round_ms": taken, "tokens_per_round": statistics.mean(cell.yielded)})
            else:
                rows.append(figures | {"refused": cell})
        if world.comm.rank == 0:
            file.write_text(json.dumps(rows))


def target_bytes() -> dict[str, int]:
    """Bytes of the whole target in each form, as the planner counts them."""
    planned = {name: planned_model(form.entry(TARGET), device="cpu") for name, form in FORMS.items()}
    return {
        name: model_bytes(inventory(model.shape), model, device="cpu").total_bytes for name, model in planned.items()
    }


def with_ratios(cells: Iterable[Row]) -> list[Row]:
    """The cells of known lines with the ratios of their medians.

    `to_fp32` is the time over that of the same line in fp32, and `speedup` plain over speculative time for a token,
    where the same target was measured alone.
    """
    known = [each for each in cells if each["place"] in PLACES]
    ms = {(each["place"], each["form"]): each["round_ms"] for each in known}

    def ratios(cell: Row) -> Row:
        own, form, alone = cell["round_ms"], cell["form"], PLACES[cell["place"]].plain
        in_fp32, alone_ms = ms.get((cell["place"], FP32)), ms.get((alone, form)) or ms.get((alone, FP32))
        return {
            "to_fp32": own / in_fp32 if own and in_fp32 else None,
            "speedup": cell["tokens_per_round"] * alone_ms / own if own and alone_ms else None,
        }

    return [{**cell, **ratios(cell)} for cell in known]


_SETTING = (
    "`{target}` with `{draft}`, K = {num_draft_tokens}, temperature 0.8. The cells are medians, measured in turns. The "
    "ranks share {num_threads} threads of an {processor}; torch {torch}, commit {commit}. A precision is the target's, "
    "unless the column names the draft. Everything else is fp32; in the bf16 and fp16 columns both models have that "
    "format."
)
_REMARK = (
    "With a batch of 8, a round yields eight times the tokens. Each replica works on its own text, so two rounds take "
    "the time of one. Two ranks share the cores that one process has alone: compare placements on two ranks with each "
    "other, not with one rank."
)


def document(row: Row) -> str:
    """docs/benchmarks/placements.md."""
    cells = with_ratios(row["cells"])
    refused = [f"- {each['place']}, {each['form']}: {each['refused']}" for each in cells if each["refused"]]
    parts = [
        "# A round in every placement and precision",
        "`python -m benchmarks.readme` makes this page from the newest row of `python -m benchmarks.placements`.",
        _SETTING.format(**row, torch=row["versions"]["torch"], commit=str(row["git_commit"])[:12]),
        "## Milliseconds per round, or per plain step where the target is alone",
        _table(cells, "round_ms", "{:.2f}"),
        _REMARK,
        "## Ratio to fp32 in the same line",
        _table(cells, "to_fp32", "{:.2f}"),
        "## Speed-up by speculation over the same target alone",
        _table(cells, "speedup", "{:.2f}x"),
    ]
    return "\n\n".join([*parts, *(["## Not measured", "\n".join(refused)] if refused else [])]) + "\n"


def _table(cells: Sequence[Row], key: str, form: str) -> str:
    """Lines for places, columns for precisions; lines without any such figure are left out."""
    found = {(each["place"], each["form"]): each[key] for each in cells}
    lines = []
    for place in PLACES:
        values = [found.get((place, name)) for name in FORMS]
        if any(values):
            lines.append([place, *("-" if value is None else form.format(value) for value in values)])
    return markdown(["", *FORMS], lines)


def precision(row: Row) -> str:
    """What each precision of the target costs on one rank, for the guide."""
    cells: Mapping[tuple[str, str], Row] = {(each["place"], each["form"]): each for each in with_ratios(row["cells"])}
    lines = []
    for name, num_bytes in row["target_bytes"].items():
        alone, both = cells.get((ALONE, name)), cells.get((ONE_RANK, name))
        if alone and both and alone["to_fp32"] and both["to_fp32"]:
            ratios = [f"{each['to_fp32']:.2f}" for each in (alone, both)]
            lines.append([name, f"{num_bytes / 2**20:.0f}", *ratios, f"{both['speedup']:.2f}x"])
    heads = ["target, one rank", "weights, MiB", "plain step / fp32's", "round / fp32's", "speculation gains"]
    return (
        f"{markdown(heads, lines)}\n\nMeasured on the shipped pair with {row['num_threads']} threads of an "
        f"{row['processor']}, K = {row['num_draft_tokens']}. The fp32 line keeps its weights in 16 bits."
    )


def main() -> None:
    """Measure in groups of ranks, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS, help="precisions (default: all)")
    parser.add_argument("--store", action="store_true", help="append to benchmarks/results/placements.jsonl")
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    measure = partial(measure_group, forms=arguments.forms, num_repetitions=arguments.repetitions)
    if arguments.group:
        measure(arguments.group)
        return
    words = ["--repetitions", str(arguments.repetitions), "--forms", *arguments.forms]
    row: dict[str, Any] = {
        "target": TARGET, "draft": DRAFT, "num_draft_tokens": NUM_DRAFT_TOKENS,
        "num_threads": torch.get_num_threads(), "target_bytes": target_bytes(),
        "cells": [each for number in (1, 2) for each in group_of_ranks("benchmarks.placements", number, words)],
    }  # fmt: skip
    for key, form in (("round_ms", "{:.2f}"), ("speedup", "{:.2f}x")):
        print(_table(with_ratios(row["cells"]), key, form))
    if arguments.store:
        store("placements", row)


if __name__ == "__main__":
    main()
