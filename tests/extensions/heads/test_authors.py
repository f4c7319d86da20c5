"""Heads that their trainers' classes have written draft here as in those classes."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.extensions.heads.sources import HeadSource
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.settings.schema import SamplingConfig
from tests.extensions.heads.authors import (
    NEEDED,
    SELECTING,
    eagle_head,
    eagle_logits,
    flat_head,
    flat_logits,
    flat_rounds,
    make_alike,
    module_of,
    parallel_logits,
    speculator_head,
    speculator_logits,
)
from tests.extensions.heads.test_confidence import Ended, check_ends, drafter_of
from tests.helpers import head_drafts
from tests.helpers.draft_heads import inspect_pair
from tests.helpers.edits import edit_json
from tests.helpers.head_drafts import NUM_DRAFTED, Seen
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint
from tests.helpers.one_pass_heads import DIM, LAYERS, VOCABULARY, WIDTH
from tests.helpers.text_laws import LibraryLogits, counted
from tests.helpers.tokenizers import save_tokenizer
from training import generate, speculator
from training.head_model import tapped_layers

pytestmark = NEEDED
PROMPTS = ((5, 100, 17, 4, 56), (31,), tuple(range(40, 70)))
_BOTH = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "all": {},
    "in both directions": {"is_causal": False},
    "causal": {"is_causal": True},
    "window": {"layer_types": _BOTH, "sliding_window": 5, "use_sliding_window": True},
    "window of both": {"layer_types": _BOTH, "sliding_window": 3, "use_sliding_window": True, "is_causal": False},
    "switched off": {"layer_types": _BOTH, "sliding_window": 5},
}
FACTORS = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}


def target_in(folder: Path, *, num_layers: int = 6) -> Any:
    """Save a random target; returns it as the library has it."""
    build_checkpoint(
        folder / "target", "llama", hidden_size=WIDTH, head_dim=DIM, vocab_size=VOCABULARY, num_hidden_layers=num_layers
    )
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32")


def decode(folder: Path, seen: Seen | None = None, kind: Any = OnePassDrafter, **how: Any) -> list[Any]:
    """Texts of the pair in a folder; see `head_drafts.decode`."""
    target, origin = inspect_pair(folder)
    assert isinstance(origin, HeadSource)
    runner = load_model(Loading(target, dtype=torch.float32))
    head = load_model(Loading(origin, dtype=torch.float32, target=runner))
    given: dict[str, Any] = {"width": WIDTH, "prompts": PROMPTS, "seen": seen} | how
    return head_drafts.decode(runner, kind, head, origin.layers, **given)


@pytest.mark.parametrize(
    ("version", "windows", "tree"),
    [
        *((2, windows, None) for windows in WINDOWS),
        (1, "window of both", None),
        (1, "in both directions", None),
        (2, "window of both", "2x2x1"),
        slow(1, "window", None),
    ],
)
def test_heads_of_dflash_draft_as_in_their_authors_classes(
    version: int, windows: str, tree: str | None, tmp_path: Path
) -> None:
    library, seen = target_in(tmp_path), Seen()
    more = (SELECTING if version == 2 else {}) | (FACTORS if windows == "causal" else {})
    head = flat_head(tmp_path / "head", version, windows=WINDOWS[windows], **more)
    decode(tmp_path, seen, batch_size=2, tree=tree)
    wanted = partial(flat_logits, head, library, num=NUM_DRAFTED)
    assert head_drafts.check(seen, library, LAYERS, tree, wanted) > 40


_OF_LAYERS = {"layer_types": _BOTH, "sliding_window": 3, "use_sliding_window": True}
SPECULATORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {}),
    "dflash, windows": ("dflash", _OF_LAYERS, {}),
    "dflash, windows in both directions": ("dflash", _OF_LAYERS, {"sliding_window_non_causal": True}),
    "dflash 2, windows": ("dflash2", _OF_LAYERS, SELECTING),
    "dflash 2, causal": ("dflash2", _OF_LAYERS, {"sliding_window_non_causal": False, "sample_from_anchor": True}),
    "dspark, windows": ("dspark", _OF_LAYERS, {"markov_rank": 16, "markov_head_type": "rnn"}),
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_heads_of_speculators_draft_as_in_its_classes(name: str, tmp_path: Path) -> None:
    library, seen, (kind, layers, fields) = target_in(tmp_path), Seen(), SPECULATORS[name]
    head = speculator_head(tmp_path, kind, layers=layers, **fields)
    at_anchor = head.config.sample_from_anchor
    decode(tmp_path, seen, batch_size=2, num_drafted=NUM_DRAFTED + at_anchor)
    wanted = partial(speculator_logits, head, at_anchor=at_anchor)
    assert head_drafts.check(seen, library, LAYERS, None, wanted) > 40


def test_drafts_end_where_the_class_of_speculators_estimates(tmp_path: Path) -> None:
    library, seen = target_in(tmp_path), Ended()
    head = speculator_head(tmp_path, "dspark", markov_rank=16)
    with torch.no_grad():  # estimates that depend on the token before
        head.confidence_head.proj.weight[:, WIDTH:] *= 20
    head.save_pretrained(tmp_path / "head")
    decode(tmp_path, kind=partial(drafter_of, seen=seen), batch_size=2, replay=False, num_drafted=NUM_DRAFTED + 1)
    assert check_ends(seen, library, LAYERS, partial(speculator_logits, head, at_anchor=True, of_confidence=True)) > 5
    assert len({num for _, _, num in seen}) >= 3


EAGLES: dict[str, dict[str, Any]] = {
    "of a Llama": {"drafted": 112},
    "that normed taps join": {"norm_before_fc": True, "norm_output": True},
    "of two layers of a Qwen 3": {"kind": "qwen3", "num_layers": 2, "fc_norm": True},
    "of a Qwen 3, windows": {"kind": "qwen3", "num_layers": 2, "windows": _OF_LAYERS},
    "of a Llama, windows": {"num_layers": 2, "windows": _OF_LAYERS},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "of a Llama": {"drafted": 112, "num_layers": 2},
    "of a Qwen 3": {"kind": "qwen3", "num_layers": 2, "norm_before_fc": True},
}


@pytest.mark.parametrize("name", EAGLES)
def test_heads_of_eagle_3_of_speculators_draft_as_in_its_class(name: str, tmp_path: Path) -> None:
    library, seen = target_in(tmp_path), Seen()
    head = eagle_head(tmp_path, **EAGLES[name])
    decode(tmp_path, seen, kind=HeadDrafter, batch_size=2, num_drafted=1)
    assert head_drafts.check(seen, library, LAYERS, None, partial(eagle_logits, head)) > 20


@pytest.mark.parametrize("name", PARALLEL)
def test_heads_of_p_eagle_of_speculators_draft_as_in_its_class(name: str, tmp_path: Path) -> None:
    library, seen = target_in(tmp_path), Seen()
    head = eagle_head(tmp_path, is_parallel=True, **PARALLEL[name])
    decode(tmp_path, seen, batch_size=2)
    wanted = partial(parallel_logits, head, num=NUM_DRAFTED)
    assert head_drafts.check(seen, library, LAYERS, None, wanted) > 40


@pytest.mark.parametrize("name", ["dflash, windows", "of a Qwen 3, windows", "of a Llama, windows"])
def test_windows_that_stand_beside_the_layers_are_read_as_in_them(name: str, tmp_path: Path) -> None:
    library, seen, is_block = target_in(tmp_path), Seen(), name in SPECULATORS
    head = speculator_head(tmp_path, "dflash", layers=_OF_LAYERS) if is_block else eagle_head(tmp_path, **EAGLES[name])
    layers = json.loads((tmp_path / "head" / "config.json").read_text())["transformer_layer_config"]
    windows = {field: layers.pop(field) for field in _OF_LAYERS}
    edit_json(tmp_path / "head" / "config.json", transformer_layer_config=layers, **windows)
    kind, number = (OnePassDrafter, NUM_DRAFTED) if is_block else (HeadDrafter, 1)
    decode(tmp_path, seen, kind=kind, batch_size=2, num_drafted=number)
    wanted = partial(speculator_logits, head, at_anchor=False) if is_block else partial(eagle_logits, head)
    assert head_drafts.check(seen, library, LAYERS, None, wanted) > 20


def alike(folder: Path) -> tuple[Any, Any]:
    """A target and a head of DFlash 2 whose drafts it mostly accepts, as their classes have them."""
    library, block = target_in(folder), {"layer_types": _BOTH, "sliding_window": 6, "use_sliding_window": True}
    more: dict[str, Any] = SELECTING | {
        "selector_rank": WIDTH,
        "selector_top_k": VOCABULARY - 4,
        "output_multiplier": 0.01,
    }
    head = flat_head(folder / "head", 2, windows=block | {"is_causal": False}, **more)
    make_alike(head, library)
    library.save_pretrained(folder / "target")
    head.save_pretrained(folder / "head")
    return head, library


def test_greedy_text_and_the_tokens_of_each_round_are_those_of_the_authors_loop(tmp_path: Path) -> None:
    head, library = alike(tmp_path)
    done = decode(tmp_path, batch_size=2, temperature=0.0, num_new=40)
    for prompt, ours in zip(PROMPTS, done, strict=True):
        text, rounds = flat_rounds(head, library, prompt, num_new=40)
        assert ours.token_ids == text
        assert [number + 1 for number in ours.accepted_lengths][:-2] == rounds[:-2] != []
        assert sum(rounds) > 2.5 * len(rounds)


@pytest.mark.parametrize("rule_name", ["block", heavy("speculative")])
def test_sampled_texts_have_the_target_s_law_with_a_head_that_is_mostly_accepted(
    rule_name: str, tmp_path: Path
) -> None:
    """A false alarm has a chance of 1 in 10 000."""
    _, library = alike(tmp_path)
    sampling, prompt = SamplingConfig(temperature=1.0, top_k=3), (5, 100, 17)
    how: dict[str, Any] = {"sampling": sampling, "rule_name": rule_name, "num_samples": 2000}
    done = decode(tmp_path, batch_size=250, num_new=4, prompts=[prompt], **how)
    accepted = [number for each in done for number in each.accepted_lengths]
    assert sum(accepted) > 0.5 * sum(sum(each.draft_lengths) for each in done)
    target = LibraryLogits(library)
    for length in (2, 3, 4):
        texts = [tuple(each.token_ids[:length]) for each in done]
        counts, expected = counted(target, prompt, texts, sampling=sampling)
        assert chisquare(counts, expected).pvalue > 1e-4 / 3


NUM_LAYERS = 7
TAPPED = tapped_layers(NUM_LAYERS)


@pytest.mark.parametrize("kind", speculator.LOSSES)
def test_training_gives_a_class_the_target_s_states_and_logits(kind: str, tmp_path: Path) -> None:
    library, ids_RT = target_in(tmp_path, num_layers=NUM_LAYERS), torch.arange(24).view(2, 12) * 7 % VOCABULARY
    target = speculator.Target(tmp_path / "target", kind, "cpu", pad_id=7)
    head, read = target.new_head(num_layers=1, block_size=4), target.read(ids_RT)
    with torch.no_grad():
        found = library(ids_RT, output_hidden_states=True)
        logits = head.verifier_lm_head(head.verifier_norm(read["verifier_last_hidden_states"]))
    first = int(kind in speculator.OF_PAIRS)  # a pair is of the taps of a token and of the token after it
    taps_RTX = torch.cat([found.hidden_states[layer] for layer in TAPPED], dim=-1)[:, : 12 - first]
    torch.testing.assert_close(logits.view(2, 12 - first, -1), found.logits[:, first:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(read["hidden_states"], taps_RTX.flatten(0, 1)[None], atol=1e-6, rtol=1e-5)
    assert read["input_ids"].equal(ids_RT[:, first:].reshape(1, -1))
    assert read["loss_mask"].equal(read["input_ids"] != 7)
    assert read["document_ids"][0].bincount().tolist() == [12 - first] * 2


def save_texts(folder: Path) -> None:
    """Save the tokenizer of a target, texts to train on, and rows of the target's own text."""
    save_tokenizer(folder / "target", VOCABULARY)
    for name in ("texts", generate.FOLDER):
        (folder / name).mkdir()
    for number in range(24):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(f"t{place % 199 + 3}" for place in range(300)))
    rows_BT = torch.randint(3, VOCABULARY, (24, generate.LENGTH), generator=torch.Generator().manual_seed(1))
    save_file({"rows_BT": rows_BT.int()}, folder / generate.FOLDER / "1.safetensors")


