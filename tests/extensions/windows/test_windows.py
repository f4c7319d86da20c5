"""A draft model that sees a window: its law at every step of every round, its texts, its bytes, and what is refused.

Shapes: K drafted tokens, V vocabulary, C tokens that a draft has kept, N key-value heads, D head dim.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from llama_ssp.architectures.engine import CATCH_UP_CHUNK
from llama_ssp.extensions.windows.drafter import WindowDrafter
from llama_ssp.extensions.windows.records import WindowConfig
from llama_ssp.machines import hardware
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.graph_inputs import find_parts
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.planning.memory import memory
from llama_ssp.planning.timing import CostModel
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from tests.helpers.composed import check_refused
from tests.helpers.decoders import (
    ScriptedLength,
    complete,
    ids_of,
    make_decoder,
    outcome,
    parts_of,
    requests_of,
    tree_of,
)
from tests.helpers.lanes import heavy, pairs
from tests.helpers.models import SIZES, build_checkpoint, load_lean
from tests.helpers.planning import make_spec
from tests.helpers.recorded import FakeRecorder

NUM_DRAFTED, NUM_LAYERS = 3, 4
PROMPTS = ((5, 90, 17, 4, 25), (31,), tuple(range(40, 70)))
WAYS = {"window": (8, 2), "no first tokens": (6, 0), "nearly all": (40, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    build_checkpoint(folder, "llama", num_hidden_layers=NUM_LAYERS, num_key_value_heads=4)
    return folder


@pytest.fixture(scope="module")
def runners(folder: Path) -> tuple[LeanRunner, LeanRunner]:
    """A target, and as its draft the same model with a cache of its own."""
    target, draft = (load_lean(folder, dtype=torch.float32) for _ in range(2))
    return target, draft


def decoder_of(
    runners: tuple[LeanRunner, LeanRunner],
    name: str | None,
    *,
    tree: str | None = None,
    watch: Any = None,
    choices: Sequence[DraftChoice] = (),
    **how: Any,
) -> Decoder:
    target, draft = runners
    shape = tree_of(tree)
    num_drafted = shape.num_drafted if shape else NUM_DRAFTED
    window, sinks = WAYS[name or "window"]

    def make_drafter(rule: Any) -> Any:
        config = WindowConfig(window=window, sinks=sinks)
        sizes: Any = {"num_draft_tokens": num_drafted, "vocab_size": target.vocab_size, "tree": tree}
        drafter = WindowDrafter(parts_of(draft, config=config, rule=rule, **sizes))
        if watch:
            watch(drafter)
        return drafter

    given = {"temperature": 0.8, "batch_size": 2, "replay": False} | how
    decoder = make_decoder(
        target, None, make_drafter=make_drafter if name else None, tree=tree, num_draft_tokens=num_drafted, **given
    )
    if choices:
        decoder.length = ScriptedLength(choices)
    return decoder


def decode(*given: Any, num_new: int = 24, **how: Any) -> list[RowCompletion]:
    return complete(decoder_of(*given, **how), requests_of(PROMPTS, num_new))


@pytest.mark.seconds
@pairs(
    name=[*WAYS],
    rule_name=["speculative", "coupled"],
    tree=[None, "2x2x1"],
    replay=[True, FakeRecorder()],
    where=lambda rule_name, tree, **_: tree is None or rule_name == "speculative",
)
def test_greedy_and_coupled_texts_are_those_of_plain_decoding(
    name: str,
    rule_name: str,
    tree: str | None,
    replay: Any,
    runners: tuple[LeanRunner, LeanRunner],
) -> None:
    how: dict[str, Any] = {"temperature": 0.9 if rule_name == "coupled" else 0.0, "rule_name": rule_name}
    found = decode(runners, name, tree=tree, replay=replay, **how)
    assert ids_of(found) == ids_of(decode(runners, None, **how))


@pytest.mark.parametrize("tree", [None, "2x2x1"])
def test_a_text_is_the_same_alone_and_behind_rows_that_have_ended(
    tree: str | None, runners: tuple[LeanRunner, LeanRunner]
) -> None:
    wanted = [replace(each, max_new_tokens=8 + 10 * each.index) for each in requests_of(PROMPTS, 1)]
    ways: list[dict[str, Any]] = [{"batch_size": 1}, {"batch_size": 4}, {"batch_size": 4, "replay": True}]
    alone, *together = (outcome(complete(decoder_of(runners, "window", tree=tree, **how), wanted)) for how in ways)
    assert together == [alone] * 2


class Reference:
    """A row of a draft as transformers' model computes it, with a cache from which tokens are taken out."""

    def __init__(self, library: Any, *, window: int, sinks: int) -> None:
        self._library, self._window, self._sinks = library, window, sinks
        self._cache, self._positions = DynamicCache(), list[int]()

    def begin(self, prompt: list[int]) -> None:
        skipped = max(len(prompt) - self._window - self._sinks, 0)
        places = [place + skipped * (place >= self._sinks) for place in range(len(prompt) - skipped)]
        self._forward([prompt[place] for place in places], places)

    def read(self, text: list[int], start: int) -> Tensor:
        """The logits after a text, of which tokens are read from `start` on: the cache is cut to what is seen."""
        kept = [place for place, position in enumerate(self._positions) if position < start]
        if len(kept) > self._window + self._sinks:
            kept = kept[: self._sinks] + kept[-self._window :]
        for layer in map(cast_any, self._cache.layers):
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        self._positions = [self._positions[place] for place in kept]
        return self._forward(text[start:], [*range(start, len(text))])

    def after(self, text: list[int], drafted: list[int], *, keeps: bool = False) -> Tensor:
        """The logits after drafted tokens, which it forgets unless it `keeps` them."""
        before = deepcopy((self._cache, self._positions))
        found = self._forward(drafted, [*range(len(text), len(text) + len(drafted))])
        if not keeps:
            self._cache, self._positions = before
        return found

    @torch.inference_mode()
    def _forward(self, ids: list[int], positions: list[int]) -> Tensor:
        number, num_kept = len(ids), len(self._positions)
        mask = torch.cat([torch.ones(number, num_kept), torch.ones(number, number).tril()], 1).log()[None, None]
        found = self._library(
            torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            past_key_values=self._cache,
            attention_mask=mask,
        )
        self._positions += positions
        logits_V: Tensor = found.logits[0, -1].double()
        return logits_V


