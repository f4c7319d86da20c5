"""What every rank of a test group does: all cases of one world size in one launch, since each start costs seconds.

Started by `conftest.launched` through torchrun, as FOLDER OUT cells|deepspeed; each rank writes what it saw to
OUT/RANK.json. A group of one rank is the process of the tests.
"""

import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypedDict

import torch

from benchmarks import decoding
from llama_ssp.errors import CheckpointError, SspError
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.ranks.world import World, start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import Models, build_decoder, load_models
from llama_ssp.run.jobs import encode
from llama_ssp.run.tuning import tune
from llama_ssp.settings import catalogue
from llama_ssp.settings.drafters import NGRAM_DRAFT, NgramConfig
from llama_ssp.settings.formats import formats
from llama_ssp.settings.schema import (
    ADAPTIVE,
    DeviceKind,
    Dtype,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    WeightsKind,
)
from llama_ssp.speculate.engine.state import Request
from tests.distributed.cells import (
    DEEPSPEED_CELLS,
    MOST_DEFAULT_RANKS,
    ONLY_HEAVY,
    PAIRS,
    SIZES,
    Cell,
    cells_of,
    lane_of,
    on_one_rank,
)
from tests.helpers.counting_comm import CountingComm
from tests.helpers.gloo_threads import end_with_an_error_if_left
from tests.helpers.prompts import PROMPTS
from tests.helpers.shapes import SHAPES

SYNTHETIC = "synthetic"
LANE = "LLAMA_SSP_TEST_LANE"
"""The variable by which the ranks of a group know the lane of the tests."""
NUM_NEW_TOKENS = 24
# Families whose targets are quantized too: one for the lean decoder, one for the library's modules.
QUANTIZED, QUANTIZED_RANKS = ("llama", "gpt_neox"), 2
CELL_TOKENS = 12


class Placed(TypedDict):
    """What a rank saw of one cell."""

    texts: list[list[int]]
    round_bytes: list[int]


def run_config(
    target: ModelConfig, draft: ModelConfig, *, temperature: float, batch_size: int, placement: PlacementConfig
) -> RunConfig:
    """A config as `launch/run.py` would compose it."""
    sampling = SamplingConfig(temperature=temperature)
    return decoding.run_config(
        target, draft, placement=placement, sampling=sampling, batch_size=batch_size, seed=3, ignore_eos=False
    )


