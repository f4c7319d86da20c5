"""What ranks do in a test group: every case that the tests ask of one number of ranks, in one group of processes.

A group of one rank is the process of the tests.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import decoding
from llama_ssp import catalogue, load
from llama_ssp.architectures import engine
from llama_ssp.architectures.family import record_of
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError, SspError
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.ranks.world import World, start
from llama_ssp.run.checkpoints import find_sources, find_update
from llama_ssp.run.decoders import Models, build_decoder, load_models, update_models
from llama_ssp.run.requests import encode
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    TargetPlacement,
)
from llama_ssp.speculate.engine.state import Request
from llama_ssp.storage.formats import format_of
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.in_memory import WeightsInMemory, weights_like
from tests.helpers.commands import on_forks
from tests.helpers.decoders import complete, ids_of
from tests.helpers.extensions import copies, need
from tests.helpers.prompts import PROMPTS
from tests.helpers.shapes import SHAPES


@dataclass(frozen=True, kw_only=True)
class CountingComm(Comm):
    """A group's end that counts the bytes of each message which arrives here."""

    arrived: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, comm: Comm) -> "CountingComm":
        return cls(rank=comm.rank, size=comm.size, members=comm.members, device=comm.device, board=comm.board)

    def do_broadcast(self, values: Tensor, src: int) -> Tensor:
        """Counts on all ranks but the sender."""
        self._count(values.nbytes * (self.size > 1 and self.rank != src))
        return super().do_broadcast(values, src)

    def do_receive(self, values: Tensor, src: int) -> Tensor:
        self._count(values.nbytes)
        return super().do_receive(values, src)

    def do_all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Counts the other ranks' slices, which travel at the width of the widest."""
        self._count(max(sizes) * values.itemsize * (self.size - 1))
        return super().do_all_gather_last(values, sizes)

    def _count(self, num_bytes: int) -> None:
        self.arrived.append(num_bytes)


SYNTHETIC = "synthetic"
"""Larger shapes that compute the shipped target."""
ONE_PASS = "one pass "
"""With a layout of `one_pass_heads`: such a head and its target."""
NUM_NEW_TOKENS = 14
_TIMEOUT_S = 120


class Case(Protocol):
    """Something that all ranks of a group do together; hashable."""

    @property
    def num_ranks(self) -> int: ...

    def see(self, world: World, folder: Path) -> Any:
        """What this rank sees of it; `folder` has the pairs of models."""


class Placed(NamedTuple):
    """What a rank saw of one cell: the ids of each text, and what arrived in rounds of numbers of rows.

    That is bytes, and messages of the stage before.
    """

    texts: list[list[int]]
    round_bytes: set[tuple[int, int]]
    hops: set[tuple[int, int]]


