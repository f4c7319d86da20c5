"""Times whole runs for `task=calibrate`: pairs of random models that decode, plain and speculatively.

Operators, linear layers and messages timed one by one do not add up to a forward: there each one finds colder caches,
or ranks that are already waiting. `Profile.composition` holds the ratio of forwards timed in the decoding loop to the
planner's sum of parts. Where ranks hold models of their own (replicas, or a draft on ranks of its own) no messages are
sent inside of a forward, but they share the machine's memory: `Profile.composition_apart`.

The first draft forward of a round takes longer than the others, since the target's forward before it has taken the
draft's weights and code out of the processor's caches: `Profile.first_draft`. Rounds of two lengths tell them apart.

Shapes: K drafted tokens.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from llama_ssp.calibration.interleave import trimmed_mean
from llama_ssp.calibration.random_llama import RandomLlama
from llama_ssp.config.hardware import CompositionPoint, HardwareConfig, Profile, SizePoint
from llama_ssp.config.machine import machine_of_run
from llama_ssp.config.schema import DraftLayout, SamplingConfig, VerificationConfig
from llama_ssp.config.target_placement import TargetKind
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.memory import available_bytes
from llama_ssp.drafting.broadcast import BroadcastDrafter
from llama_ssp.drafting.model import ModelDrafter
from llama_ssp.engine.completion import RowCompletion
from llama_ssp.engine.executors.traced_cpu import TracedExecutor
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.round import Round
from llama_ssp.engine.state import Request
from llama_ssp.engine.verifier import Verifier
from llama_ssp.models.runner import Runner
from llama_ssp.planning.roofline import ModelPlacement, working_set_bytes
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel
from llama_ssp.sampling.rules import make_rule

VOCAB_SIZE = 4096
DRAFT = RandomLlama(128, 2, VOCAB_SIZE, from_16_bits=True)
"""Its weights are 2 MB."""
TARGETS = (
    RandomLlama(256, 10, VOCAB_SIZE, from_16_bits=True),
    RandomLlama(512, 12, VOCAB_SIZE),
    RandomLlama(1024, 17, VOCAB_SIZE),
)
"""Their weights are 22 MB, 200 MB and 1.1 GB."""
TURN_S = 0.5
"""Time limit of one mode of one pair in a turn."""
MOST = 20
"""Completions of one mode of one pair in a turn."""
PLAIN, FEWEST, NUM_DRAFT_TOKENS = 0, 1, 4
"""K of the modes of a pair; 0 is plain."""
PROMPT_TOKENS, NEW_TOKENS = 32, 24
"""A round must end within the cache slots that a profile's layers were timed with."""
MOST_OF_MEMORY = 0.5
LEAST_RATIO, LEAST_S = 0.1, 1e-9


Turns: TypeAlias = Sequence[Sequence[RowCompletion]]
"""The completions of each turn."""


class RoundTime(NamedTuple):
    """Seconds of the drafting in a round, and of the rest of the round."""

    draft_s: float
    rest_s: float


@dataclass(frozen=True, kw_only=True)
class PairTime:
    """Mean times of a pair; see `seconds_per`.

    Attributes:
        prompt_s: a prompt of `PROMPT_TOKENS` through the target, and the first token.
        plain_s: a plain token.
        rounds: a round, by its K.
    """

    target: RandomLlama
    draft: RandomLlama
    prompt_s: float
    plain_s: float
    rounds: Mapping[int, RoundTime]


class DecodingPair:
    """A target in memory that decodes plain and with a draft; the ranks of `comm` make it, and call `turn`, together.

    Attributes:
        turns: the completions of all turns, by K.
    """

    def __init__(
        self, target: Runner, draft: Runner | None, comm: Comm, *, new_tokens: int, lengths: Sequence[int]
    ) -> None:
        self._comm = comm
        self._new_tokens = new_tokens
        self._runs = {
            number: decoder(target, draft if number else None, comm, num_draft_tokens=number) for number in lengths
        }
        for _, run in sorted(self._runs.items(), reverse=True):  # records traces; the first needs the longest cache
            complete(run, requests(1, new_tokens=new_tokens))
        self.turns: dict[int, list[list[RowCompletion]]] = {number: [] for number in lengths}

    def turn(self) -> None:
        """Decode for a while in all modes."""
        for number, turns in self.turns.items():
            turns.append(self._completions(self._runs[number], turns))

    def _completions(self, run: Decoder, known: Turns) -> list[RowCompletion]:
        """As many as a turn allows by the first rank's clock, and one in the first turn."""
        number = _agreed(max(1, min(MOST, int(TURN_S / known[-1][-1].busy_s))), self._comm) if known else 1
        return complete(run, requests(number, new_tokens=self._new_tokens))


