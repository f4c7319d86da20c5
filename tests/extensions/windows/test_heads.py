"""Draft heads that see a window: their law at every step of every round, their texts, their bytes, what is refused.

Shapes: K drafted tokens, V vocabulary, X taps, L tokens of a text.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp import catalogue
from llama_ssp.extensions.windows.records import WindowConfig
from llama_ssp.machines import hardware
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.graph_inputs import find_parts
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import make_spec as spec_of_run
from llama_ssp.settings.checks import check_values
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts
from llama_ssp.speculate.drafters.model import make
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import draft_heads, head_drafts, one_pass_heads
from tests.helpers.composed import compose_run
from tests.helpers.decoders import requests_of, tree_of
from tests.helpers.extensions import of_heads
from tests.helpers.head_drafts import NUM_DRAFTED, Seen, chat, check, check_greedy, make_head_decoder
from tests.helpers.lanes import heavy
from tests.helpers.models import refusal
from tests.helpers.mtp_layers import save_with_mtp

TURNS = [tuple(range(40 + turn, 70 - 2 * turn)) for turn in range(3)]
TAPPED = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
PROMPTS = ((5, 90, 17, 4, 25), (31,), tuple(range(40, 70)))
WAYS = {"window": (8, 2), "no first tokens": (6, 0), "all": (200, 4), "as planned": (64, 2)}


def loaded(origin: Any, target: Any = None) -> Any:
    return load_model(Loading(origin, dtype=torch.float32, target=target))


def windowed(way: str) -> tuple[Callable[[DrafterParts], Drafter], WindowConfig]:
    """What makes a head's drafter of a window, as runs do, and its settings."""
    window, sinks = WAYS[way]
    config = WindowConfig(window=window, sinks=sinks)
    return lambda parts: make(replace(parts, config=config)), config


def of_window(way: str, *between: Any, **how: Any) -> Any:
    """Decode with a head that sees a window; see `head_drafts.decode`, with target, head and tapped layers."""
    (target, *others), (kind, config) = between, windowed(way)
    return head_drafts.decode(target, kind, *others, draft=config, **how)


def of_prompts(seen: Seen) -> Seen:
    """What was drafted in rows that are not vacant."""
    return [each for each in seen if any(each[0][: len(prompt)] == [*prompt] for prompt in PROMPTS)]


def skipped(way: str, text: list[int], *, depth: int) -> range:
    """The pairs that no later one sees: of a prompt the middle, and what has moved out of the window of a round."""
    window, sinks = WAYS[way]
    num_prompt = max(len(prompt) for prompt in PROMPTS if text[: len(prompt)] == [*prompt])
    first = max(len(text) - 1 - (depth + 1), 0)
    return range(sinks, max(sinks, num_prompt - 1 - window, first - window))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("way", "tree", "pauses"),
    [
        ("window", None, 0),
        ("no first tokens", "2x2x1", 0),
        heavy("window", "2x2x1", 0),
        heavy("window", None, 33),
        heavy("all", None, 0),
    ],
)
def test_every_draft_of_a_head_has_the_law_of_the_pairs_that_it_sees(
    way: str, tree: str | None, pauses: int, tmp_path: Path
) -> None:
    """After rounds of any outcome and rounds without drafts, in rows shorter and longer than the window."""
    target, origin = draft_heads.save_small_pair(tmp_path, of_head=TAPPED)
    runner, seen, shape = loaded(target), Seen(), tree_of(tree)
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32")
    tensors, table_VE = load_file(tmp_path / "head" / "model.safetensors"), library.get_input_embeddings().weight
    choices = [*[DraftChoice(0)] * pauses, DraftChoice(3), DraftChoice(2)] if pauses else []
    of_window(
        way,
        runner,
        loaded(origin, runner),
        origin.layers,
        width=draft_heads.SMALL_WIDTH,
        prompts=PROMPTS,
        num_new=16 + pauses,
        seen=seen,
        tree=tree,
        choices=choices,
        batch_size=2,
    )

    def wanted(text: list[int], taps_LX: Tensor, drafted: list[int]) -> Tensor:
        hidden = skipped(way, text, depth=shape.depth if shape else NUM_DRAFTED)
        return draft_heads.reference(tensors, table_VE.detach()[[*text[1:], *drafted]], taps_LX, skipped=hidden)

    assert check(of_prompts(seen), library, origin.layers, tree, wanted) > 10


