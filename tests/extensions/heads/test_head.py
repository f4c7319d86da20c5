"""A draft head drafts by its own distribution at every step of every round, and a faulty one is one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from llama_ssp import catalogue
from llama_ssp.architectures.reading import read_config
from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.heads.drafter import HeadDrafter
from llama_ssp.extensions.heads.runner import HeadRunner
from llama_ssp.extensions.heads.sources import HeadSource, source_of
from llama_ssp.extensions.modules.building import layers_of
from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import head_drafts
from tests.helpers.decoders import outcome
from tests.helpers.draft_heads import make_tensors, reference, save_original, save_speculator
from tests.helpers.head_drafts import Seen, check
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint

LAYERS = (2, 5, 7)
PROMPTS = ((5, 900, 17, 4, 256), (31,), tuple(range(40, 70)))
Save = Callable[[Path, dict[str, Tensor]], Path]


def original(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The layout of the authors."""
    return save_original(folder, tensors)


def speculator(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The other layout, with what only some heads do, and an embedding of its own."""
    embedding = torch.randn(4096, 256, generator=torch.Generator().manual_seed(3)) / 8
    return save_speculator(
        folder,
        tensors,
        embedding,
        norm_before_residual=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
    )


@pytest.fixture(scope="module")
def target() -> Runner:
    found = load_model(Loading(tiny(), dtype=torch.float32))
    assert not isinstance(found, HeadRunner)
    return found


@pytest.fixture(scope="module")
def library() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny().folder, dtype="float32")


def tiny() -> Any:
    return inspect(hub.resolve(catalogue.load("tiny")))


def source(folder: Path) -> HeadSource:
    """The head in a folder, for `tiny`."""
    found = source_of(inspect(folder), tiny())
    assert isinstance(found, HeadSource)
    return found


def decode(target: Runner, origin: HeadSource, **how: Any) -> list[Any]:
    """Texts with a head; see `head_drafts.decode`."""
    head = load_model(Loading(origin, dtype=torch.float32))
    assert isinstance(head, HeadRunner)
    return head_drafts.decode(target, HeadDrafter, head, origin.layers, width=256, **{"prompts": PROMPTS} | how)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("save", "shape"), [heavy(original, "2x2x1"), (speculator, None), slow(original, None), slow(speculator, "2x2x1")]
)
def test_every_step_of_every_round_has_the_distribution_of_the_reference(
    save: Save,
    shape: str | None,
    target: Runner,
    library: Any,
    tmp_path: Path,
) -> None:
    tensors, seen = make_tensors(), Seen()
    folder = save(tmp_path / "head", tensors)
    done = decode(target, source(folder), batch_size=2, seen=seen, tree=shape)
    assert all(len(each.token_ids) == 12 for each in done)
    stored = load_file(folder / "model.safetensors")
    embedding = stored.get("embed_tokens.weight", library.get_input_embeddings().weight.detach())
    flags = {"norm_before_residual": True, "norm_output": True} if save is speculator else {}
    assert check(seen, library, LAYERS, shape, referring(tensors, embedding, **flags)) > 50


@pytest.mark.seconds
def test_a_head_reads_what_it_has_missed_in_rounds_that_did_not_draft(
    target: Runner,
    library: Any,
    tmp_path: Path,
) -> None:
    tensors, seen, choices = make_tensors(), Seen(), [*[DraftChoice(0)] * 33, DraftChoice(3), DraftChoice(2)]
    origin = source(original(tmp_path / "head", tensors))
    decode(target, origin, batch_size=3, seen=seen, num_new=80, choices=choices)
    wanted = referring(tensors, library.get_input_embeddings().weight.detach())
    assert check(seen, library, LAYERS, None, wanted) > 10


@pytest.mark.seconds
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(4100, 1024), (4090, 1022), heavy(4100, 4100), (4090, 4090)])
def test_a_vocabulary_that_is_padded_otherwise_than_the_target_s_is_one(
    vocab_size: int,
    num_drafted: int,
    target: Runner,
    library: Any,
    tmp_path: Path,
) -> None:
    """The head's own embedding has more rows or fewer; of more tokens the last ones are drafted never."""
    tensors, seen = make_tensors(vocab_size=vocab_size, num_drafted=num_drafted), Seen()
    embedding_VE = torch.randn(vocab_size, 256, generator=torch.Generator().manual_seed(3)) / 8
    prompts = [tuple(min(token, 4089) for token in prompt) for prompt in PROMPTS]
    decode(target, source(save_speculator(tmp_path / "head", tensors, embedding_VE)), seen=seen, prompts=prompts)
    padded_VE = functional.pad(embedding_VE, (0, 0, 0, 6))

    def wanted(text: list[int], taps_LX: Tensor, drafted: list[int]) -> Tensor:
        logits_V = referring(tensors, padded_VE)(text, taps_LX, drafted)[:4096]
        return functional.pad(logits_V, (0, 4096 - len(logits_V)), value=float("-inf"))

    assert check(seen, library, LAYERS, None, wanted) > 20


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_next"])
def test_a_tap_of_the_last_output_is_taken_before_the_final_norm(family: str, tmp_path: Path) -> None:
    model: Any = build_checkpoint(tmp_path, family)
    layers, kept = layers_of(model)[1], list[Tensor]()
    layers[-1].register_forward_hook(lambda _module, _args, out: kept.append(out[0] if isinstance(out, tuple) else out))
    runner, ids_BT = load_model(Loading(inspect(tmp_path), dtype=torch.float32)), torch.tensor([[5, 9, 1, 4]])
    taps = Taps(
        (len(layers), len(layers) + 1), width=model.config.hidden_size, dtype=torch.float32, device=ids_BT.device
    )
    runner.allocate(batch_size=1, capacity=64)
    taps.allocate(batch_size=1, num_slots=64)
    with torch.inference_mode():
        normed_TE = model(ids_BT, output_hidden_states=True).hidden_states[-1][0]
        runner.forward(ids_BT, torch.arange(4)[None], bucket=64, taps=taps)
    for found_TE, wanted_TE in zip(
        taps.read(torch.arange(4)[None])[0].chunk(2, -1), (normed_TE, kept[0][0]), strict=True
    ):
        torch.testing.assert_close(found_TE, wanted_TE, atol=1e-5, rtol=1e-4)


def test_the_last_output_is_one_of_the_taps_of_a_head(tmp_path: Path) -> None:
    named = {"eagle_aux_hidden_state_layer_ids": [2, 5, 10]}
    origin = source(save_original(tmp_path / "head", make_tensors(), **named))
    assert origin.layers == (2, 5, 11)
    check_model(origin, num_ranks=2)


def referring(tensors: dict[str, Tensor], embedding_VE: Tensor, **flags: Any) -> Callable[..., Tensor]:
    return lambda text, taps_LX, drafted: reference(tensors, embedding_VE[[*text[1:], *drafted]], taps_LX, **flags)


@pytest.mark.seconds
def test_text_is_the_same_whether_rounds_are_replayed_or_rows_are_decoded_together(
    target: Runner, tmp_path: Path
) -> None:
    origin = source(original(tmp_path / "head", make_tensors()))
    alone, together = (decode(target, origin, batch_size=size) for size in (1, 3))
    assert outcome(alone) == outcome(together)


@pytest.mark.seconds
@pytest.mark.parametrize("shape", [None, "2x2x1"])
def test_a_head_drafts_the_same_behind_a_beginning_that_the_target_has_not_read_again(
    shape: str | None, target: Runner, tmp_path: Path
) -> None:
    origin = source(original(tmp_path / "head", make_tensors()))
    header = tuple(range(40, 80))
    prompts = [header, (*header, 5, 6), (7, 8), (*header, 5, 9), header, (*header, 3)]

    def drafts(*, reuses: bool) -> tuple[dict[tuple[int, ...], Tensor], int]:
        """The probabilities of drafts, by the text before them, and how many tokens were reused."""
        seen = Seen()
        done = decode(target, origin, batch_size=2, seen=seen, tree=shape, prompts=prompts, reuses=reuses)
        return {tuple(text): law for text, _, law in seen}, sum(each.num_reused_tokens for each in done)

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


def changed(**values: Any) -> dict[str, Tensor]:
    """A head's tensors of some sizes, some of them replaced or left out."""
    sizes = {name: values.pop(name) for name in ("vocab_size", "num_drafted") if name in values}
    return {name: value for name, value in (make_tensors(**sizes) | values).items() if value is not None}


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another target": (
        {"vocab_size": 5000, "num_drafted": 1000},
        {},
        "of a target of width 256 with 5000 tokens, and this target has width 256 and 4096 tokens",
    ),
    "a map out of the vocabulary": ({"d2t": torch.full((1024,), 4090)}, {}, "d2t leads to token 5113 of 4096"),
    "a map to one token twice": ({"d2t": -torch.arange(1024)}, {}, "d2t leads twice to one token"),
    "two maps that differ": ({"d2t": torch.zeros(1024, dtype=torch.int64)}, {}, "d2t contradicts t2d"),
    "no map": ({"d2t": None}, {}, "drafts 1024 of 4096 tokens and lacks d2t"),
    "a layer that the target lacks": (
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 5, 11]},
        r"reads the layers \[1, 5, 11\], and this target has 10",
    ),
    "another speculator": (
        {},
        {"speculators_model_type": "mlp"},
        "MLP speculator, and of draft heads those of EAGLE-3, P-EAGLE, DFlash and DSpark are read",
    ),
    "a speculator of no head": ({}, {"speculators_model_type": "mtp"}, "describes a speculator of type mtp, and of"),
    "a layer too few": ({}, {"num_hidden_layers": 2}, "lacks 9 of the 23 tensors"),
    "pickle": ({}, {}, "holds pickle weights .*safetensors.torch as s; s.save_file"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_head_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    tensors, config, message = FAULTS[name]
    save = save_speculator if "speculators_model_type" in config else save_original
    folder = save(tmp_path / "head", changed(**tensors), **config)
    if name == "pickle":
        (folder / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(CheckpointError, match=message):
        check_model(source(folder), num_ranks=1)


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


def test_a_layer_that_is_tapped_twice_is_kept_twice() -> None:
    """As EAGLE-3's default taps of a target with six layers are: 2, 3 and 3."""
    taps = Taps((2, 3, 3), width=2, dtype=torch.float32, device=torch.device("cpu"))
    taps.allocate(batch_size=1, num_slots=4)
    for layer in (2, 3):
        taps.write(layer, torch.full((1, 2), float(layer)), torch.tensor([1]))
    assert taps.read(torch.tensor([[1]])).flatten().tolist() == [2, 2, 3, 3, 3, 3]
