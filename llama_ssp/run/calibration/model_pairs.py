"""Times whole runs for `task=calibrate`: pairs of random models that decode, plain and speculatively.

Shapes: K drafted tokens.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.memory import available_bytes
from llama_ssp.run.calibration.interleave import trimmed_mean
from llama_ssp.run.calibration.random_llama import RandomLlama
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.executors import TracedExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Round
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import make_rule

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
        self._last_s: dict[int, float] = {}
        for number, run in sorted(self._runs.items(), reverse=True):  # the first needs the longest cache
            _records_traces, last = complete(run, requests(2, new_tokens=new_tokens))
            self._last_s[number] = last.busy_s
        self.turns: dict[int, list[list[RowCompletion]]] = {number: [] for number in lengths}

    def turn(self) -> None:
        """Decode in all modes, in each as much as the first rank's clock allows."""
        for number, turns in self.turns.items():
            allowed = _agreed(max(1, min(MOST, int(TURN_S / self._last_s[number]))), self._comm)
            turns.append(complete(self._runs[number], requests(allowed, new_tokens=self._new_tokens)))
            self._last_s[number] = turns[-1][-1].busy_s


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
