"""Times whole runs for `task=calibrate`: pairs of random Llamas that decode, plain and speculatively."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias, Unpack

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ssp.architectures.family import inventory
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.planning.memory import model_bytes
from llama_ssp.planning.spec import PlannedModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.memory import available_bytes
from llama_ssp.run.calibration.interleave import trimmed_mean
from llama_ssp.settings.formats import NO_QUANTIZATION
from llama_ssp.settings.schema import Dtype, ModelShape, SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.executors import TracedExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import Round
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.weights.source import TensorFacts, Wanted
from llama_ssp.weights.synthetic import llama_config

MLP_SHARE, HEAD_DIM = 4, 32
_CONTEXT = 1024
_LARGEST = 0.05
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RandomLlama:
    """A Llama with random weights and half as many key-value heads as query heads; an `origin.WeightSource`.

    `width` is a multiple of twice `HEAD_DIM`. With `from_16_bits` a CPU stores the weights in 16 bits.
    """

    width: int
    num_layers: int
    vocab_size: int
    from_16_bits: bool = False
    context: ClassVar[int] = _CONTEXT

    @property
    def folder(self) -> Path:
        """A name for messages; no such folder exists."""
        return Path(f"random-{self.width}x{self.num_layers}")

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        num_heads = self.width // HEAD_DIM
        return ModelShape(
            model_type="llama", num_hidden_layers=self.num_layers, hidden_size=self.width,
            num_attention_heads=num_heads, num_key_value_heads=num_heads // 2, head_dim=HEAD_DIM,
            intermediate_size=MLP_SHARE * self.width, vocab_size=self.vocab_size, max_position_embeddings=_CONTEXT,
        )  # fmt: skip

    @cached_property
    def config(self) -> LlamaConfig:
        """The transformers configuration."""
        return llama_config(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return torch.bfloat16 if self.from_16_bits else torch.float32

    @cached_property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Every tensor, by its name in transformers."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        return {name: TensorFacts(dtype=self.dtype, shape=tuple(p.shape)) for name, p in model.named_parameters()}

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Make a tensor, or a slice of it (see `WeightSource.read`): uniform numbers, the ones of a norm."""
        sizes = list(self.tensors[name].shape)
        if (dim := wanted.get("dim")) is not None:
            sizes[dim] = sum(len(part) for part in wanted["parts"])
        values = torch.ones(sizes) if len(sizes) == 1 else torch.empty(sizes).uniform_(-_LARGEST, _LARGEST)
        return values.to(self.dtype).to(device=wanted.get("device"), dtype=wanted.get("dtype") or self.dtype)

    @property
    def planned(self) -> PlannedModel:
        """The planner's description of it in fp32."""
        name, stored = self.folder.name, Dtype.bf16 if self.from_16_bits else Dtype.fp32
        return PlannedModel(name=name, shape=self.shape, dtype=Dtype.fp32, quantization=NO_QUANTIZATION, stored=stored)

    @property
    def num_bytes(self) -> int:
        """Size of its weights on a CPU, all ranks together."""
        return model_bytes(inventory(self.shape), self.planned, device="cpu").total_bytes

    def load(self, comm: Comm, *, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> Runner:
        """Load this rank's slice, by default in fp32 on the CPU; all ranks of `comm` must call this together."""
        return load_model(self, dtype=dtype, device=device, comm=comm)


VOCAB_SIZE = 4096
DRAFT = RandomLlama(128, 2, VOCAB_SIZE, from_16_bits=True)
"""Its weights are 2 MB."""
TARGETS = {
    RandomLlama(256, 10, VOCAB_SIZE, from_16_bits=True): 10,
    RandomLlama(512, 12, VOCAB_SIZE): 2,
    RandomLlama(1024, 17, VOCAB_SIZE): 1,
}
"""Completions of each mode in a turn, about half a second. Weights are 22 MB, 200 MB and 1.1 GB."""
PLAIN, NUM_DRAFT_TOKENS = 0, 4
"""K of the modes of a pair; 0 is plain."""
PROMPT_TOKENS, NEW_TOKENS = 32, 24
"""A round must end within the cache slots that a profile's layers were timed with."""
MOST_OF_MEMORY = 0.5

Turns: TypeAlias = Sequence[Sequence[RowCompletion]]
"""The completions of each turn."""


class PairTime(NamedTuple):
    """Mean seconds of a plain token of a pair, and of the parts of a round."""

    target: RandomLlama
    plain_s: float
    draft_s: float
    verify_s: float
    other_s: float


class DecodingPair:
    """A target in memory that decodes plain and with a draft; the ranks of `comm` make it, and call `turn`, together.

    The first rank of `comm` holds the draft.

    Attributes:
        turns: the completions of all turns, by K.
    """

    def __init__(
        self, target: Runner, draft: Runner | None, comm: Comm, *, new_tokens: int, num_completions: int
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(VOCAB_SIZE, (num_completions, PROMPT_TOKENS), generator=generator).tolist()
        self._requests = [
            Request(index=index, prompt_ids=tuple(row), max_new_tokens=new_tokens) for index, row in enumerate(ids)
        ]
        self._runs = {
            number: _decoder(target, draft, comm, num_draft_tokens=number) for number in (PLAIN, NUM_DRAFT_TOKENS)
        }
        for run in reversed(self._runs.values()):  # records traces; the first needs the longest cache
            _complete(run, self._requests[:1])
        self.turns: dict[int, list[list[RowCompletion]]] = {number: [] for number in self._runs}

    def turn(self) -> None:
        """Decode in all modes."""
        for number, turns in self.turns.items():
            turns.append(_complete(self._runs[number], self._requests))


class Pairs:
    """The pairs that fit into half of the free memory; all ranks make them, and call `turn`, together.

    They decode in turns, between other measurements: on a shared machine a core is slower for seconds or minutes while
    a neighbour uses the same core, and what is measured at one moment would be that moment's.

    Args:
        comm: the ranks that measure. They share the targets, or hold one each and decode at the same time (`apart`).
    """

    def __init__(self, comm: Comm, *, apart: bool = False) -> None:
        self._comm, own = comm, Comm.single() if apart else comm
        free_bytes = int(comm.broadcast(torch.tensor([available_bytes() or sys.maxsize]), src=0))
        room = MOST_OF_MEMORY * free_bytes / (comm.size if apart else 1)
        draft = DRAFT.load(Comm.single()) if own.rank == 0 else None
        self._pairs: dict[RandomLlama, DecodingPair] = {}
        for target, number in TARGETS.items():
            if target.num_bytes <= room:
                room -= target.num_bytes
                self._pairs[target] = DecodingPair(
                    target.load(own), draft, own, new_tokens=NEW_TOKENS, num_completions=number
                )

    def turn(self) -> None:
        """Let every pair decode for a while."""
        for pair in self._pairs.values():
            self._comm.barrier()
            pair.turn()

    def times(self) -> list[PairTime]:
        """The means of all turns of each pair."""
        return [pair_time(target, pair.turns) for target, pair in self._pairs.items()]


def pair_time(target: RandomLlama, turns: Mapping[int, Turns]) -> PairTime:
    """Take the times of a pair from its turns, by K."""
    plain, fast = turns[PLAIN], turns[NUM_DRAFT_TOKENS]

    def per_round(part: str) -> float:
        return seconds_per(lambda each: len(each.accepted_lengths), lambda each: each.part_s[part], fast)

    plain_s = seconds_per(lambda each: len(each.token_ids) - 1, lambda each: sum(each.part_s.values()), plain)
    return PairTime(target, plain_s, *map(per_round, ("draft", "verify", "other")))


def seconds_per(
    units: Callable[[RowCompletion], int], seconds: Callable[[RowCompletion], float], turns: Turns
) -> float:
    """Time of a unit, such as a token: of all completions of a turn together, and of all turns the trimmed mean."""
    return trimmed_mean(sum(map(seconds, turn)) / sum(map(units, turn)) for turn in turns)


def _decoder(target: Runner, draft: Runner | None, comm: Comm, *, num_draft_tokens: int) -> Decoder:
    """Build one rank's loop at batch size 1."""
    rule, device = make_rule(SamplingConfig(), VerificationConfig()), target.device
    drafters = []
    if num_draft_tokens:
        inner = None
        if draft:
            inner = ModelDrafter(draft, rule=rule, num_draft_tokens=num_draft_tokens, vocab_size=target.vocab_size)
        drafters = [BroadcastDrafter(inner, comm=comm, src=0, num_draft_tokens=num_draft_tokens, device=device)]
    round_ = Round(target, *drafters, verifier=Verifier(rule, comm=comm, verify_rank=0, device=device))
    return Decoder(round_, executor=TracedExecutor(round_), batch_size=1, eos_ids=(), seed=0)


@torch.inference_mode()
def _complete(run: Decoder, wanted: Sequence[Request]) -> list[RowCompletion]:
    return [u.completion for updates in run.run(wanted) for u in updates if u.completion.finish_reason]