@pytest.mark.parametrize(("layout", "tree"), [("dflash of its authors", None), heavy("dspark", "2x2x1")])
def test_every_block_has_the_law_of_the_positions_that_it_sees(layout: str, tree: str | None, tmp_path: Path) -> None:
    (target, origin), seen, shape = one_pass_heads.save_pair(tmp_path, layout), Seen(), tree_of(tree)
    runner, depth = loaded(target), shape.depth if shape else NUM_DRAFTED
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="float32")
    of_window(
        "window",
        runner,
        loaded(origin, runner),
        origin.layers,
        width=one_pass_heads.WIDTH,
        prompts=PROMPTS,
        seen=seen,
        tree=tree,
        batch_size=2,
    )
    parts = library.get_input_embeddings(), library.get_output_embeddings()
    table_VE, output_VE = (part.weight.detach() for part in parts)

    def wanted(text: list[int], taps_LX: Tensor, drafted: list[int]) -> Tensor:
        return one_pass_heads.reference(
            layout,
            load_file(tmp_path / "head" / "model.safetensors"),
            text,
            taps_LX,
            drafted,
            num_drafted=depth,
            table_VE=table_VE,
            output_VE=output_VE,
            skipped=skipped("window", text, depth=depth),
        )

    assert check(of_prompts(seen), library, one_pass_heads.taps_of(layout), tree, wanted) > 10


def one_pass(layout: str, folder: Path) -> tuple[Any, ...]:
    return *one_pass_heads.save_pair(folder, layout, likely=8), one_pass_heads.WIDTH


def small_eagle(folder: Path) -> tuple[Any, ...]:
    return *draft_heads.save_small_pair(folder), draft_heads.SMALL_WIDTH


def mtp(family: str, folder: Path, *, num_modules: int = 1) -> tuple[Any, ...]:
    save_with_mtp(folder, family, num_modules=num_modules, vocab_size=8)
    return (target := inspect(folder)), of_heads("sources").mtp_of(target), 64


HEADS = [
    (partial(one_pass, "peagle"), None),
    heavy(partial(one_pass, "dspark"), "2x2x1"),
    heavy(small_eagle, "2x2x1"),
    (partial(mtp, "qwen2"), None),
    heavy(partial(mtp, "glm4_moe", num_modules=3), None),
    heavy(partial(mtp, "deepseek_v3"), "2x2x1"),
]


@pytest.mark.seconds
@pytest.mark.parametrize(("make_files", "tree"), HEADS)
def test_a_window_of_all_drafts_as_without_one_and_a_narrow_one_keeps_greedy_texts(
    make_files: Callable[[Path], tuple[Any, ...]], tree: str | None, tmp_path: Path
) -> None:
    target, origin, width = make_files(tmp_path)
    runner = loaded(target)
    prompts = [tuple(token % runner.vocab_size for token in prompt) for prompt in PROMPTS]
    laws = list[Seen]()
    for way in (None, "all"):
        head, seen = loaded(origin, runner), Seen()
        how: Any = {"width": width, "prompts": prompts, "seen": seen, "tree": tree}
        if way:
            of_window(way, runner, head, origin.layers, **how)
        else:
            head_drafts.decode(runner, head.make_drafter, head, origin.layers, **how)
        laws.append(seen)
    assert len(laws[0]) == len(laws[1]) > 5
    for (text, ids_K, law_TV), (other, other_K, other_TV) in zip(*laws, strict=True):
        assert (text, ids_K.tolist()) == (other, other_K.tolist())
        torch.testing.assert_close(law_TV, other_TV, atol=2e-5, rtol=1e-3)
    decode = partial(
        of_window, "window", runner, loaded(origin, runner), origin.layers, width=width, prompts=prompts, tree=tree
    )
    check_greedy(runner, prompts, decode, [{"batch_size": 1}, {"batch_size": 3}])