def pair_of(name: str, folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """The shipped pair in fp32, larger shapes that compute it, or the random pair of one family that was saved."""
    if name == SYNTHETIC:
        entry = ModelConfig(name=name, dtype=Dtype.fp32, shape=SHAPES["hardly room"])
        return entry, entry
    if name == "tiny":
        return catalogue.load("tiny"), catalogue.load("tiny-draft")
    if name == "head":
        return catalogue.load("tiny"), ModelConfig(name=name, path=str(folder / name), dtype=Dtype.fp32)
    pair = [ModelConfig(name=part, path=str(folder / name / part), dtype=Dtype.fp32) for part in ("target", "draft")]
    return pair[0], pair[1]


def prompts_of(name: str) -> list[str]:
    """Texts and an empty one for the shipped pair, 51 in the slow lane; words of their tokenizer for random pairs."""
    if name == SYNTHETIC:
        return list(PROMPTS[::5])
    texts = PROMPTS if os.environ.get(LANE) == "slow" else PROMPTS[::6]
    if name == "head":
        return [PROMPTS[0], PROMPTS[3][:40], "7 x 8 =", ""]
    return [*texts, ""] if name == "tiny" else ["t5 t9 t3", "t7", "t11 t12 t13 t14 t15 t16 t17", "t8 t8"]


def cell_config(cell: Cell, folder: Path, temperature: float) -> RunConfig:
    """The config of a cell of the table."""
    target, draft = pair_of(cell.pair, folder)
    config = run_config(target, draft, temperature=temperature, batch_size=cell.batch_size, placement=cell.placement)
    config.verification.rule, config.speculation.tree = cell.rule, cell.tree
    if not cell.draft:
        config.draft = NgramConfig(kind=NGRAM_DRAFT)
    if cell.adapts:
        config.speculation.num_draft_tokens, config.draft.fallback = ADAPTIVE, NGRAM_DRAFT
    config.run_dir = str(folder / "run")  # layers on disk go there
    return config


def complete(world: World, config: RunConfig, prompts: list[str], *, num_tokens: int) -> Placed:
    """What a run of this config generates on these ranks, and the bytes that arrive on this one in each round."""
    mesh = (models := _loaded(world, config)).mesh
    counting = CountingComm.of(mesh.replica)
    draft = mesh.draft and replace(CountingComm.of(mesh.draft), arrived=counting.arrived)
    models = replace(models, mesh=replace(mesh, replica=counting, draft=draft))
    decoder = build_decoder(models, config, speculative=True)
    round_bytes, step = set[int](), decoder.round.step

    def counted(*arguments: Any, **named: Any) -> object:  # noqa: ANN401 - those of `Round.step`
        before = counting.arrived[0]
        result = step(*arguments, **named)
        round_bytes.add(counting.arrived[0] - before)
        return result

    decoder.round.step = counted  # type: ignore[method-assign, assignment]
    requests = [
        Request(index=index, prompt_ids=encode(prompt, models.tokenizer, chat=False), max_new_tokens=num_tokens)
        for index, prompt in enumerate(prompts)
    ]
    done: dict[int, list[int]] = {}
    with torch.inference_mode():
        if config.speculation.adapts:
            decoder.make_room(requests)
            tune(decoder, config, comm=world.comm, num_slots=128)
        for updates in decoder.run(requests):
            done |= {update.completion.request.index: update.completion.token_ids for update in updates}
    return Placed(texts=[done[index] for index in range(len(requests))], round_bytes=sorted(round_bytes))


_LAST: list[tuple[object, Models]] = []


def _loaded(world: World, config: RunConfig) -> Models:
    """The models of a config; those of the one before, where only the sampling and the rule differ."""
    key = config.model, config.draft, config.placement, config.weights, config.batch_size
    if not _LAST or _LAST[0][0] != key:
        _LAST.clear()
        _LAST.append((key, load_models(config, world, find_sources(config, world))))
    return _LAST[0][1]


def texts(world: World, folder: Path, name: str, temperature: float) -> list[list[int]]:
    """Ids that a pair generates with the target on all ranks and the draft on the first."""
    target, draft = pair_of(name, folder)
    config = run_config(target, draft, temperature=temperature, batch_size=9, placement=PlacementConfig())
    config.weights = WeightsKind.synthetic if name == SYNTHETIC else WeightsKind.checkpoint
    return complete(world, config, prompts_of(name), num_tokens=NUM_NEW_TOKENS)["texts"]


def quantized_logits(world: World, folder: Path, family: str, form: str) -> list[list[float]]:
    """Logits (T, V) of a target in some precision; the draft has another one."""
    target = ModelConfig(name="target", path=str(folder / "wide" / family), dtype=Dtype.fp32, quantization=form)
    draft = replace(pair_of(family, folder)[1], quantization="int8_weight_only")
    config = run_config(target, draft, temperature=0.0, batch_size=1, placement=PlacementConfig())
    runner = load_models(config, world, find_sources(config, world)).target
    runner.allocate(batch_size=1, capacity=16)
    ids_BT = torch.arange(20, 32)[None]
    head = runner.forward(ids_BT[:, :8], torch.arange(8)[None], bucket=8)
    tail = runner.forward(ids_BT[:, 8:], torch.arange(8, 12)[None], bucket=16)
    logits: list[list[float]] = torch.cat([head, tail], dim=1)[0].tolist()
    return logits


def error_of_one_rank(world: World) -> str:
    """What this rank hears when the last rank alone fails."""
    try:
        with raise_on_all_ranks(world.comm):
            if world.comm.rank == world.comm.size - 1:
                raise CheckpointError("the last shard is missing")
    except SspError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cases_of_cells(world: World, folder: Path, cells: Collection[Cell]) -> dict[str, Callable[[], object]]:
    """What each cell generates, greedily and sampled."""
    return {
        f"{cell} at {temperature}": lambda cell=cell, temperature=temperature: complete(  # type: ignore[misc]
            world, cell_config(cell, folder, temperature), prompts_of(cell.pair), num_tokens=CELL_TOKENS
        )
        for cell in cells
        for temperature in (0.0, 0.8)
    }


def pairs_of(num_ranks: int, lane: str) -> tuple[str, ...]:
    """The pairs that they ask for; what one rank makes of all of them is what cells are compared with."""
    lanes = {"default": ("default",), "slow": ("default", "heavy", "slow")}.get(lane, ("default", "heavy"))
    if lane == ONLY_HEAVY and num_ranks > 1:
        lanes = ("heavy",)
    return tuple(name for name in PAIRS if num_ranks in SIZES and lane_of(name, num_ranks) in lanes)


def cases(world: World, folder: Path, *, lane: str) -> dict[str, Callable[[], object]]:
    """Everything that the tests of a lane ask of a group of this size."""
    rank, size = world.comm.rank, world.comm.size
    named: dict[str, Callable[[], object]] = {
        "error": lambda: error_of_one_rank(world),
        "gathered": lambda: world.comm.gather_text("é" * rank),
        "broadcast": lambda: world.comm.broadcast_text(f"from {rank}", src=size - 1),
    }
    is_known = lane == ONLY_HEAVY and size <= MOST_DEFAULT_RANKS  # the default tests compare it
    if size in SIZES and not is_known:
        named[SYNTHETIC] = lambda: texts(world, folder, SYNTHETIC, 0.0)
    named |= cases_of_cells(world, folder, cells_of(size, lane))
    if size == 1:
        other_rules = {on_one_rank(cell) for cell in cells_of(2, lane) if cell.rule != "speculative" or cell.tree}
        named |= cases_of_cells(world, folder, other_rules)
    for name in pairs_of(size, lane):
        for temperature in (0.0, 0.8):
            named[f"{name} at {temperature}"] = lambda name=name, temperature=temperature: texts(  # type: ignore[misc]
                world, folder, name, temperature
            )
    if size == QUANTIZED_RANKS and not is_known:
        for family, form in product(QUANTIZED, formats()):
            named[f"{family} in {form}"] = lambda family=family, form=form: quantized_logits(  # type: ignore[misc]
                world, folder, family, form
            )
    return named


def seen_by(world: World, folder: Path, chosen: str) -> dict[str, object]:
    """What all cases return on this rank, or those of DeepSpeed."""
    named = cases(world, folder, lane=os.environ[LANE])
    if chosen == "deepspeed":
        own = [on_one_rank(cell) for row in DEEPSPEED_CELLS.values() for cell in row]
        named = cases_of_cells(world, folder, DEEPSPEED_CELLS[world.comm.size] + own * (world.comm.size == 1))
    return {name: case() for name, case in named.items()}


def main() -> None:
    """Write what this rank saw."""
    folder, out, chosen = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    end_with_an_error_if_left()
    with start(device=DeviceKind.cpu, timeout_s=120) as world:
        (out / f"{world.comm.rank}.json").write_text(json.dumps(seen_by(world, folder, chosen)))


if __name__ == "__main__":
    main()
