"""A draft head drafts by its own distribution at every step of every round, and a faulty one is one sentence."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llama_ssp import catalogue
from llama_ssp.architectures.reading import read_config
from llama_ssp.errors import CheckpointError
from llama_ssp.models.cache import Taps
from llama_ssp.models.llama.head import HeadRunner
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.drafters.head import HeadDrafter
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.trees import Tree
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.head import HeadSource, of_target
from tests.helpers.decoders import ScriptedLength, make_decoder
from tests.helpers.draft_heads import make_tensors, reference, save_original, save_speculator
from tests.helpers.lanes import heavy

TEMPERATURE, NUM_DRAFTED = 0.8, 3
LAYERS = (2, 5, 7)
PROMPTS = ((5, 900, 17, 4, 256), (31,), tuple(range(40, 70)))
Save = Callable[[Path, dict[str, Tensor]], Path]


def original(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The layout of the authors."""
    return save_original(folder, tensors)


def speculator(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The other layout, with what only some heads do, and an embedding of its own."""
    embedding = torch.randn(4096, 256, generator=torch.Generator().manual_seed(3)) / 8
    return save_speculator(folder, tensors, embedding, norm_before_residual=True, norm_output=True,
                           eagle_aux_hidden_state_layer_ids=list(LAYERS))  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Runner:
    found = load_model(Loading(tiny(), dtype=torch.float32))
    assert not isinstance(found, HeadRunner)
    return found


@pytest.fixture(scope="module")
def library() -> Any:  # noqa: ANN401 - a model of transformers
    return AutoModelForCausalLM.from_pretrained(tiny().folder, dtype="float32")


def tiny() -> Any:  # noqa: ANN401 - a checkpoint
    return inspect(hub.resolve(catalogue.load("tiny")))


def source(folder: Path) -> HeadSource:
    """The head in a folder, for `tiny`."""
    files = inspect(folder)
    assert files.head
    return of_target(files, files.head, tiny())


def decode(  # noqa: PLR0913
    target: Runner, origin: HeadSource, *, batch_size: int, watch: Callable[..., None], replay: bool,
    tree: Tree | None = None, num_new: int = 12, choices: Sequence[DraftChoice] = (),
    prompts: Sequence[tuple[int, ...]] = PROMPTS, reuses: bool = True,
) -> dict[int, Any]:  # fmt: skip
    """Texts with a head, whose drafts are watched."""
    head = load_model(Loading(origin, dtype=torch.float32))
    assert isinstance(head, HeadRunner)
    taps = Taps(origin.layers, width=256, dtype=torch.float32, device=torch.device("cpu"))

    def make(rule: Any) -> HeadDrafter:  # noqa: ANN401 - any rule
        drafter = HeadDrafter(head, taps, rule=rule, num_draft_tokens=tree.num_drafted if tree else NUM_DRAFTED,
                              first_row=lambda _rows: 0, tree=tree)  # fmt: skip
        propose = drafter.propose

        def watched(rows: Any, **named: Any) -> Any:  # noqa: ANN401
            texts = [ids[:length].tolist() for ids, length in zip(rows.tokens_BS, rows.lengths_B, strict=True)]
            draft = propose(rows, **named)
            watch(texts, draft)
            return draft

        if not replay:
            drafter.propose = watched  # type: ignore[method-assign]
        return drafter

    decoder = make_decoder(target, None, temperature=TEMPERATURE, num_draft_tokens=NUM_DRAFTED, batch_size=batch_size,
                           make_drafter=make, replay=replay, taps=taps, tree=tree)  # fmt: skip
    decoder.reuses = reuses
    if choices:
        decoder.length = ScriptedLength(choices)
    requests = [Request(index=index, prompt_ids=ids, max_new_tokens=num_new) for index, ids in enumerate(prompts)]
    done: dict[int, Any] = {}
    with torch.inference_mode():
        for updates in decoder.run(requests, to_length=True):
            done |= {update.completion.request.index: update.completion for update in updates}
    return done


@pytest.mark.parametrize(
    ("save", "shape"),
    [(original, "2x2x1"), (speculator, None), heavy(original, None), heavy(speculator, "2x2x1")],
)
def test_every_step_of_every_round_has_the_distribution_of_the_reference(
    save: Save, shape: str | None, target: Runner, library: Any, tmp_path: Path  # noqa: ANN401
) -> None:  # fmt: skip
    tensors, tree = make_tensors(), Tree.of(shape, torch.device("cpu")) if shape else None
    folder = save(tmp_path / "head", tensors)
    seen: list[tuple[list[int], Tensor, Tensor]] = []

    def watch(texts: list[list[int]], draft: Any) -> None:  # noqa: ANN401
        seen.extend(zip(texts, draft.ids_BK.clone(), draft.drawn_law.clone(), strict=True))

    done = decode(target, source(folder), batch_size=2, watch=watch, replay=False, tree=tree)
    assert all(len(each.token_ids) == 12 for each in done.values())
    stored = load_file(folder / "model.safetensors")
    embedding: Any = stored.get("embed_tokens.weight", library.get_input_embeddings().weight.detach())
    flags = {"norm_before_residual": True, "norm_output": True} if save is speculator else {}
    assert checked(seen, tensors, embedding, library, tree, **flags) > 50


def test_a_head_reads_what_it_has_missed_in_rounds_that_did_not_draft(
    target: Runner, library: Any, tmp_path: Path  # noqa: ANN401
) -> None:  # fmt: skip
    tensors = make_tensors()
    seen: list[tuple[list[int], Tensor, Tensor]] = []

    def watch(texts: list[list[int]], draft: Any) -> None:  # noqa: ANN401
        seen.extend(zip(texts, draft.ids_BK.clone(), draft.drawn_law.clone(), strict=True))

    choices = [*[DraftChoice(0)] * 33, DraftChoice(3), DraftChoice(2)]
    origin = source(original(tmp_path / "head", tensors))
    decode(target, origin, batch_size=3, watch=watch, replay=False, num_new=80, choices=choices)
    assert checked(seen, tensors, library.get_input_embeddings().weight.detach(), library, None) > 10


def checked(
    seen: list[tuple[list[int], Tensor, Tensor]], tensors: dict[str, Tensor], embedding: Any, library: Any,  # noqa: ANN401
    tree: Tree | None, **flags: bool,
) -> int:  # fmt: skip
    """Compare the distributions of texts and their drafts with the reference; returns how many there were."""
    number = 0
    for text, ids_K, probs_TV in seen:
        if text == [0, 0]:  # a vacant row
            continue
        with torch.inference_mode():
            states = library(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps_LX = torch.cat([states[layer][0, : len(text) - 1] for layer in LAYERS], dim=-1)
        for step in range(tree.num_parents if tree else len(ids_K)):
            path = [
                node - 1 for node in range(1, step + 1) if tree is None or tree.topology.ancestors_BTT[0][step, node]
            ]
            embedded_LE = embedding[[*text[1:], *ids_K[path].tolist()]]
            wanted_V = (reference(tensors, embedded_LE, taps_LX, **flags) / TEMPERATURE).softmax(-1)
            torch.testing.assert_close(probs_TV[step].double(), wanted_V, atol=2e-5, rtol=1e-3)
            number += 1
    return number


def test_text_is_the_same_whether_rounds_are_replayed_or_rows_are_decoded_together(
    target: Runner, tmp_path: Path
) -> None:
    origin = source(original(tmp_path / "head", make_tensors()))
    alone, together = (decode(target, origin, batch_size=size, watch=lambda *_: None, replay=True) for size in (1, 3))
    assert [alone[index].token_ids for index in range(3)] == [together[index].token_ids for index in range(3)]
    assert [alone[index].accepted_lengths for index in range(3)] == [
        together[index].accepted_lengths for index in range(3)
    ]


@pytest.mark.parametrize("shape", [None, "2x2x1"])
def test_a_head_drafts_the_same_behind_a_beginning_that_the_target_has_not_read_again(
    shape: str | None, target: Runner, tmp_path: Path
) -> None:
    origin = source(original(tmp_path / "head", make_tensors()))
    tree = Tree.of(shape, torch.device("cpu")) if shape else None
    header = tuple(range(40, 80))
    prompts = [header, (*header, 5, 6), (7, 8), (*header, 5, 9), header, (*header, 3)]

    def drafts(*, reuses: bool) -> tuple[dict[tuple[int, ...], Tensor], int]:
        """The probabilities of drafts, by the text before them, and how many tokens were reused."""
        found: dict[tuple[int, ...], Tensor] = {}

        def watch(texts: list[list[int]], draft: Any) -> None:  # noqa: ANN401
            found.update((tuple(text), probs) for text, probs in zip(texts, draft.drawn_law.clone(), strict=True))

        done = decode(
            target, origin, batch_size=2, watch=watch, replay=False, tree=tree, prompts=prompts, reuses=reuses
        )
        return found, sum(each.num_reused_tokens for each in done.values())

    (found, number), (wanted, none) = drafts(reuses=True), drafts(reuses=False)
    assert number > 100
    assert none == 0
    assert found.keys() == wanted.keys()
    assert all(found[text].equal(wanted[text]) for text in found)


def test_taps_stay_where_rows_grow() -> None:
    taps = Taps((0,), width=4, dtype=torch.float32, device=torch.device("cpu"))
    taps.allocate(batch_size=2, num_slots=8)
    positions_BT = torch.tensor([[0, 1, 7], [2, 3, 4]])
    taps.write(0, torch.arange(24.0).view(6, 4), taps.slots(positions_BT))
    before = taps.read(positions_BT)
    taps.allocate(batch_size=2, num_slots=24)
    assert taps.read(positions_BT).equal(before)


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    """A head's tensors, some of them replaced or left out."""
    return {name: value for name, value in (make_tensors() | tensors).items() if value is not None}


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another target": (
        lambda folder: save_original(folder, make_tensors(vocab_size=5000, num_drafted=1000)),
        "is the head of a target of width 256 with 5000 tokens, and this target has width 256 and 4096 tokens",
    ),
    "a map out of the vocabulary": (
        lambda folder: save_original(folder, changed(d2t=torch.full((1024,), 4090))),
        "d2t leads to token 5113 of 4096",
    ),
    "a map to one token twice": (
        lambda folder: save_original(folder, changed(d2t=-torch.arange(1024))),
        "d2t leads twice to one token",
    ),
    "two maps that differ": (
        lambda folder: save_original(folder, changed(d2t=torch.zeros(1024, dtype=torch.int64))),
        "d2t contradicts t2d",
    ),
    "no map": (
        lambda folder: save_original(folder, changed(d2t=None)),
        "drafts 1024 of 4096 tokens and lacks d2t",
    ),
    "a layer that the target lacks": (
        lambda folder: save_original(folder, make_tensors(), eagle_aux_hidden_state_layer_ids=[1, 5, 10]),
        r"reads the layers \[1, 5, 10\], and this target has 10",
    ),
    "another speculator": (
        lambda folder: save_speculator(folder, make_tensors(), speculators_model_type="mlp"),
        "describes an MLP speculator, and of draft heads those of EAGLE-3, P-EAGLE, DFlash and DSpark are read",
    ),
    "a layer too few": (
        lambda folder: save_original(folder, make_tensors(), num_hidden_layers=2),
        "lacks 9 of the 23 tensors",
    ),
    "pickle": (
        lambda folder: (save_original(folder, make_tensors()) / "model.safetensors").rename(folder / "model.bin"),
        "holds pickle weights .*safetensors.torch as s; s.save_file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_head_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    make, message = FAULTS[name]
    make(tmp_path / "head")
    with pytest.raises(CheckpointError, match=message):
        check_model(source(tmp_path / "head"), num_ranks=1)


def test_the_layers_of_an_eagle_config_are_those_before_the_tapped_inputs(tmp_path: Path) -> None:
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}
    assert source(save_original(tmp_path / "named", make_tensors(), **named)).layers == LAYERS
    assert source(save_original(tmp_path / "default", make_tensors())).layers == LAYERS


@pytest.mark.parametrize("save", [original, speculator])
def test_plans_read_the_sizes_that_are_loaded(save: Save, tmp_path: Path) -> None:
    folder = save(tmp_path / "head", make_tensors())
    shape, _ = read_config(folder)
    assert shape == inspect(folder).shape
    assert (shape.model_type, shape.vocab_size, shape.target_vocab_size) == ("eagle3", 1024, 4096)