def cast_any(value: object) -> Any:
    return value


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "tree", "pauses"),
    [
        ("window", None, 0),
        ("window", None, 2),
        ("no first tokens", "2x2x1", 0),
        heavy("nearly all", None, 70),
        heavy("window", "2x2x1", 0),
        heavy("no first tokens", None, 70),
    ],
)
def test_every_draft_has_the_law_of_a_model_that_sees_the_window(
    name: str, tree: str | None, pauses: int, runners: tuple[LeanRunner, LeanRunner], folder: Path
) -> None:
    """After rounds of any outcome and rounds without drafts, in rows shorter and longer than the window."""
    library: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    window, sinks = WAYS[name]
    seen, shape, number = list[tuple[list[int], int, Any]](), tree_of(tree), 0

    def watch(drafter: Any) -> None:
        propose = drafter.propose

        def watched(rows: Any, **named: Any) -> Any:
            text = rows.tokens_BS[0, : rows.lengths_B[0]].tolist()
            found = propose(rows, **named)
            seen.append((text, named["num_unread"], (found.ids_BK[0].tolist(), found.drawn_law[0].clone())))
            return found

        drafter.propose = watched

    choices = [*[DraftChoice(0)] * pauses, DraftChoice(NUM_DRAFTED), DraftChoice(2)] if pauses else []
    decoder = decoder_of(runners, name, tree=tree, watch=watch, choices=choices, batch_size=1)
    for prompt in PROMPTS:
        seen.clear()
        complete(decoder, requests_of([prompt], 24 + pauses))
        reference = Reference(library, window=window, sinks=sinks)
        reference.begin([*prompt])
        for text, num_unread, (ids, law_TV) in seen:
            for distance in range(num_unread, 2, -CATCH_UP_CHUNK):
                start = max(len(text) - distance, 0)
                if stop := max(len(text) - distance + CATCH_UP_CHUNK, 0):
                    reference.read(text[:stop], start)
            first_V = reference.read(text, max(len(text) - (shape.depth + 1 if shape else 2), 0))
            for step in range(shape.num_parents if shape else len(ids)):
                path = [
                    node - 1
                    for node in range(1, step + 1)
                    if shape is None or shape.topology.ancestors_BTT[0][step, node]
                ]
                found = [ids[place] for place in path]
                logits_V = reference.after(text, found) if found else first_V
                torch.testing.assert_close(law_TV[step].double(), (logits_V / 0.8).softmax(-1), atol=2e-5, rtol=1e-3)
                number += 1
            if shape is None and len(ids) > 1:  # accepted nodes of a tree are read again
                reference.after(text, ids[:-1], keeps=True)
    assert number > 10