@dataclass(frozen=True)
class Cell:
    """One placement of one pair, and how it decodes.

    Attributes:
        draft: its ranks; none are those of prompt look-up.
        tree: the shape of drafted trees; None for chains.
        batch_size: rows decoded together; there may be more or fewer prompts.
        adapts: K is chosen for each round, and prompt look-up is the fallback.
        overlaps: drafting overlaps verification.
        is_long: all prompts, instead of a few.
        updates: the models run with other weights first.
        stages, groups: of the target, and of rows that follow each other through them.
        lane: of its tests; those of three ranks are heavy at least, and those of more are slow.
    """

    target: tuple[int, ...]
    draft: tuple[int, ...]
    kind: DraftLayout = DraftLayout.one_rank
    pair: str = "tiny"
    target_kind: str = "tensor"
    tree: str | None = None
    batch_size: int = 17
    rule: str = "speculative"
    adapts: bool = False
    overlaps: bool = False
    is_long: bool = False
    temperature: float = 0.8
    updates: bool = False
    stages: int = 1
    groups: int | None = None
    lane: str = field(default="default", compare=False)

    @property
    def num_ranks(self) -> int:
        return 1 + max(self.target + self.draft)

    @property
    def prompts(self) -> list[str]:
        """Texts and an empty one for the shipped target; words of their tokenizer for random pairs."""
        if self.pair == "head":
            return [PROMPTS[0], PROMPTS[3][:40], "7 x 8 =", ""]
        if self.pair in {"tiny", SYNTHETIC}:
            return [*(PROMPTS if self.is_long else PROMPTS[::10]), *([""] if self.pair == "tiny" else [])]
        return ["t5 t9 t3", "t7", "t11 t12 t13 t14 t15 t16 t17", "t8 t8"]

    @property
    def alone(self) -> "Cell":
        """The cell that has the same texts: on one rank of our own, with other batches and one K.

        With overlap a sampled text depends on which tokens were drafted in vain: then the same models elsewhere.
        """
        if self.overlaps and self.rule == "speculative" and self.temperature:
            return replace(self, target=(0,), draft=(1,), batch_size=5, stages=1, groups=None)
        return replace(
            self,
            target=(0,),
            draft=self.draft and (0,),
            kind=DraftLayout.one_rank,
            target_kind="tensor",
            batch_size=4,
            adapts=False,
            overlaps=False,
            updates=False,
            stages=1,
            groups=None,
        )

    def config(self, folder: Path) -> RunConfig:
        """As `launch/run.py` would compose it."""
        placement = PlacementConfig(
            target=TargetPlacement(kind=self.target_kind, ranks=[*self.target], stages=self.stages, groups=self.groups),
            draft=DraftPlacement(kind=self.kind, ranks=[*self.draft]),
        )
        target, draft = pair_of(self.pair, folder)
        config = decoding.run_config(
            target,
            draft,
            placement=placement,
            sampling=SamplingConfig(temperature=self.temperature),
            batch_size=self.batch_size,
            seed=3,
            ignore_eos=False,
        )
        config.verification.rule = self.rule
        config.speculation.tree, config.speculation.overlap = self.tree, self.overlaps
        if self.pair == SYNTHETIC:
            config.weights = SYNTHETIC
        if not self.draft:
            config.draft = copies()
        if self.adapts:
            config.speculation.num_draft_tokens, config.draft.fallback = "auto", copies().kind
        config.run_dir = str(folder / "run")  # layers on disk go there
        return config

    def see(self, world: World, folder: Path) -> Placed:
        config = self.config(folder)
        mesh = (models := _loaded(world, config)).mesh
        if self.updates:
            for given in (_negative(models), (config.model, config.draft.model)):
                sources = find_update(config, world, models.sources, given)
                models, keeps = update_models(models, config, world, sources)
                assert keeps or self.pair == "gpt_neox"  # whose output has no whole blocks on a rank, for FBGEMM
        counting = CountingComm.of(mesh.replica)
        models = replace(models, mesh=replace(mesh, replica=counting))
        hops = CountingComm.of(mesh.before or mesh.replica)
        if mesh.before:
            stage = models.target._stage  # type: ignore[attr-defined]
            models.target._stage = replace(stage, before=hops)  # type: ignore[attr-defined]
        least_bytes = 0 if self.batch_size > 1 else engine.LEAST_SHARED_BYTES
        with patch.object(engine, "LEAST_SHARED_BYTES", least_bytes):  # the shipped vocabulary is small
            decoder = build_decoder(models, config, speculative=True)
        round_bytes, round_hops, step = set[tuple[int, int]](), set[tuple[int, int]](), decoder.round.step

        def counted(*arguments: Any, **named: Any) -> object:
            counting.arrived[:], hops.arrived[:] = [], []
            result, num_rows = step(*arguments, **named), len(arguments[1].lengths_B)
            round_bytes.add((num_rows, sum(counting.arrived) + sum(hops.arrived)))
            round_hops.add((num_rows, len(hops.arrived)))
            return result

        decoder.round.step = counted  # type: ignore[method-assign, assignment]
        requests = [
            Request(index=index, prompt_ids=encode(prompt, models.tokenizer), max_new_tokens=NUM_NEW_TOKENS - index % 5)
            for index, prompt in enumerate(self.prompts)
        ]
        with torch.inference_mode():
            make_ready(decoder, requests, config, comm=world.comm)
        return Placed(ids_of(complete(decoder, requests)), round_bytes, round_hops)

    def __str__(self) -> str:
        target, draft = (",".join(map(str, ranks)) for ranks in (self.target, self.draft))
        named = {each.name: (getattr(self, each.name), each.default) for each in fields(self)[4:-1]}
        changed = [
            f"{name}={getattr(value, 'name', value)}" for name, (value, usual) in named.items() if value != usual
        ]
        return " ".join([self.pair, target, self.kind.name, draft or "none", *changed])