class Pairs:
    """The pairs that fit into half of the free memory; all ranks make them, and call `turn`, together.

    They decode in turns, between other measurements: on a shared machine a core is slower for seconds or minutes while
    a neighbour uses the same core, and what is measured at one moment would be that moment's.

    Args:
        comm: the ranks that measure. They share the targets, or hold one each and decode at the same time (`apart`).
    """

    def __init__(self, comm: Comm, *, apart: bool = False) -> None:
        self._comm, own = comm, Comm.single() if apart else comm
        room = MOST_OF_MEMORY * _agreed(available_bytes() or sys.maxsize, comm) / (comm.size if apart else 1)
        draft = DRAFT.load(Comm.single()) if own.rank == 0 else None
        self._pairs: list[tuple[RandomLlama, DecodingPair]] = []
        for stack in TARGETS:
            if stack.num_bytes <= room:
                room -= stack.num_bytes
                self._pairs.append((stack, _decoding(stack, draft, own)))

    def turn(self) -> None:
        """Let every pair decode for a while."""
        for _, pair in self._pairs:
            self._comm.barrier()
            pair.turn()

    def times(self) -> list[PairTime]:
        """What all turns have measured."""
        return [pair_time(stack, pair.turns) for stack, pair in self._pairs]


def _decoding(stack: RandomLlama, draft: Runner | None, comm: Comm) -> DecodingPair:
    lengths = PLAIN, FEWEST, NUM_DRAFT_TOKENS
    return DecodingPair(stack.load(comm), draft, comm, new_tokens=NEW_TOKENS, lengths=lengths)


def pair_time(stack: RandomLlama, turns: Mapping[int, Turns]) -> PairTime:
    """Take the times of a pair from its turns, by K."""
    plain = turns[PLAIN]
    return PairTime(
        target=stack,
        draft=DRAFT,
        prompt_s=seconds_per(lambda _: 1, lambda each: each.busy_s - sum(each.part_s.values()), plain),
        plain_s=seconds_per(lambda each: len(each.token_ids) - 1, lambda each: sum(each.part_s.values()), plain),
        rounds={number: _round_time(found) for number, found in turns.items() if number > PLAIN},
    )


def _round_time(turns: Turns) -> RoundTime:
    def per_round(*parts: str) -> float:
        return seconds_per(
            lambda each: len(each.accepted_lengths), lambda each: sum(each.part_s[part] for part in parts), turns
        )

    return RoundTime(per_round("draft"), per_round("verify", "other"))


def seconds_per(
    units: Callable[[RowCompletion], int], seconds: Callable[[RowCompletion], float], turns: Turns
) -> float:
    """Time of a unit, such as a token: of all completions of a turn together, and of all turns the trimmed mean."""
    return trimmed_mean(sum(map(seconds, turn)) / sum(map(units, turn)) for turn in turns)


def _agreed(number: int, comm: Comm) -> int:
    """Return the first rank's number."""
    return int(comm.broadcast(torch.tensor([number]), src=0))


def decoder(target: Runner, draft: Runner | None, comm: Comm, *, num_draft_tokens: int) -> Decoder:
    """Build one rank's loop at batch size 1; the first rank of `comm` holds the draft and decides; K = 0 is plain."""
    rule = make_rule(SamplingConfig(), VerificationConfig())
    inner = None
    if draft:
        inner = ModelDrafter(draft, rule=rule, num_draft_tokens=num_draft_tokens, vocab_size=target.vocab_size)
    drafters = []
    if num_draft_tokens:
        drafters = [BroadcastDrafter(inner, comm=comm, src=0, num_draft_tokens=num_draft_tokens, device=target.device)]
    round_ = Round(target, *drafters, verifier=Verifier(rule, comm=comm, verify_rank=0, device=target.device))
    return Decoder(round_, executor=TracedExecutor(round_), batch_size=1, eos_ids=(), seed=0)


