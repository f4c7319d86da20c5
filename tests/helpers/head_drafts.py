"""Texts that a draft head drafts, and the comparison of its distributions with a reference's.

Shapes: T nodes, X taps, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import Runner
from llama_ssp.registry import imported
from llama_ssp.settings.drafters import cache_of
from llama_ssp.settings.schema import DrafterConfig
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.trees import Tree
from tests.helpers.decoders import (
    ScriptedLength,
    change_runs,
    complete,
    ids_of,
    make_decoder,
    parts_of,
    requests_of,
    tree_of,
)

TEMPERATURE, NUM_DRAFTED = 0.8, 3
Seen = list[tuple[list[int], Tensor, Tensor]]
"""Texts, and what was drafted behind them: tokens and their law."""


def decode(
    *parts: Any,
    prompts: Sequence[tuple[int, ...]],
    num_samples: int = 0,
    num_new: int = 12,
    **how: Any,
) -> list[RowCompletion]:
    """Decode with a head; for the arguments see `make_head_decoder`.

    With `num_samples` the first prompt alone is continued, so many times.
    """
    decoder = make_head_decoder(*parts, **how)
    first: Any = {"index": 0, "prompt_ids": prompts[0], "max_new_tokens": num_new}
    samples = [Request(sample=sample, **first) for sample in range(num_samples)]
    return complete(decoder, samples or requests_of(prompts, num_new))


def make_head_decoder(  # noqa: PLR0913
    target: Runner,
    kind: Callable[[DrafterParts], Drafter],
    head: Any,
    layers: Sequence[int],
    *,
    width: int,
    tree: Tree | str | None = None,
    seen: Seen | None = None,
    choices: Sequence[DraftChoice] = (),
    reuses: bool = True,
    num_drafted: int = NUM_DRAFTED,
    draft: DrafterConfig | None = None,
    **how: Any,
) -> Decoder:
    """A decoder with a head and its drafter, which reads taps of these layers; `seen` takes its drafts by rounds.

    Taps are those that settings `draft` let it see, or all.
    """
    kept, shape = draft and cache_of(draft), tree_of(tree)
    make_taps: Callable[..., Taps] = Taps
    if kept:
        most, num_seen = shape.num_drafted if shape else num_drafted, kept.num_kept(draft)
        make_taps = partial(imported(kept.taps, setting="draft"), draft=draft, num_drafted=most)
        how |= {"num_tapped": num_seen and num_seen + most + 1}
    taps = make_taps(layers, width=width, dtype=torch.float32, device=torch.device("cpu"))

    def make_drafter(rule: Any) -> Any:
        sizes: Any = {"num_draft_tokens": num_drafted, "tree": tree, "vocab_size": target.vocab_size}
        drafter: Any = kind(parts_of(head, taps=taps, rule=rule, **sizes))
        propose = drafter.propose

        def watched(rows: Any, **named: Any) -> Any:
            texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
            draft = propose(rows, **named)
            seen.extend(zip(texts, draft.ids_BK.clone(), draft.drawn_law.clone(), strict=True))  # type: ignore[union-attr]
            return draft

        if seen is not None:
            drafter.propose = watched
        return drafter

    given = {"temperature": TEMPERATURE, "replay": seen is None} | how
    decoder = make_decoder(
        target, None, make_drafter=make_drafter, taps=taps, tree=tree, num_draft_tokens=num_drafted, **given
    )
    change_runs(decoder, reuses=reuses)
    if choices:
        decoder.length = ScriptedLength(choices)
    return decoder


def chat(decoder: Decoder, head: Any, monkeypatch: pytest.MonkeyPatch, *, turns: Sequence[tuple[int, ...]]) -> int:
    """Let one decoder answer these turns of a chat, each with what came before; the most pairs of a turn that are read.

    Counted are those beyond a later turn and the answer before it.
    """
    text: tuple[int, ...] = ()
    extra, counted, extend = [0], [0], head.extend

    def counting(ids_BT: Tensor, *tensors: Tensor, **how: Any) -> Any:
        counted[0] += ids_BT.numel() * (how.get("cache_rows_B") is not None)  # as prompts are read
        return extend(ids_BT, *tensors, **how)

    monkeypatch.setattr(head, "extend", counting)
    before = len(turns[0])
    for turn in turns:
        counted[0] = 0
        [done] = complete(decoder, requests_of([(*text, *turn)], 12))
        extra.append(counted[0] - before - len(turn))
        text, before = (*done.request.prompt_ids, *done.token_ids), len(done.token_ids)
    return max(extra)


def check_greedy(
    target: Runner,
    prompts: Sequence[tuple[int, ...]],
    decode: Callable[..., list[RowCompletion]],
    ways: Sequence[dict[str, Any]],
    *,
    num_new: int = 24,
) -> int:
    """Compare the greedy texts of ways to decode with those without a draft; returns the accepted tokens."""
    plain, number = ids_of(complete(make_decoder(target, None), requests_of(prompts, num_new))), 0
    for how in ways:
        done = decode(temperature=0.0, num_new=num_new, **how)
        assert ids_of(done) == plain
        number += sum(sum(each.accepted_lengths) for each in done)
    return number


def check(
    seen: Seen,
    library: Any,
    layers: Sequence[int],
    tree: Tree | str | None,
    logits_of: Callable[[list[int], Tensor, list[int]], Tensor],
    *,
    temperature: float = TEMPERATURE,
) -> int:
    """Compare all laws with the logits of a reference, from texts, taps and drafted tokens; returns how many."""
    number, tree = 0, tree_of(tree)
    for text, ids_K, law_TV in seen:
        if text == [0, 0]:  # a vacant row
            continue
        with torch.inference_mode():
            states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps_LX = torch.cat([states[layer][0, : len(text) - 1] for layer in layers], dim=-1)
        for step in range(tree.num_parents if tree else len(ids_K)):
            path = [
                node - 1 for node in range(1, step + 1) if tree is None or tree.topology.ancestors_BTT[0][step, node]
            ]
            wanted_V = (logits_of(text, taps_LX, ids_K[path].tolist()) / temperature).softmax(-1)
            torch.testing.assert_close(law_TV[step].double(), wanted_V, atol=2e-5, rtol=1e-3)
            number += 1
    return number