def pair_of(name: str, folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """The shipped pair in fp32, larger shapes that compute it, or the random pair of one family that was saved."""
    if name == SYNTHETIC:
        need(SYNTHETIC)
        entry = ModelConfig(name=name, dtype=Dtype.fp32, shape=SHAPES["hardly room"])
        return entry, entry
    if name == "tiny":
        return catalogue.load("tiny"), catalogue.load("tiny-draft")
    if name == "head":
        return catalogue.load("tiny"), ModelConfig(name=name, path=str(folder / name), dtype=Dtype.fp32)
    if name.startswith("mtp "):
        path = str(folder / name)
        target, draft = (ModelConfig(name=of, path=path, dtype=Dtype.fp32) for of in ("local", "mtp"))
        return target, draft
    parts = ("target", "head" if name.startswith(ONE_PASS) else "draft")
    pair = [ModelConfig(name=part, path=str(folder / name / part), dtype=Dtype.fp32) for part in parts]
    return pair[0], pair[1]


def _negative(models: Models) -> tuple[WeightsInMemory, ...]:
    """The weights of models, each times -1."""
    found = []
    for origin in [getattr(source.origin, "files", source.origin) for source in models.sources]:
        tensors = {name: origin.read(name) for name in origin.tensors}
        negative = {name: -values if values.is_floating_point() else values for name, values in tensors.items()}
        found.append(weights_like(origin, negative, what="model"))
    return tuple(found)


def need_extensions(case: Case) -> None:
    """Skip the test, or raise what names the extension, where this installation lacks an extension of a case."""
    if isinstance(case, Cell):
        case.config(Path())
        if case.pair == "head" or case.pair.startswith(("mtp ", ONE_PASS)):
            need("heads")
        elif case.pair not in {"tiny", SYNTHETIC}:
            record_of(case.pair)
    elif isinstance(case, Quantized):
        record_of(case.family)
        for form in (case.form, "int8_weight_only"):
            format_of(form)


_last: list[tuple[object, Models]] = []


def _loaded(world: World, config: RunConfig) -> Models:
    """The models of a config; those of the one before, where only sampling, rule, tree and batch differ."""
    key = config.model, config.draft, config.placement, config.weights
    if not _last or _last[0][0] != key:
        _last[:] = [(key, load_models(config, world, find_sources(config, world)))]
    return _last[0][1]


@dataclass(frozen=True)
class Quantized:
    """Logits (T, V) of a random target in some precision on two ranks; the draft has another one."""

    family: str
    form: str
    num_ranks: int = 2

    def see(self, world: World, folder: Path) -> list[list[float]]:
        target = ModelConfig(
            name="target", path=str(folder / "wide" / self.family), dtype=Dtype.fp32, quantization=self.form
        )
        draft = replace(pair_of(self.family, folder)[1], quantization="int8_weight_only")
        config = decoding.run_config(target, draft, batch_size=1)
        runner = load_models(config, world, find_sources(config, world)).target
        runner.allocate(batch_size=1, capacity=16)
        ids_BT = torch.arange(20, 32)[None]
        head = runner.forward(ids_BT[:, :8], torch.arange(8)[None], bucket=8)
        tail = runner.forward(ids_BT[:, 8:], torch.arange(8, 12)[None], bucket=16)
        logits: list[list[float]] = torch.cat([head, tail], dim=1)[0].tolist()
        return logits

    def on_one_rank(self, folder: Path, form: str) -> torch.Tensor:
        precision = Precision(quantization=form)
        runner = load_model(Loading(inspect(folder / "wide" / self.family), dtype=torch.float32, precision=precision))
        runner.allocate(batch_size=1, capacity=16)
        return runner.forward(torch.arange(20, 32)[None], torch.arange(12)[None], bucket=16)[0]

    def __str__(self) -> str:
        return f"{self.family} in {self.form}"


@dataclass(frozen=True)
class Together:
    """Texts of different lengths that all ranks exchange, and an error of the last one."""

    num_ranks: int

    def see(self, world: World, folder: Path) -> tuple[list[str], str, str]:
        comm, last = world.comm, self.num_ranks - 1
        heard = "nothing"
        try:
            with raise_on_all_ranks(comm):
                if comm.rank == last:
                    raise CheckpointError("the last shard is missing")
        except SspError as error:
            heard = f"{type(error).__name__}: {error}"
        return comm.gather_text("é" * comm.rank), comm.broadcast_text(f"from {comm.rank}"), heard


@dataclass(frozen=True)
class FromPython:
    """A script that calls the library on every rank."""

    placement: str
    num_ranks: int = 2

    def see(self, world: World, folder: Path) -> tuple[list[list[int]], list[float], list[str]]:
        staged = PlacementConfig(target=TargetPlacement(stages=2, groups=2))
        placement = staged if self.placement == "stages" else self.placement
        pair = load("tiny", "tiny-draft", device="cpu", placement=placement)
        found = pair.generate(["import os\n", "def f(x):"], max_new_tokens=12, seed=1, logprobs=2)
        sentences: list[str] = []
        mistakes: list[dict[str, Any]] = [{"prompts": f"of rank {pair.rank}"}, {"prompts": "x", "temperature": -1.0}]
        for mistake in mistakes[1 - bool(world.comm.size > 1) :]:
            try:
                pair.generate(**mistake)
            except ConfigError as error:
                sentences.append(str(error))
        pair.update(_negative(pair.models)[0].parameters)
        pair.update("tiny")
        found += pair.generate("class A", max_new_tokens=12, temperature=0)
        assert found[0].logprobs
        return [one.token_ids for one in found], [one.logprob for one in found[0].logprobs], sentences


Seen = Callable[[Case], list[Any]]
"""What each rank has seen of a case."""


def see_all(num_ranks: int, cases: Sequence[Case], folder: Path) -> list[dict[Case, Any]]:
    """What each rank of a new group sees of all cases, in their order."""
    if num_ranks == 1:
        return [_seen(cases, folder)]
    return on_forks(num_ranks, partial(_be_rank, cases, folder))


def _be_rank(cases: Sequence[Case], folder: Path, _rank: int) -> dict[Case, Any]:
    try:
        return _seen(cases, folder)
    except BaseException:  # noqa: BLE001 - the others would wait: this ends the whole pool
        traceback.print_exc()
        os._exit(1)


def _seen(cases: Sequence[Case], folder: Path) -> dict[Case, Any]:
    with start(device=DeviceKind.cpu, timeout_s=_TIMEOUT_S) as world:
        return {case: case.see(world, folder) for case in cases}