def train(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Train for a step or two."""
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "speculator",
            kind,
            *("--target", f"{folder}/target", "--text", f"{folder}/texts", "--scratch", str(folder)),
            *("--minutes", "0.01", "--rows", "2", "--own-rows", "1", "--anchors", "16", "--block", "4"),
            *more,
        ],
    )
    speculator.main()


@pytest.mark.parametrize("kind", speculator.LOSSES)
def test_a_trained_head_is_loaded_as_it_is_saved_and_drafts_as_its_class_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, seen = target_in(tmp_path, num_layers=NUM_LAYERS), Seen()
    save_texts(tmp_path)
    train(tmp_path, kind, monkeypatch, "--out", f"{tmp_path}/head")
    assert (tmp_path / f"{kind}.jsonl").read_text().count("\n") >= 2
    head = module_of("speculators").SpeculatorModel.from_pretrained(tmp_path / "head").eval()
    at_anchor = kind == "dspark"
    how: dict[str, Any] = {"num_drafted": NUM_DRAFTED + at_anchor}
    wanted: Any = partial(speculator_logits, head, at_anchor=at_anchor)
    if kind == "eagle3":
        how, wanted = {"num_drafted": 1, "kind": HeadDrafter}, partial(eagle_logits, head)
    elif kind == "peagle":
        wanted = partial(parallel_logits, head, num=NUM_DRAFTED)
    decode(tmp_path, seen, batch_size=2, **how)
    assert head_drafts.check(seen, library, TAPPED, None, wanted) > 20


def test_training_goes_on_from_a_saved_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_in(tmp_path, num_layers=NUM_LAYERS)
    save_texts(tmp_path)
    train(tmp_path, "dspark", monkeypatch, "--out", f"{tmp_path}/one")
    again = "--rate", "0", "--seed", "1", "--start", f"{tmp_path}/one", "--out", f"{tmp_path}/two"
    train(tmp_path, "dspark", monkeypatch, *again)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)