def requests(number: int, *, new_tokens: int) -> list[Request]:
    """Make prompts of random tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (number, PROMPT_TOKENS), generator=generator).tolist()
    return [Request(index=i, prompt_ids=tuple(row), max_new_tokens=new_tokens) for i, row in enumerate(ids)]


@torch.inference_mode()
def complete(run: Decoder, wanted: Sequence[Request]) -> list[RowCompletion]:
    """Return the finished completions of all requests."""
    return [u.completion for updates in run.run(wanted) for u in updates if u.completion.finish_reason]


def composed(
    profile: Profile, machine: HardwareConfig, together: Sequence[PairTime], apart: Sequence[PairTime] = ()
) -> Profile:
    """Complete the profile of a machine by pairs that its ranks held together, and apart."""
    parts = replace(profile, composition=[], composition_apart=[], first_draft=[])
    bare = machine_of_run(replace(machine, profiles=[parts]), profile.num_ranks)
    whole = replace(
        parts,
        composition=composition(together, bare, num_ranks=profile.num_ranks),
        composition_apart=composition(apart, bare, num_ranks=profile.num_ranks, apart=True),
    )
    first = _first_draft(together, replace(bare, profiles=[whole]), num_ranks=profile.num_ranks)
    return replace(whole, first_draft=first)


def composition(
    times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int, apart: bool = False
) -> list[CompositionPoint]:
    """Compare measured pairs with the forecast for a machine whose profiles have no composition points.

    The forecast of everything except forwards is taken as exact; the rest of the measured time belongs to forwards. The
    first point is the draft's: a step of it that is not the first of a round, as the pairs agree on it. `num_ranks`
    shared the targets, or had one each (`apart`).
    """
    points = []
    for time in times:
        costs = CostModel(_job(time, num_ranks, apart=apart), machine)
        assert costs.draft, "a pair has a draft"
        if time is times[0]:
            draft_s = costs.forward(costs.draft, 1).total_s
            step_s = _later_step_s(times) - (costs.draft_step_s(1) - draft_s)
            points.append(_point(costs, costs.draft, 1, step_s, draft_s))
        plain_s = costs.forward(costs.target, 1).total_s
        draw_s = costs.plain_s() - plain_s
        points.append(_point(costs, costs.target, 1, time.plain_s - draw_s, plain_s))
        for number, found in sorted(time.rounds.items()):
            rest_s = found.rest_s - costs.verdict_s(number) - costs.host_s
            verify_s = costs.forward(costs.target, number + 1).total_s
            points.append(_point(costs, costs.target, number + 1, rest_s, verify_s))
        prompt_s = costs.prefill_s(costs.target)
        points.append(_point(costs, costs.target, PROMPT_TOKENS, time.prompt_s - draw_s, prompt_s))
    return points


def _later_step_s(times: Sequence[PairTime]) -> float:
    """Time of a draft step, its draw included, from rounds of two lengths: only the shorter has none but the first."""
    more = NUM_DRAFT_TOKENS - FEWEST
    steps = [(time.rounds[NUM_DRAFT_TOKENS].draft_s - time.rounds[FEWEST].draft_s) / more for time in times]
    return statistics.median(steps)


def _first_draft(times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int) -> list[SizePoint]:
    """How much longer drafting takes than its steps, by the size of what the target has read before."""
    points = []
    for time in times:
        costs = CostModel(_job(time, num_ranks), machine)
        more_s = statistics.mean(found.draft_s - costs.drafting_s(number) for number, found in time.rounds.items())
        points.append(SizePoint(size=working_set_bytes(costs.target, machine), s=max(more_s, LEAST_S)))
    return points


def _point(
    costs: CostModel, placement: ModelPlacement, rows: int, measured_s: float, parts_s: float
) -> CompositionPoint:
    ratio = max(measured_s / parts_s, LEAST_RATIO)
    return CompositionPoint(rows=rows, working_set_bytes=working_set_bytes(placement, costs.hardware), ratio=ratio)


def _job(time: PairTime, num_ranks: int, *, apart: bool = False) -> PlanSpec:
    num_replicas = num_ranks if apart else 1
    return PlanSpec(
        target=time.target.planned, target_kind=TargetKind.tensor, target_ranks=tuple(range(num_ranks // num_replicas)),
        num_replicas=num_replicas,
        draft=time.draft.planned, draft_kind=DraftLayout.one_rank, draft_ranks=(0,),
        num_draft_tokens=NUM_DRAFT_TOKENS, acceptance=None, batch_size=1, prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS, cuda_graphs=False, device="cpu",
    )  # fmt: skip
