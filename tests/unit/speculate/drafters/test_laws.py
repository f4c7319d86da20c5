"""A drafter with a law, that of docs/extending.md: what it drafts from, and what plans count for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.matrices import vocabulary_parts
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.comms import Comm, Mesh
from llama_ssp.settings.drafters import DRAFTERS, DrafterRecord, DraftTerms, RoundSizes, drafter_of, of_kind
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout, SamplingConfig, VerificationConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.speculate.drafters.maker import make_drafters
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import Draft
from llama_ssp.speculate.sampling.rules import make_rule
from llama_ssp.speculate.sampling.shards import Shard
from tests.helpers.composed import compose_run
from tests.helpers.decoders import parts_of
from tests.helpers.extensions import need
from tests.helpers.fake_comm import thread_comms
from tests.helpers.planning import make_spec
from tests.helpers.plugins import drafter_with_law, in_this_process, with_law
from tests.helpers.prefix_runner import PrefixRunner

VOCAB_SIZE, K = 29, 3


def drafted(rule_name: str = "speculative", temperature: float = 0.7, forced_BK: Tensor | None = None) -> Draft:
    """What it drafts after tokens 4 and 20, in two rows."""
    rule = make_rule(SamplingConfig(temperature=temperature), VerificationConfig(rule=rule_name))
    drafter = drafter_with_law()(parts_of(rule=rule, num_draft_tokens=K, vocab_size=VOCAB_SIZE))
    tokens_BS = torch.tensor([[1, 4, 0, 0, 0, 0], [2, 20, 0, 0, 0, 0]])
    zeros_B = torch.zeros(2, dtype=torch.int64)
    rows = Rows(tokens_BS, zeros_B + 2, zeros_B, zeros_B + 2)
    if forced_BK is not None:
        rows = rows._replace(forced_BK=forced_BK)
    uniforms_BKP = torch.rand(2, K, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: Draft = drafter.propose(rows, num_tokens=K, uniforms_BKP=uniforms_BKP, bucket=6)
    assert tokens_BS[:, 2 : 2 + K].tolist() == found.ids_BK.tolist(), "it writes them"
    return found


def test_its_law_is_what_its_tokens_were_drawn_from() -> None:
    draft = drafted()
    before_BK = torch.cat([torch.tensor([[4], [20]]), draft.ids_BK[:, :-1]], dim=1)
    law_BKV = ((torch.arange(VOCAB_SIZE) - before_BK[..., None]).abs() * (-0.01 / 0.7)).softmax(-1)
    torch.testing.assert_close(draft.drawn_law[:, :K], law_BKV)
    assert not draft.drawn_law[:, K].any()


@pytest.mark.parametrize(("rule_name", "temperature"), [("speculative", 0.0), ("coupled", 0.7)])
def test_it_has_no_law_where_rules_read_none(rule_name: str, temperature: float) -> None:
    draft = drafted(rule_name, temperature)
    assert draft.is_certain
    assert temperature or draft.ids_BK.tolist() == [[4] * K, [20] * K]


def test_it_drafts_forced_tokens_with_certainty_and_the_others_from_its_law() -> None:
    draft = drafted(forced_BK=torch.tensor([[-1, 7, -1], [8, -1, -1]]))
    assert (int(draft.ids_BK[0, 1]), int(draft.ids_BK[1, 0])) == (7, 8)
    is_certain_BK = draft.drawn_law[:, :K].amax(-1) == 1
    assert is_certain_BK.tolist() == [[False, True, False], [True, False, False]]


def test_a_record_that_draws_is_certain_nowhere_and_another_without_a_model_everywhere() -> None:
    near, far = (DrafterRecord(name="near", make="a:b", draws=draws) for draws in (True, False))
    assert (near.is_certain(), far.is_certain(), near.is_certain(tree=tree_shape("dynamic-6x2x3"))) == (
        False,
        True,
        True,
    )
    model = drafter_of(of_kind("model"))
    assert (model.is_certain(), model.is_certain(is_greedy=True)) == (False, True)


def test_a_fallback_draws_as_the_run_samples_from_the_whole_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the draft model takes: its most probable tokens, over a part of the vocabulary."""
    need("adaptive")
    in_this_process(with_law(tmp_path), monkeypatch)
    words = ("draft.greedy=true", "draft.fallback=near", "speculation.num_draft_tokens=auto", "model.dtype=fp32")
    config, _ = compose_run("task=generate", "model=tiny", "draft=tiny-draft", *words)
    layout = Layout(target_ranks=(0,), draft_ranks=(0,), draft_kind=DraftLayout.one_rank)
    alone = Comm.single()
    mesh = Mesh(layout=layout, number=0, world=alone, replica=alone, target=alone, draft=alone)
    shard = Shard(thread_comms(2)[0], VOCAB_SIZE)
    how: Any = {"mesh": mesh, "shard": shard, "runner": PrefixRunner(VOCAB_SIZE, seed=1)}
    model, fallback = make_drafters(config, target=PrefixRunner(VOCAB_SIZE, seed=0), **how)
    rule = vars(fallback)["rule"]
    assert (rule.shard.is_whole, rule.takes_best) == (True, False)
    assert vars(model)["_rule"].shard is shard


def terms(_draft: object, round_: RoundSizes) -> DraftTerms:
    return DraftTerms(num_kernels=7, read_bytes=1000 * round_.num_draft_tokens * round_.vocab_size)


def planned(monkeypatch: pytest.MonkeyPatch, *, draws: bool, batch_size: int) -> PlanSpec:
    """A plan of two ranks, for a draft with such a record."""
    name = "near" if draws else "far"
    record = DrafterRecord(name=name, make="near:make", draws=draws, terms=terms if draws else DrafterRecord.terms)
    monkeypatch.setattr(DRAFTERS, "records", DRAFTERS.all() | {name: record})
    return make_spec("7B", num_ranks=2, free_draft=name, free_settings=of_kind(name), batch_size=batch_size)


@pytest.mark.parametrize(("batch_size", "is_over_parts"), [(4, False), (64, True)])
def test_a_plan_counts_a_law_on_every_rank(
    batch_size: int, is_over_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that verifies has room for one in any plan; for its own part where ranks verify over parts."""
    found = []
    for draws in (True, False):
        spec = planned(monkeypatch, draws=draws, batch_size=batch_size)
        assert spec.draws_over_shards == (is_over_parts, False)
        found.append([plan.logits_bytes for plan in memory(spec, hardware.load("8xh100"))])
    whole = 4 * batch_size * spec.num_draft_tokens * spec.vocab_size
    others = 1 - len(vocabulary_parts(spec.vocab_size, 2)[0]) / spec.vocab_size
    wanted = [whole * others] * 2 if is_over_parts else [0, whole]
    assert [one - other for one, other in zip(*found, strict=True)] == pytest.approx(wanted)


def test_a_plan_prices_the_draws_of_a_law_and_what_its_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = hardware.load("8xh100")
    for number in (4, 2):
        seconds = []
        for draws in (True, False):
            spec = planned(monkeypatch, draws=draws, batch_size=64)
            costs = CostModel(spec, machine)
            seconds.append(costs.drafting_s(number))
        own_s = 7 * machine.kernel_s + 1000 * number * spec.vocab_size / machine.read_bytes_per_s
        drawn_s = number * costs.draw_s(CostModel(make_spec("7B", batch_size=64), machine).target)
        assert seconds == pytest.approx([own_s + drawn_s, 0])
