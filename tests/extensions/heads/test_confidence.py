"""The confidence head of DSpark: where drafts end is its estimate's, and texts stay what they are.

Shapes: B sequences, K drafted tokens, F features of an estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp import load as load_pair
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.extensions.heads.records import ConfidenceConfig
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.drafters.drafter import DrafterParts
from tests.helpers import head_drafts
from tests.helpers.decoders import complete, ids_of, make_decoder, outcome, requests_of
from tests.helpers.lanes import heavy
from tests.helpers.one_pass_heads import CONFIDENT, FORGED, VOCABULARY, WIDTH, reference, save_pair, taps_of
from tests.helpers.recorded import WatchedGraphs
from tests.helpers.tokenizers import save_tokenizer

PROMPTS = ((5, 100, 17, 4, 56), (31,), tuple(range(40, 70)))
K, LEAST = 3, 0.5
Ended = list[tuple[list[int], list[int], int]]
"""Texts, drafted tokens, and how many of these count."""


def drafter_of(parts: DrafterParts, *, least: float = LEAST, seen: Ended | None = None) -> OnePassDrafter:
    """A drafter with a confidence; `seen` takes its drafts by rows."""
    drafter = OnePassDrafter(replace(parts, config=ConfidenceConfig(confidence=least)))
    propose: Any = drafter.propose

    def watched(rows: Any, **how: Any) -> Any:
        texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
        draft = propose(rows, **how)
        seen.extend(zip(texts, draft.ids_BK.tolist(), draft.num_B1[:, 0].tolist(), strict=True))  # type: ignore[union-attr]
        return draft

    if seen is not None:
        drafter.propose = watched  # type: ignore[method-assign]
    return drafter


def decode(folder: Path, layout: str, *, likely: int = VOCABULARY, **how: Any) -> Any:
    """Texts of a pair of this layout; see `drafter_of` for `least` and `seen`."""
    target, origin = save_pair(folder, layout, likely=likely)
    runner = load_model(Loading(target, dtype=torch.float32))
    head = load_model(Loading(origin, dtype=torch.float32, target=runner))
    kind = partial(drafter_of, **{name: how.pop(name) for name in ("least", "seen") if name in how})
    if how.pop("plain", False):
        return complete(make_decoder(runner, None, temperature=0.0), requests_of(PROMPTS, 24))
    return head_drafts.decode(runner, kind, head, origin.layers, width=WIDTH, prompts=PROMPTS, num_drafted=K, **how)


def check_ends(
    seen: Ended,
    library: Any,
    layers: Sequence[int],
    logit_of: Callable[[list[int], Tensor, list[int]], Tensor],
) -> int:
    """Compare where drafts end with a reference's estimates, but for estimates near the limit; returns how many do."""
    number = 0
    for text, ids, num_counted in seen:
        if text == [0, 0]:  # a vacant row
            continue
        with torch.inference_mode():
            states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps_LX = torch.cat([states[layer][0, : len(text) - 1] for layer in layers], dim=-1)
        estimates = [float(logit_of(text, taps_LX, ids[:step]).sigmoid()) for step in range(len(ids))]
        if min(abs(estimate - LEAST) for estimate in estimates) < 1e-4:
            continue
        wanted = next((step for step, estimate in enumerate(estimates) if estimate < LEAST), 2**31)
        assert num_counted == wanted
        number += wanted < len(ids)
    return number


@pytest.mark.seconds
@pytest.mark.parametrize("layout", ["dflash of DeepSpec", "dspark", *map(heavy, ("recurrent dspark", FORGED))])
def test_a_draft_ends_before_the_first_token_that_is_expected_to_be_rejected(layout: str, tmp_path: Path) -> None:
    assert layout in CONFIDENT
    seen = Ended()
    decode(tmp_path, layout, seen=seen, batch_size=2, replay=False)
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32")
    table_VE, output_VE = (
        each.weight.detach() for each in (library.get_input_embeddings(), library.get_output_embeddings())
    )
    logit_of = partial(
        reference,
        layout,
        load_file(tmp_path / "head" / "model.safetensors"),
        table_VE=table_VE,
        output_VE=output_VE,
        num_drafted=K,
        of_confidence=True,
    )
    assert check_ends(seen, library, taps_of(layout), logit_of) > 5
    assert len({num for _, _, num in seen}) >= 3


@pytest.mark.seconds
@pytest.mark.parametrize("layout", ["dspark of DeepSpec", heavy("dflash of DeepSpec")])
def test_texts_are_the_same_in_every_batch_and_greedy_ones_are_the_target_s(layout: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"likely": 8, "num_new": 24}
    wanted = decode(tmp_path, layout, **how)
    lengths = [number for done in wanted for number in done.draft_lengths]
    assert {*lengths} > {0, K}
    for other in ({"batch_size": 3}, {"batch_size": 2, "replay": WatchedGraphs}):
        assert outcome(decode(tmp_path, layout, **how, **other)) == outcome(wanted)
    assert ids_of(decode(tmp_path, layout, **how, least=0.0)) != ids_of(wanted)  # of other draws
    greedy = decode(tmp_path, layout, **how, temperature=0.0, batch_size=2)
    assert ids_of(greedy) == ids_of(decode(tmp_path, layout, likely=8, plain=True))
    assert sum(sum(done.accepted_lengths) for done in greedy) > 0


def test_a_setting_ends_drafts_of_a_pair_and_counts_what_was_drafted(tmp_path: Path) -> None:
    save_pair(tmp_path, "dspark of DeepSpec")
    save_tokenizer(tmp_path / "target", VOCABULARY)
    pair, ending = (
        load_pair(tmp_path / "target", {"model": str(tmp_path / "head"), **more}, dtype="fp32")
        for more in ({}, {"confidence": 0.5})
    )
    texts = [each.generate(["t5 t9 t3"], max_new_tokens=24, temperature=0)[0] for each in (pair, ending)]
    assert texts[0].token_ids == texts[1].token_ids


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a head without": ("dflash", {"confidence": 0.5}, {}, r"confidence=0.5 is of DSpark heads .* has none"),
    "a tree": ("dspark of DeepSpec", {"confidence": 0.5}, {"tree": "2x2"}, "confidence=0.5 ends chains: leave it"),
    "no number": ("dspark of DeepSpec", {"confidence": "high"}, {}, "confidence='high' must be a number"),
    "no probability": ("dspark of DeepSpec", {"confidence": 1.5}, {}, "at least 0 and below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_effect_or_no_end_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    layout, draft, more, message = REFUSED[name]
    save_pair(tmp_path, layout)
    save_tokenizer(tmp_path / "target", VOCABULARY)

    def run() -> None:
        pair = load_pair(tmp_path / "target", {"model": str(tmp_path / "head"), **draft}, dtype="fp32")
        pair.generate(["t5"], max_new_tokens=2, **more)

    with pytest.raises(ConfigError, match=message):
        run()
