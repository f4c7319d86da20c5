"""Times whole runs for `task=calibrate`: pairs of random models that decode, plain and speculatively.

Operators, linear layers and messages timed one by one do not add up to a forward: there each one finds colder caches,
or ranks that are already waiting. `Profile.composition` holds the ratio of forwards timed in the decoding loop to the
planner's sum of parts. Where ranks hold models of their own (replicas, or a draft on ranks of its own) no messages are
sent inside of a forward, but they share the machine's memory: `Profile.composition_apart`.

Shapes: K drafted tokens.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_ssp.calibration.interleave import undisturbed
from llama_ssp.calibration.random_llama import RandomLlama
from llama_ssp.config.hardware import CompositionPoint, HardwareConfig
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
TURN_S = 0.6
"""Time limit of one mode of one pair in a turn."""
MOST = 20
"""Completions of one mode of one pair in a turn."""
NUM_DRAFT_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 24
"""A round must end within the cache slots that a profile's layers were timed with."""
MOST_OF_MEMORY = 0.5
LEAST_RATIO = 0.1


@dataclass(frozen=True, kw_only=True)
class PairTime:
    """Times of a pair while nobody disturbs it; see `interleave.undisturbed`.

    Attributes:
        prompt_s: a prompt of `PROMPT_TOKENS` through the target, and the first token.
        plain_s: a plain token.
        draft_s, rest_s: the drafting in a round, and the rest of the round.
    """

    target: RandomLlama
    draft: RandomLlama
    prompt_s: float
    plain_s: float
    draft_s: float
    rest_s: float


class DecodingPair:
    """A target in memory that decodes plain and with a draft; the ranks of `comm` make it, and call `turn`, together.

    Attributes:
        plain, speculative: the completions of all turns.
    """

    def __init__(self, target: Runner, draft: Runner | None, comm: Comm, *, new_tokens: int) -> None:
        self._comm = comm
        self._new_tokens = new_tokens
        self._speculative_run = decoder(target, draft, comm, num_draft_tokens=NUM_DRAFT_TOKENS)
        self._plain_run = decoder(target, None, comm, num_draft_tokens=0)
        for run in (self._speculative_run, self._plain_run):  # records traces; the first needs the longer cache
            complete(run, requests(1, new_tokens=new_tokens))
        self.plain: list[RowCompletion] = []
        self.speculative: list[RowCompletion] = []

    def turn(self) -> None:
        """Decode for a while in both modes."""
        self.plain.extend(self._completions(self._plain_run, self.plain))
        self.speculative.extend(self._completions(self._speculative_run, self.speculative))

    def _completions(self, run: Decoder, known: Sequence[RowCompletion]) -> list[RowCompletion]:
        """As many as a turn allows by the first rank's clock, and one in the first turn."""
        number = _agreed(max(1, min(MOST, int(TURN_S / known[-1].busy_s))), self._comm) if known else 1
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
                self._pairs.append((stack, DecodingPair(stack.load(own), draft, own, new_tokens=NEW_TOKENS)))

    def turn(self) -> None:
        """Let every pair decode for a while."""
        for _, pair in self._pairs:
            self._comm.barrier()
            pair.turn()

    def times(self) -> list[PairTime]:
        """What all turns have measured."""
        return [pair_time(stack, pair.plain, pair.speculative) for stack, pair in self._pairs]


def pair_time(stack: RandomLlama, plain: Sequence[RowCompletion], speculative: Sequence[RowCompletion]) -> PairTime:
    """Take the times of a pair from its completions."""
    return PairTime(
        target=stack,
        draft=DRAFT,
        prompt_s=undisturbed(each.busy_s - sum(each.part_s.values()) for each in plain),
        plain_s=undisturbed(sum(each.part_s.values()) / (len(each.token_ids) - 1) for each in plain),
        draft_s=undisturbed(each.part_s["draft"] / len(each.accepted_lengths) for each in speculative),
        rest_s=undisturbed(
            (each.part_s["verify"] + each.part_s["other"]) / len(each.accepted_lengths) for each in speculative
        ),
    )


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


def composition(
    times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int, apart: bool = False
) -> list[CompositionPoint]:
    """Compare measured pairs with the forecast for a machine whose profiles have no composition points.

    The forecast of everything except forwards is taken as exact; the rest of the measured time belongs to forwards.
    `num_ranks` shared the targets, or had one each (`apart`). The smallest target comes first: its rounds also give the
    draft's point.
    """
    points = []
    for time in times:
        costs = CostModel(_job(time, num_ranks, apart=apart), machine_of_run(machine, num_ranks))
        assert costs.draft, "a pair has a draft"
        if time is times[0]:
            draft_s = [costs.forward(costs.draft, rows).total_s for rows in (2, *[1] * (NUM_DRAFT_TOKENS - 1))]
            draws_s = NUM_DRAFT_TOKENS * (costs.draft_step_s(1) - draft_s[-1])
            points.append(_point(costs, costs.draft, 1, time.draft_s - draws_s, sum(draft_s)))
        plain_s, verify_s = (costs.forward(costs.target, rows).total_s for rows in (1, NUM_DRAFT_TOKENS + 1))
        draw_s = costs.plain_s() - plain_s
        other_s = costs.verdict_s(NUM_DRAFT_TOKENS) + costs.host_s
        points += [
            _point(costs, costs.target, 1, time.plain_s - draw_s, plain_s),
            _point(costs, costs.target, NUM_DRAFT_TOKENS + 1, time.rest_s - other_s, verify_s),
            _point(costs, costs.target, PROMPT_TOKENS, time.prompt_s - draw_s, costs.prefill_s(costs.target)),
        ]
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
