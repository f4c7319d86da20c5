"""Plan and run decide alike on certainty, and on draws over parts of the vocabulary."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.planning.spec import make_spec
from llama_ssp.run.decoders import cuts_of
from llama_ssp.settings.drafters import is_certain, of_kind, vocabulary_of
from llama_ssp.settings.layout import lay_out
from llama_ssp.settings.schema import RunConfig, SamplingConfig
from tests.helpers.composed import compose_run
from tests.helpers.extensions import need
from tests.helpers.lanes import pairs
from tests.helpers.plugins import in_this_process, with_law

DRAFTS = {
    "none": ("draft=none",),
    "model": ("draft=tiny-draft",),
    "greedy": ("draft=tiny-draft", "draft.greedy=true"),
    "law": ("draft=none",),
    "copies": ("draft=ngram",),
    "self": ("draft=self", "draft.layers=1"),
    "head": ("draft=tiny-eagle",),
    "window": ("draft=tiny-draft", "draft.window=16"),
    "own tokens": ("draft=tiny-draft", "draft.tokenizer=own"),
}
EXTENSIONS = {
    "copies": "copies",
    "self": "self_drafts",
    "head": "heads",
    "window": "windows",
    "own tokens": "tokenizers",
}
CERTAIN = {"none", "greedy", "copies"}
SAMPLINGS = {
    "warm": (),
    "greedy": ("sampling.temperature=0",),
    "greedy with a penalty": ("sampling.temperature=0", "sampling.presence_penalty=0.5"),
    "penalty": ("sampling.presence_penalty=0.5",),
    "top k": ("sampling.top_k=8",),
}
ROUNDS = {
    "chains": (),
    "trees": ("speculation.tree=2x2",),
    "dynamic": ("speculation.tree=dynamic-6x2x3",),
    "overlap": ("speculation.overlap=true",),
    "requests": (),
}
PLACEMENTS = {
    "one rank": (1,),
    "two": (2,),
    "sharded": (2, "placement.draft.kind=sharded"),
    "replicated": (2, "placement.draft.kind=replicated"),
    "apart": (3, "placement.draft.kind=own_gpu"),
    "two apart": (3, "placement.draft.kind=own_gpu", "placement.draft.tp_size=2"),
    "stages": (4, "placement.target.stages=2"),
    "replicas": (4, "placement.num_replicas=2"),
}


@pytest.fixture(autouse=True)
def _law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(with_law(tmp_path), monkeypatch)


def run_of(config: RunConfig, num_ranks: int) -> Any:
    shapes = [model.shape for model in (config.model, config.draft.model) if model]
    layout = lay_out(config.placement, world_size=num_ranks, has_draft=bool(config.draft.model))
    return SimpleNamespace(
        mesh=SimpleNamespace(layout=layout),
        vocabulary=vocabulary_of(config.draft),
        sources=[SimpleNamespace(origin=SimpleNamespace(shape=shape)) for shape in shapes],
        target=SimpleNamespace(vocab_size=shapes[0] and shapes[0].vocab_size),
    )


def decided(words: tuple[str, ...], num_ranks: int, *, has_law: bool = True, by_row: bool = False) -> tuple[bool, bool]:
    """What a plan decides, which must be what the run does."""
    config, _ = compose_run("task=generate", "model=tiny", *words)
    config.draft = of_kind("near") if has_law else config.draft
    config.sampling.by_row = by_row or None
    spec = make_spec(config, world_size=num_ranks, device="cpu", prompt_tokens=8)
    assert cuts_of(run_of(config, num_ranks), config) == spec.draws_over_shards
    assert spec.is_certain == is_certain(config.draft, config.speculation.tree_shape) or not spec.drafts
    return spec.draws_over_shards


@pairs(
    draft=[*DRAFTS],
    rule=["speculative", "block", "coupled"],
    sampling=[*SAMPLINGS],
    rounds=[*ROUNDS],
    placement=[*PLACEMENTS],
    batch_size=[64, 48],
)
def test_a_plan_draws_over_parts_of_the_vocabulary_where_the_run_does(  # noqa: PLR0917 - the axes of the sweep
    draft: str, rule: str, sampling: str, rounds: str, placement: str, batch_size: int
) -> None:
    if draft in EXTENSIONS:
        need(EXTENSIONS[draft])
    num_ranks, *placed = PLACEMENTS[placement]
    words = (*DRAFTS[draft], f"verification={rule}", *SAMPLINGS[sampling], *ROUNDS[rounds], *map(str, placed))
    how = {"has_law": draft == "law", "by_row": rounds == "requests"}
    found = decided((*words, f"batch_size={batch_size}"), int(num_ranks), **how)
    if draft in CERTAIN | {"law"} and ROUNDS[rounds] == () and rounds != "requests" and placement == "two":
        gathers = sampling in {"greedy", "top k"} or batch_size == 48 or draft == "none"
        assert found[0] != gathers


def test_a_law_that_every_rank_has_is_verified_over_parts_of_the_vocabulary() -> None:
    words = ("draft=none", "batch_size=64")
    assert decided(words, 2) == (True, False)
    assert decided((*words[:1], "batch_size=48"), 2) == (False, False)
    assert decided((*words, "speculation.tree=2x2"), 2) == (False, False)


def test_ranks_draw_over_parts_with_a_draft_model_and_gather_for_the_targets_own_layers() -> None:
    model = ("draft=tiny-draft", "batch_size=64")
    assert decided((*model, "placement.draft.kind=sharded"), 2, has_law=False) == (True, True)
    apart = ("placement.draft.kind=own_gpu", "placement.draft.tp_size=2", "verification=coupled")
    assert decided((*model, *apart), 3, has_law=False) == (False, True)
    need("self_drafts")
    assert decided(("draft=self", "draft.layers=1", "batch_size=64"), 2, has_law=False) == (False, False)


def test_a_server_gathers_logits_in_its_plan_too() -> None:
    """Its requests have sampling settings of their own."""
    need("serve")
    config, _ = compose_run("task=serve", "model=tiny", "draft=none", "batch_size=64")
    config.draft = of_kind("near")
    spec = make_spec(config, world_size=2, device="cpu", prompt_tokens=8)
    config.sampling = SamplingConfig(temperature=1.0, by_row=True)
    assert spec.draws_over_shards == cuts_of(run_of(config, 2), config) == (False, False)
