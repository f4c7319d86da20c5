"""Abilities that the table of clashes does not name together run together, and change no text.

At temperature 0, and under `coupled` at any, a text is that of plain decoding, so every case has one right answer.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoding import run_config
from llama_ssp import Pair, catalogue, load
from llama_ssp.api.arguments import draft_model
from llama_ssp.catalogue import ModelConfig
from llama_ssp.registry import imported
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.combinations import clashes
from llama_ssp.settings.drafters import ModelDraftConfig, free_drafts, of_kind, other_vocabularies, vocabulary_of
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
)
from llama_ssp.speculate.engine.state import Request
from tests.helpers import one_pass_heads
from tests.helpers.decoders import complete, ids_of
from tests.helpers.lanes import pairs
from tests.helpers.layouts import ALONE, LAYOUTS, texts_of_ranks
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.tokenizers import byte_level, save_tokenizer, sentencepiece_like

MODES: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": 3},
    "tree": {"tree": "2x2"},
    "dynamic": {"tree": "dynamic-8x3x3"},
    "adaptive": {"num_draft_tokens": "auto"},
    "fallback": {"num_draft_tokens": "auto"},
    "overlap": {"overlap": True, "num_draft_tokens": 3},
}
RULES = {"speculative": 0.0, "block": 0.0, "greedy": 0.0, "coupled": 0.8}
"""Rules, and a temperature at which their texts are those of plain decoding."""
PROCESSES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "truncation": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "biases": {"logit_bias": {5: -3.0, 7: 2.0}},
    "bans": {"bad_words": ["x"], "bad_ids": ((5,), (4, 7))},
    "least": {"min_new_tokens": 9, "eos_ids": (3,)},
    "by row": {},
}
DRAFTS = {
    "model": ModelDraftConfig(kind=MODEL_DRAFT, model=ModelConfig(name="draft")),
    "greedy": ModelDraftConfig(kind=MODEL_DRAFT, model=ModelConfig(name="draft"), greedy=True),
    **{one.name: draft_model(ModelConfig(name="draft"), one) for one in other_vocabularies()},
    **{kind: of_kind(kind) for kind in free_drafts()},
}
OWN_LAYOUTS = [ALONE, *(LAYOUTS[place] for place in (0, 2, 4, 6))]
_KNOWN = catalogue.load("tiny").shape
assert _KNOWN
HEAD = replace(_KNOWN, target_vocab_size=1)
SHAPES = {"eagle": (_KNOWN, HEAD), "mtp": (_KNOWN, HEAD), "block": (_KNOWN, replace(HEAD, most_drafted=4))}
SHAPES["modules"], SHAPES["confident"] = SHAPES["mtp"], SHAPES["block"]
SHAPES["hybrid"] = SHAPES["hybrid target"] = (replace(_KNOWN, recurrent="conv"),) * 2
"""What the table has to know of the checkpoints of `loaded`."""
MTP = {"mtp": ("qwen2", 1), "modules": ("glm4_moe", 3)}
"""Families with MTP layers, and how many."""


def combined(config: RunConfig, mode: str, rule: str, process: str) -> RunConfig:
    sampling = SamplingConfig(temperature=RULES[rule], **PROCESSES[process])
    if process == "by row":
        sampling = SamplingConfig(temperature=1.0, by_row=True)
    draft = replace(config.draft, fallback=next(iter(free_drafts()), None) if mode == "fallback" else None)
    return replace(
        config,
        draft=draft,
        sampling=sampling,
        verification=VerificationConfig(rule=rule),
        batch_size=3,
        speculation=SpeculationConfig(**MODES[mode]),
        ignore_eos=False,
    )


def config_on(layout: Layout, draft: str) -> RunConfig:
    placement = PlacementConfig(draft=DraftPlacement(kind=layout.draft_kind))
    return replace(run_config(ModelConfig(name="target"), None, placement=placement), draft=DRAFTS[draft])


def requests_for(rule: str, process: str, *, vocab_size: int) -> list[Request]:
    """Prompts of some lengths; rows of their own have all processes that penalize or truncate, one after the other."""
    kinds = cycle(["none", "truncation", "penalties", "biases"])
    return [
        Request(
            index=index,
            prompt_ids=tuple((7 * index + 3 * place) % vocab_size for place in range(1 + 2 * index)),
            max_new_tokens=14 - index,
            sampling=SamplingConfig(temperature=RULES[rule], **PROCESSES[next(kinds)]) if process == "by row" else None,
        )
        for index in range(5)
    ]


def is_allowed(*, layout: Layout, draft: str, **asked: str) -> bool:
    return not [*clashes(combined(config_on(layout, draft), **asked))]


@pairs(where=is_allowed, layout=OWN_LAYOUTS, draft=[*DRAFTS], mode=[*MODES], rule=[*RULES], process=[*PROCESSES])
def test_what_the_table_allows_on_ranks_has_the_plain_text(
    layout: Layout, draft: str, mode: str, rule: str, process: str
) -> None:
    config = combined(config_on(layout, draft), mode, rule, process)
    layout = replace(layout, draft_ranks=()) if draft in free_drafts() else layout
    tokenizers = (byte_level(), sentencepiece_like()) if draft == "own" else ()
    prepare = vocabulary_of(config.draft).prepare
    prepared = imported(prepare, setting="draft")(config.draft, *tokenizers) if prepare else None
    sizes = (len(tokenizers[0]), len(tokenizers[1])) if tokenizers else (11, 11)
    requests = requests_for(rule, process, vocab_size=sizes[0])
    how: dict[str, Any] = {"sizes": sizes, "sharpness": 0.7 if tokenizers else 1.0}
    (plain,) = texts_of_ranks(ALONE, config, requests, speculative=False, **how)
    found = texts_of_ranks(layout, config, requests, prepared=prepared, **how)
    assert found == [plain] * len(layout.ranks)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A pair of each kind that reads more than a model's logits, or keeps more than keys and values."""
    folder = tmp_path_factory.mktemp("combined")

    def saved(name: str, family: str) -> Path:
        build_checkpoint(folder / name, family)
        save_tokenizer(folder / name, VOCAB_SIZE)
        return folder / name

    @cache
    def load_one(kind: str) -> Pair:
        if kind == "eagle":
            return load("tiny", "tiny-eagle")
        if kind in MTP:
            family, num_modules = MTP[kind]
            save_with_mtp(folder / kind, family, num_modules=num_modules)
            save_tokenizer(folder / kind, VOCAB_SIZE)
            return load(folder / kind, "mtp")
        if kind == "block":
            one_pass_heads.save_pair(folder / kind, "dflash", likely=64)
            save_tokenizer(folder / kind / "target", one_pass_heads.VOCABULARY)
            return load(folder / kind / "target", folder / kind / "head")
        if kind == "confident":
            one_pass_heads.save_pair(folder / kind, "dspark", likely=64)
            save_tokenizer(folder / kind / "target", one_pass_heads.VOCABULARY)
            return load(folder / kind / "target", {"model": str(folder / kind / "head"), "confidence": 0.5})
        target = saved(f"{kind} model", "lfm2")
        return load(target, target if kind == "hybrid" else saved(f"{kind} draft", "llama"))

    return load_one


def is_allowed_alone(*, kind: str, **asked: str) -> bool:
    target, draft = SHAPES[kind]
    config = run_config(ModelConfig(name="target", shape=target), ModelConfig(name="draft", shape=draft))
    if kind == "confident" and "tree" in MODES[asked["mode"]]:
        return False
    return not [*clashes(combined(config, **asked))]


@pytest.mark.seconds
@pairs(where=is_allowed_alone, kind=[*SHAPES], mode=[*MODES], rule=[*RULES], process=[*PROCESSES])
def test_what_the_table_allows_of_other_drafts_has_the_plain_text(
    kind: str, mode: str, rule: str, process: str, loaded: Callable[[str], Pair]
) -> None:
    pair = loaded(kind)
    config = combined(pair.config, mode, rule, process)
    requests = requests_for(rule, process, vocab_size=one_pass_heads.MASK // 4)
    with torch.inference_mode():
        drafted, plain = (
            ids_of(complete(build_decoder(pair.models, config, speculative=speculative), requests))
            for speculative in (True, False)
        )
    assert drafted == plain
