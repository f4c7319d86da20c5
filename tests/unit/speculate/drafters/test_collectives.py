"""Ranks that share a draft send each other what the planner counts, and one rank's ids count."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import DRAFT_WHOLE, WholeParts
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.machines import hardware
from llama_ssp.models.loading import load_model
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.collectives import round_messages
from llama_ssp.planning.forwards import ModelPlacement, ShardDraws
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.drafters import DRAFTERS, DrafterRecord
from llama_ssp.settings.schema import DraftLayout, SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.drafters.model import ModelDrafter
from llama_ssp.speculate.drafters.shared import BroadcastDrafter
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, make_decoder, parts_of, requests
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid, heavy
from tests.helpers.models import VOCAB_SIZE, build_checkpoint, load_ranks
from tests.helpers.planning import make_spec
from tests.helpers.plugins import drafter_with_law
from tests.helpers.prefix_runner import PrefixRunner

CPU = torch.device("cpu")
NUM_LAYERS, NUM_SLOTS, K = 3, 24, 4
NONE, EMBEDDING, ATTENTION = WholeParts


@dataclass(frozen=True, kw_only=True)
class CountingComm(ThreadComm):
    """Counts the collectives by kind."""

    sent: Counter[str] = field(default_factory=Counter)
    gathered: list[int] = field(default_factory=list)
    """Bytes of each gather, of all ranks together."""
    others: list[int] = field(default_factory=list)
    """Bytes of each sum and each message."""

    @classmethod
    def of(cls, comm: ThreadComm) -> "CountingComm":
        """The same end, counting."""
        return cls(rank=comm.rank, size=comm.size, meeting=comm.meeting, table=comm.table, mail=comm.mail)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Count, and add up."""
        self.sent["all_reduce"] += 1
        self.others.append(values.nbytes)
        return super().all_reduce(values)

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Count, and join."""
        self.sent["all_gather"] += 1
        joined = super().all_gather_last(values, sizes)
        self.gathered.append(joined.nbytes)
        return joined

    def broadcast(self, values: Tensor, *, src: int) -> Tensor:
        """Count, and take the values of one rank."""
        self.sent["broadcast"] += 1
        self.others.append(values.nbytes)
        return super().broadcast(values, src=src)


def drafted(runner: Runner, comm: Comm, *, temperature: float = 0.9, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
    """What a rank drafts for three rows after the same prompts, and the text of its rows then."""
    sampling = SamplingConfig(temperature=temperature)
    rule = make_rule(sampling, VerificationConfig(), is_cut=comm.size > 1, shard=shard)
    parts = parts_of(runner, rule=rule, num_draft_tokens=K)
    drafter = BroadcastDrafter(ModelDrafter(parts), parts, comm=comm, src=0)
    drafter.allocate(batch_size=3, num_slots=NUM_SLOTS)
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(runner.vocab_size, (3, NUM_SLOTS), generator=generator)
    lengths = [9, 5, 7]
    lengths_B = torch.tensor(lengths)
    buckets = Buckets(step=NUM_SLOTS, num_slots=NUM_SLOTS)
    drafter.prefill(Prompts(tokens_BS, lengths_B, lengths, longest=9), rows=range(3), buckets=buckets)
    if isinstance(comm, CountingComm):
        comm.sent.clear()
        comm.gathered.clear()
    uniforms_BKP = torch.rand(3, K, 2, dtype=torch.float64, generator=generator)
    rows = Rows(tokens_BS, lengths_B, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    return drafter.propose(rows, num_tokens=K, uniforms_BKP=uniforms_BKP, bucket=NUM_SLOTS).ids_BK, tokens_BS


@grid(
    family=["llama", "qwen3", "gpt_neox"],
    whole=[NONE, EMBEDDING, ATTENTION],
    num_ranks=[2, 3],
    draws=["greedy", "gathered", "over shards"],
)
def test_ranks_draft_as_one_does_with_the_collectives_that_are_planned(
    tmp_path: Path, family: str, whole: WholeParts, num_ranks: int, draws: str
) -> None:
    """The head of qwen3 is its embedding; a greedy draft gathers no logits, and one over shards sums twice."""
    if family == "gpt_neox" and whole is not NONE:
        return
    build_checkpoint(tmp_path, family, num_hidden_layers=NUM_LAYERS)
    alone = load_model(Loading(inspect(tmp_path)))
    temperature, is_cut = 0 if draws == "greedy" else 0.9, draws == "over shards"
    wanted, _ = drafted(alone, Comm.single(), temperature=temperature)
    comms = [CountingComm.of(comm) for comm in thread_comms(num_ranks)]
    runners = load_ranks(tmp_path, comms, whole=whole)

    def one_rank(comm: ThreadComm) -> Tensor:
        shard = Shard(comm, VOCAB_SIZE) if is_cut else WHOLE
        return drafted(runners[comm.rank], comm, temperature=temperature, shard=shard)[0]

    for ids_BK in on_ranks(comms, one_rank):
        assert ids_BK.tolist() == wanted.tolist()
    model = planned_model(ModelConfig(name="one", path=str(tmp_path), dtype=Dtype.fp32), device="cpu")
    placement = ModelPlacement(
        model=model,
        ranks=(*range(num_ranks),),
        cuda_graphs=False,
        draws={"greedy": ShardDraws("greedy"), "over shards": ShardDraws("speculative")}.get(draws),
    )
    assert all(comm.gathered == placement.draw_messages(3, 1) * K for comm in comms)
    planned = inventory(inspect(tmp_path).shape).keeping(whole).num_all_reduces
    cuts_embedding = whole is NONE and family != "gpt_neox"
    assert planned == (1 if whole is ATTENTION else 2) * NUM_LAYERS + cuts_embedding
    for comm in comms:
        assert comm.sent == {"all_reduce": K * planned, "all_gather": K * (1 + is_cut), "broadcast": 1}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("rule", "of_target", "of_draft"),
    [
        ("gathered", 1, 1),
        heavy("speculative", 3, 2),
        heavy("block", 4, 2),
        heavy("coupled", 2, 2),
        heavy("greedy", 1, 1),
        ("certain", 2, 0),
        ("law", 3, 0),
        heavy("block law", 4, 0),
        heavy("coupled law", 2, 0),
    ],
)
def test_a_round_has_as_many_collectives_and_bytes_as_it_is_priced_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, of_target: int, of_draft: int
) -> None:
    """Those inside both models, which are sums and a gather or several of draws, and the messages between ranks."""
    is_cut, is_certain, has_law = rule != "gathered", rule == "certain", "law" in rule
    is_alone = is_certain or has_law
    record = DrafterRecord(name="near", make="near:make", draws=True)
    monkeypatch.setitem(DRAFTERS.records, "near", record)
    if is_cut:
        monkeypatch.setattr(engine, "LEAST_SHARED_BYTES", 0)
    rule_name = next((name for name in ("block", "coupled", "greedy") if name in rule), "speculative")
    temperature = 0.0 if rule == "greedy" else 0.8
    sampling = SamplingConfig(temperature=temperature, presence_penalty=0.5 * (rule == "greedy"))
    comms, models, planned = [CountingComm.of(comm) for comm in thread_comms(2)], [], []
    for name, num_layers, whole in (("target", NUM_LAYERS, NONE), ("draft", 2, DRAFT_WHOLE)):
        build_checkpoint(tmp_path / name, "llama", num_hidden_layers=num_layers)
        models.append(load_ranks(tmp_path / name, comms, whole=whole))
        entry = ModelConfig(name=name, path=str(tmp_path / name), dtype=Dtype.fp32)
        planned.append(planned_model(entry, device="cpu"))
    spec = make_spec(planned[0], num_ranks=2, num_draft_tokens=K, batch_size=2)
    free_draft = "near" if has_law else "ngram" if is_certain else None
    spec = replace(spec, rule=rule_name, counts_tokens=sampling.penalizes, free_draft=free_draft)
    if not is_alone:
        spec = replace(spec, draft=planned[1], draft_kind=DraftLayout.sharded, draft_ranks=(0, 1))
    assert spec.draws_over_shards == (is_cut, is_cut and not is_alone)

    def with_law(_rule: Rule) -> Drafter:
        whole = make_rule(sampling, VerificationConfig(rule=rule_name))
        drafter: Drafter = drafter_with_law()(parts_of(rule=whole, num_draft_tokens=K, vocab_size=VOCAB_SIZE))
        return drafter

    def one_rank(comm: ThreadComm) -> set[tuple[int, int]]:
        assert isinstance(comm, CountingComm)
        target, draft = (ranks[comm.rank] for ranks in models)
        decoder = make_decoder(
            target,
            None if is_alone else draft,
            comm=comm,
            num_draft_tokens=K,
            batch_size=2,
            replay=False,
            sampling=sampling,
            rule_name=rule_name,
            ngram=is_certain,
            shard=Shard(comm, VOCAB_SIZE) if is_cut else WHOLE,
            make_drafter=with_law if has_law else None,
        )
        step, counted = decoder.round.step, set[tuple[int, int]]()

        def counting(*arguments: Any, **named: Any) -> Any:
            before, before_bytes = comm.sent.total(), sum(comm.gathered) + sum(comm.others)
            found = step(*arguments, **named)
            counted.add((comm.sent.total() - before, sum(comm.gathered) + sum(comm.others) - before_bytes))
            return found

        decoder.round.step = counting  # type: ignore[method-assign]
        complete(decoder, requests(30))
        return counted

    wanted = CostModel(spec, hardware.load("8xh100")).collectives(K)
    of_drafts = 0 if is_alone else K * (2 * 2 + of_draft)
    assert wanted[0] == (2 * NUM_LAYERS + 1 + of_target) + of_drafts + len(round_messages(spec, K))
    assert on_ranks(comms, one_rank) == [{wanted}] * 2


def test_ranks_that_drew_otherwise_continue_from_the_ids_that_count() -> None:
    comms = thread_comms(3)

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        ids_BK, tokens_BS = drafted(PrefixRunner(VOCAB_SIZE, seed=comm.rank, sharpness=1.0), comm)
        written_BK = torch.stack([tokens_BS[row, length : length + K] for row, length in enumerate((9, 5, 7))])
        ids: list[list[int]] = ids_BK.tolist()
        assert written_BK.tolist() == ids
        return ids

    first, *others = on_ranks(comms, one_rank)
    alone, _ = drafted(PrefixRunner(VOCAB_SIZE, seed=1, sharpness=1.0), Comm.single())
    assert first != alone.tolist(), "the ranks would draw otherwise"
    assert others == [first, first]
