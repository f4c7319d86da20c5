"""What a round takes in every placement and precision of the shipped pair: `python -m benchmarks.placements`.

It starts one process for the cells of one rank and a pair of processes for those of two. All cells of a group are in
memory at once and take turns, each decoding the same prompt; a time is that of a round, or of a plain step, between the
prefill's result and the last one, on rank 0. DeepSpeed's places (fp32) are measured where it can be imported, and
listed with what would install it elsewhere. Cells are the business of `placement_cells`, pages of `placement_pages`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import TEXT, decode_once, tokens_per_round
from benchmarks.placement_cells import DRAFT, FORMS, PLACES, TARGET, Cell, cells
from benchmarks.placement_pages import refusals
from benchmarks.timing import store
from llama_ssp.architectures.family import inventory
from llama_ssp.calibration.interleave import interleave
from llama_ssp.config import checks
from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.world import World, start
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.errors import SspError
from llama_ssp.planning.spec import model_bytes, planned_model
from llama_ssp.session.checkpoints import find_sources
from llama_ssp.session.loading import build_decoder, load_models
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import cut

PROMPT_TOKENS, NEW_TOKENS = 32, 40
ROOT = Path(__file__).resolve().parents[1]


@dataclass(kw_only=True)
class Candidate:
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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of a cell; `refused` says why nothing was.

    Attributes:
        round_ms: the median over repetitions.
        tokens_per_round: of a row.
    """

    place: str
    form: str
    num_ranks: int
    batch_size: int
    refused: str | None = None
    round_ms: float | None = None
    tokens_per_round: float | None = None


def prepare(cell: Cell, world: World, num_draft_tokens: int) -> Candidate | str:
    """Load a cell's models and decode once; or why that cannot be."""
    config = cell.config(num_draft_tokens)
    try:
        checks.check(config, frozenset(), world_size=world.comm.size)
        models = load_models(config, world, find_sources(config, world))
        decoder = build_decoder(models, config, speculative=cell.place.drafts)
        (prompt,) = cut(encode(TEXT, models.tokenizer, chat=False), num_prompts=1, num_tokens=PROMPT_TOKENS)
        requests = [
            Request(
                index=models.mesh.number, sample=sample, prompt_ids=prompt, max_new_tokens=NEW_TOKENS,
                num_equal_before=models.mesh.number,
            )
            for sample in range(cell.place.batch_size)
        ]  # fmt: skip
        candidate = Candidate(world=world, decoder=decoder, requests=requests)
        candidate.round_ms(-1)
    except (SspError, NotImplementedError) as error:  # the second is torch's word for a format without a kernel
        return " ".join(str(error).split())
    return candidate


def measure_group(file: Path, names: Collection[str], *, num_draft_tokens: int, num_repetitions: int) -> None:
    """Measure the cells for as many ranks as there are, all of which call this; the first one writes the file."""
    with start(device=DeviceKind.cpu, timeout_s=600) as world:
        found = [(cell, prepare(cell, world, num_draft_tokens)) for cell in cells(world.comm.size, names)]
        callables: dict[str, Callable[[int], float]] = {
            _key(cell): each.round_ms for cell, each in found if isinstance(each, Candidate)
        }
        ms = interleave(callables, num_repetitions=num_repetitions, num_warmup=0)  # `prepare` has warmed up
        if world.comm.rank == 0:
            file.write_text(json.dumps([asdict(_figures(cell, each, ms)) for cell, each in found]))


def _key(cell: Cell) -> str:
    return f"{cell.place.name} | {cell.form.name}"


def _figures(cell: Cell, found: Candidate | str, ms: dict[str, list[float]]) -> Figures:
    place = cell.place
    figures = Figures(
        place=place.name, form=cell.form.name, num_ranks=place.num_ranks, batch_size=place.batch_size
    )  # fmt: skip
    if isinstance(found, str):
        return replace(figures, refused=found)
    return replace(figures, round_ms=statistics.median(ms[_key(cell)]), tokens_per_round=statistics.mean(found.yielded))


def launch(num_ranks: int, arguments: argparse.Namespace) -> list[Figures]:
    """Start a group of ranks and read what its first one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        own = ["-m", "benchmarks.placements", "--group", str(file), "--repetitions", str(arguments.repetitions)]
        own += ["--num-draft-tokens", str(arguments.num_draft_tokens), "--forms", *arguments.forms]
        subprocess.run([sys.executable, *(ranks if num_ranks > 1 else []), *own], cwd=ROOT, check=True)
        return [Figures(**each) for each in json.loads(file.read_text())]


def target_bytes() -> dict[str, int]:
    """Bytes of the whole target in each form, as the planner counts them."""
    planned = {form.name: planned_model(form.entry(TARGET), device="cpu") for form in FORMS}
    return {
        name: model_bytes(inventory(model.shape), model, device="cpu").total_bytes for name, model in planned.items()
    }


def show(figures: Sequence[Figures], console: Console) -> None:
    """Print the table: a line for each place, a column for each form."""
    ms = {(each.place, each.form): each.round_ms for each in figures}
    table = Table(title="ms per round", title_justify="left", show_edge=False, caption_justify="left")
    table.add_column("")
    for form in FORMS:
        table.add_column(form.name.replace(" ", "\n").replace("_", "_\n"), justify="right", vertical="bottom")
    for place in PLACES:
        found = [ms.get((place.name, form.name)) for form in FORMS]
        table.add_row(place.name, *("-" if each is None else f"{each:.2f}" for each in found))
    console.print(table)
    for line in refusals([asdict(each) for each in figures]):
        console.print(line)


def main() -> None:
    """Measure in groups of ranks, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    names = [form.name for form in FORMS]
    parser.add_argument("--forms", nargs="+", default=names, choices=names, help="precisions (default: all)")
    parser.add_argument(
        "--store", action="store_true", help="append the figures to benchmarks/results/placements.jsonl"
    )
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.group:
        measure_group(
            arguments.group,
            arguments.forms,
            num_draft_tokens=arguments.num_draft_tokens,
            num_repetitions=arguments.repetitions,
        )
        return
    console = Console(width=160)
    figures = [each for num_ranks in (1, 2) for each in launch(num_ranks, arguments)]
    show(figures, console)
    if arguments.store:
        row = {
            "target": TARGET,
            "draft": DRAFT,
            "num_draft_tokens": arguments.num_draft_tokens,
            "num_threads": torch.get_num_threads(),
            "target_bytes": target_bytes(),
            "cells": [asdict(each) for each in figures],
        }
        console.print(f"stored in {store('placements', row)}")


if __name__ == "__main__":
    main()