def test_of_each_turn_of_a_chat_a_head_reads_no_more_than_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it drafts as behind a text that the target has read whole."""
    monkeypatch.setattr("llama_ssp.speculate.engine.held.LEAST_TOKENS", 1)
    target, origin, width = small_eagle(tmp_path)
    runner, laws = loaded(target), list[dict[tuple[int, ...], Tensor]]()
    for reuses in (True, False):
        head, seen, (kind, config) = loaded(origin, runner), Seen(), windowed("window")
        decoder = make_head_decoder(
            runner, kind, head, origin.layers, width=width, seen=seen, reuses=reuses, draft=config
        )
        assert chat(decoder, head, monkeypatch, turns=TURNS) <= 0
        laws.append({tuple(text): law for text, _, law in seen})
    assert laws[0].keys() == laws[1].keys()
    assert all(law.equal(laws[1][text]) for text, law in laws[0].items())


def test_the_caches_of_a_head_have_the_bytes_that_a_plan_counts() -> None:
    """Of the small cache of the head, and of the taps that it may read."""
    words = "task=generate", "draft=tiny-eagle", "draft.window=64", "draft.sinks=2", "model.dtype=fp32", "batch_size=3"
    config, _ = compose_run(*words, "draft.model.dtype=fp32", "max_new_tokens=20")
    spec = spec_of_run(config, world_size=1, device="cpu", prompt_tokens=200)
    planned = memory(spec, replace(hardware.load("h100"), device="cpu"))[0].draft_cache_bytes
    target, file = (inspect(hub.resolve(catalogue.load(name))) for name in ("tiny", "tiny-eagle"))
    origin, runner = of_heads("sources").source_of(file, target), loaded(target)
    kind, settings = windowed("as planned")
    decoder = make_head_decoder(
        runner, kind, loaded(origin, runner), origin.layers, width=256, num_drafted=4, batch_size=3, draft=settings
    )
    decoder.make_room(requests_of([tuple(range(200))] * 3, 20))
    [own] = find_parts(decoder.round.drafters, StaticCache, seen=set())
    assert decoder.round.taps
    taps_BSX = decoder.round.taps.in_rows()
    held = sum(layer.nbytes for layer in own.in_rows()) + taps_BSX.nbytes
    assert own.num_slots == spec.draft_slots < 200
    assert taps_BSX.shape[1] == spec.tap_slots < 100
    assert held == planned


def says_what_it_sees(folder: Path) -> tuple[Any, ...]:
    return draft_heads.save_small_pair(folder, of_head={"layer_types": ["sliding_attention"], "sliding_window": 6})


@pytest.mark.parametrize(
    ("make_files", "is_refused"),
    [
        (says_what_it_sees, True),
        (small_eagle, False),
        (partial(one_pass, "dflash 2 of its authors"), True),
        (partial(one_pass, "dflash of its authors"), False),
        heavy(partial(mtp, "mimo_v2_flash", num_modules=3), True),
        heavy(partial(mtp, "glm4_moe"), False),
    ],
)
def test_a_head_that_says_itself_what_it_sees_is_one_sentence(
    make_files: Callable[[Path], tuple[Any, ...]], is_refused: bool, tmp_path: Path
) -> None:
    """Before anything is loaded."""
    target, origin, *_ = make_files(tmp_path)
    config, _ = compose_run("task=generate", "draft=tiny-eagle", "draft.window=64", "model=tiny")
    sentence = refusal(lambda: check_values(config, target.shape, origin.shape))
    assert ("draft.window=64 is of drafts that see all of a text, and the files of draft" in sentence) == is_refused


@pytest.mark.heavy
def test_after_rounds_without_drafts_modules_draft_as_from_the_taps_of_all_tokens(tmp_path: Path) -> None:
    """More is missed than a window keeps, and what a module reads depends on all that the one before sees."""
    target, origin, width = mtp("glm4_moe", tmp_path, num_modules=3)
    runner, (kind, config) = loaded(target), windowed("window")
    prompts, laws = [tuple(token % runner.vocab_size for token in prompt) for prompt in PROMPTS], list[Seen]()
    choices = [*[DraftChoice(0)] * 33, DraftChoice(3), DraftChoice(2)]
    for draft in (config, None):
        seen = Seen()
        head_drafts.decode(
            runner,
            kind,
            loaded(origin, runner),
            origin.layers,
            width=width,
            prompts=prompts,
            num_new=60,
            seen=seen,
            choices=choices,
            batch_size=2,
            draft=draft,
        )
        laws.append([each for each in seen if len(each[0]) > 33])
    assert len(laws[0]) == len(laws[1]) > 5
    for (text, _, law_TV), (other, _, other_TV) in zip(*laws, strict=True):
        assert text == other
        assert law_TV.equal(other_TV)