def test_the_draft_that_sees_all_is_accepted_whole(runners: tuple[LeanRunner, LeanRunner]) -> None:
    """After texts longer than what is read at once after pauses, and in rows longer than the window alone would be."""
    done = decode(runners, "nearly all", temperature=0.0, num_new=12)
    assert all(number == NUM_DRAFTED for one in done for number in one.accepted_lengths[:-1])


def test_the_cache_has_the_slots_that_a_plan_counts(runners: tuple[LeanRunner, LeanRunner], folder: Path) -> None:
    runner = load_lean(folder, dtype=torch.float32)
    decoder = decoder_of((runners[0], runner), "window")
    complete(decoder, requests_of([tuple(range(200))], 20))
    [own] = find_parts(decoder.round.drafters, StaticCache, seen=set())
    assert own is runner.cache
    spec = make_spec("7B", draft="7B", num_draft_tokens=NUM_DRAFTED, num_kept=sum(WAYS["window"]))
    assert own.num_slots == spec.draft_slots < 200
    a_token = 2 * NUM_LAYERS * 4 * (SIZES["hidden_size"] // SIZES["num_attention_heads"]) * 4
    assert sum(whole.nbytes for whole in own._wholes if whole is not None) == 2 * spec.draft_slots * a_token


def test_a_plan_prices_the_window_alone() -> None:
    sizes: dict[str, Any] = {"batch_size": 8, "prompt_tokens": 8000, "max_new_tokens": 100, "num_draft_tokens": 3}
    whole, window = (
        CostModel(make_spec("7B", draft="7B", num_kept=kept, **sizes), hardware.load("h100")) for kept in (None, 516)
    )
    assert window.drafting_s(3) < 0.6 * whole.drafting_s(3)
    assert window.draft
    assert whole.draft
    assert window.prefill_s(window.draft) < 0.1 * whole.prefill_s(whole.draft)
    by_plan = [memory(costs.spec, costs.hardware)[0].draft_cache_bytes for costs in (whole, window)]
    assert by_plan[1] / by_plan[0] == window.spec.draft_slots / whole.spec.num_slots


BAD = {
    "draft.window=4": "draft.window=4 is less than K + 1, here 5: give a wider window",
    "draft.window=0 speculation.num_draft_tokens=1": "draft.window=0 must be at least 1 token",
    "draft.window=9 draft.sinks=-1": "draft.sinks=-1 must be at least 0",
    "draft.sinks=3": "draft.sinks has no effect without draft.window",
    "draft.window=4 draft=tiny-eagle": "draft.window=4 is less than K + 1, here 5: give a wider window",
    "draft.window=64 draft=smollm2_135M draft.tokenizer=own": "needs a draft with the target's tokenizer: leave",
    "draft.window=64 model=mixtral_8x7B draft=mixtral_8x7B": "needs a draft whose layers are like Llama's",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_window_that_cannot_be_is_one_sentence(words: str, sentence: str) -> None:
    check_refused(f"task=generate {words}", sentence)
