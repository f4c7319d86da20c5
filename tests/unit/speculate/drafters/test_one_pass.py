"""Heads of one pass draft as their public definitions say, whatever was accepted before, and faults are sentences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.one_pass import OnePassDrafter
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.head import HeadSource
from tests.helpers.decoders import ScriptedLength, make_decoder
from tests.helpers.one_pass_heads import CONFIGS, WIDTH, reference, save_pair

CPU, TEMPERATURE, NUM_DRAFTED = torch.device("cpu"), 0.8, 3
PROMPTS = ((5, 100, 17, 4, 56), (31,), tuple(range(40, 70)))


def load(origin: Any, target: Runner | None = None) -> Any:  # noqa: ANN401 - a model or a head
    return load_model(origin, dtype=torch.float32, device=CPU, comm=Comm.single(), target=target)


def decode(target: Runner, origin: HeadSource, **how: Any) -> list[Any]:  # noqa: ANN401
    """Texts with a head; `watch` sees the texts of a round, and their drafts."""
    watch, tree, num_new = how.pop("watch", None), how.get("tree"), how.pop("num_new", 12)
    choices = how.pop("choices", ())
    head, taps = load(origin, target), Taps(origin.layers, width=WIDTH, dtype=torch.float32, device=CPU)

    def make(rule: Any) -> OnePassDrafter:  # noqa: ANN401 - any rule
        drafter = OnePassDrafter(head, taps, rule=rule, first_row=lambda _rows: 0, tree=tree,
                                 num_draft_tokens=tree.num_drafted if tree else NUM_DRAFTED)  # fmt: skip
        propose = drafter.propose

        def watched(rows: Any, **named: Any) -> Any:  # noqa: ANN401
            texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
            watch(texts, draft := propose(rows, **named))
            return draft

        if watch:
            drafter.propose = watched  # type: ignore[method-assign]
        return drafter

    given = {"temperature": TEMPERATURE, "replay": watch is None} | how
    decoder = make_decoder(target, None, make_drafter=make, taps=taps, num_draft_tokens=NUM_DRAFTED, **given)
    if choices:
        decoder.length = ScriptedLength(choices)
    requests = [Request(index=index, prompt_ids=ids, max_new_tokens=num_new) for index, ids in enumerate(PROMPTS)]
    done: dict[int, Any] = {}
    with torch.inference_mode():
        for updates in decoder.run(requests, to_length=True):
            done |= {update.completion.request.index: update.completion for update in updates}
    return [done[index] for index in range(len(PROMPTS))]


def check(folder: Path, layout: str, **how: Any) -> int:  # noqa: ANN401
    """Compare the distributions of all drafts with the reference; returns how many there were."""
    target, origin = save_pair(folder, layout)
    library: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32")
    tensors, tree, number = load_file(folder / "head" / "model.safetensors"), how.get("tree"), 0
    seen: list[tuple[list[int], Tensor, Tensor]] = []

    def watch(texts: list[list[int]], draft: Any) -> None:  # noqa: ANN401
        seen.extend(zip(texts, draft.ids_BK.clone(), draft.probs_BTV.clone(), strict=True))

    decode(load(target), origin, watch=watch, batch_size=2, **how)
    table, output = (part.weight.detach() for part in (library.get_input_embeddings(), library.get_output_embeddings()))
    for text, ids_K, probs_TV in seen:
        if text == [0, 0]:  # a vacant row
            continue
        with torch.inference_mode():
            states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps_CX = torch.cat([states[layer][0, : len(text) - 1] for layer in origin.layers], dim=-1)
        for step in range(tree.num_parents if tree else len(ids_K)):
            path = [
                node - 1 for node in range(1, step + 1) if tree is None or tree.topology.ancestors_BTT[0][step, node]
            ]
            logits_V = reference(layout, tensors, text, taps_CX, ids_K[path].tolist(), table_VE=table,
                                 output_VE=output, num_drafted=tree.depth if tree else NUM_DRAFTED)  # fmt: skip
            wanted_V = (logits_V / TEMPERATURE).softmax(-1)
            torch.testing.assert_close(probs_TV[step].double(), wanted_V, atol=2e-5, rtol=1e-3)
            number += 1
    return number


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_position_of_every_round_has_the_distribution_of_the_reference(layout: str, tmp_path: Path) -> None:
    assert check(tmp_path, layout) > 50
