"""The MTP layer of a target's own checkpoint drafts as its public definition says, and a faulty one is one sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.reading import check_readable, read_config
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.cache import Taps
from llama_ssp.models.huggingface.modules import load_modules
from llama_ssp.models.huggingface.runner import ModuleRunner
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.rooms.heads.drafter import HeadDrafter
from llama_ssp.rooms.heads.library import MtpRunner
from llama_ssp.rooms.heads.records import OF_TARGET
from llama_ssp.rooms.heads.sources import MtpSource, describe_mtp, mtp_of
from llama_ssp.weights.checkpoint import inspect
from tests.helpers import head_drafts
from tests.helpers.edits import edit_config
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.head_drafts import Seen, check, check_greedy
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint, refusal
from tests.helpers.mtp_layers import MTP_LAYOUTS, save_with_mtp
from tests.helpers.recorded import WatchedGraphs

CPU, WIDTH = torch.device("cpu"), 64
FEW_TOKENS = 8
"""A vocabulary of which a random head drafts some tokens that a random target would choose."""
PROMPTS = ((5, 3, 4), (2,), (7, 6, 7, 6, 7))
IDS_BT = torch.tensor([[5, 9, 17, 4, 100, 33, 2, 8, 50]])


def loaded(folder: Path) -> tuple[Runner, Any, MtpSource]:
    """A target and its head on one rank."""
    origin = mtp_of(target := inspect(folder))
    runner = load_model(Loading(target, dtype=torch.float32))
    assert not hasattr(runner, "extend")
    return runner, load_model(Loading(origin, dtype=torch.float32, target=runner)), origin


def decode(target: Runner, head: Any, origin: MtpSource, **how: Any) -> list[Any]:  # noqa: ANN401
    """Texts with a head; see `head_drafts.decode`."""
    return head_drafts.decode(target, HeadDrafter, head, origin.layers, width=WIDTH, prompts=PROMPTS, **how)


LIGHT = ("qwen2", "glm4_moe", "qwen3_next")


@pytest.mark.parametrize("family", [*LIGHT, *(heavy(name) for name in sorted(MTP_LAYOUTS.keys() - {*LIGHT}))])
def test_logits_are_those_of_the_public_definition(family: str, tmp_path: Path) -> None:
    """Of a pair with the target's hidden state, and of the next one, with the layer's own."""
    model, reference = save_with_mtp(tmp_path, family)
    runner, head, origin = loaded(tmp_path)
    check_model(origin, num_ranks=2)
    taps = Taps(origin.layers, width=WIDTH, dtype=torch.float32, device=CPU)
    positions_BT, embedding_VE = torch.arange(8)[None], model.get_input_embeddings().weight
    for each in (runner, head):
        each.allocate(batch_size=1, capacity=64, num_rolled_back=4)
    taps.allocate(batch_size=1, num_slots=64)
    with torch.inference_mode():
        runner.forward(IDS_BT[:, :8], positions_BT, bucket=64, taps=taps)
        states_LE = model.model(IDS_BT[:, :8]).last_hidden_state[0, :7]
        torch.testing.assert_close(taps.read(positions_BT)[0, :7], states_LE, atol=1e-5, rtol=1e-5)
        hidden_BTE = head.hidden_of(taps.read(positions_BT[:, :7]))
        hidden_BTE, first_BRV = head.extend(
            IDS_BT[:, 1:8], hidden_BTE, positions_BT[:, :7], bucket=64, score_positions_B1=torch.tensor([[6]])
        )
        _, second_BRV = head.extend(IDS_BT[:, 8:], hidden_BTE, positions_BT[:, 7:], bucket=64)
    for logits_BRV, number in ((first_BRV, 8), (second_BRV, 9)):
        wanted_V = reference(embedding_VE[IDS_BT[0, 1:number]], states_LE)
        torch.testing.assert_close(logits_BRV[0, 0], wanted_V, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen2", "2x2x1"), heavy("qwen3_next", None), slow("qwen2", None), slow("glm4_moe", "2x2x1")],
)
def test_every_step_of_every_round_has_the_distribution_of_the_reference(
    family: str, shape: str | None, tmp_path: Path
) -> None:
    model, reference = save_with_mtp(tmp_path, family, vocab_size=FEW_TOKENS)
    target, head, origin = loaded(tmp_path)
    seen, table_VE = Seen(), model.get_input_embeddings().weight.detach()
    decode(target, head, origin, seen=seen, batch_size=2, tree=shape)

    def wanted(text: list[int], states_LE: Tensor, drafted: list[int]) -> Tensor:
        return reference(table_VE[[*text[1:], *drafted]], states_LE).detach().double()

    assert check(seen, model, origin.layers, shape, wanted) > 24


IN_BLOCKS = {"linear_num_value_heads": 32, "linear_value_head_dim": 4}
"""Sizes of which all products are our own, which can be recorded; experts of a CPU wait for it."""


@pytest.mark.parametrize(
    ("family", "recorder", "numbers"),
    [
        ("qwen2", WatchedGraphs, (1, 2, 3, 4)), ("qwen3_5_text", WatchedGraphs, (3,)),
        slow("qwen3_5_text", WatchedGraphs, (1, 2, 4)), slow("glm4_moe", False, (1, 2, 3, 4)),
        slow("deepseek_v3", False, (1, 2, 3, 4)),
    ],
)  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(
    family: str, recorder: Any, numbers: tuple[int, ...], tmp_path: Path  # noqa: ANN401
) -> None:  # fmt: skip
    """For each K, batches of one and of three, launched and recorded."""
    save_with_mtp(tmp_path, family, vocab_size=32, **IN_BLOCKS if family == "qwen3_5_text" else {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][FEW_TOKENS:] *= 0.01  # so that a random head drafts tokens of a random target
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target, head, origin = loaded(tmp_path)
    ways = [{"num_drafted": number, "batch_size": size, "replay": replay}
            for number in numbers for size, replay in ((1, False), (3, recorder))]  # fmt: skip
    assert check_greedy(target, PROMPTS, partial(decode, target, head, origin), ways, num_new=12) > len(numbers)


@pytest.mark.parametrize("family", ["glm4_moe", heavy("qwen2"), heavy("qwen3_next")])
def test_two_ranks_compute_what_one_does_with_the_target_s_tables(family: str, tmp_path: Path) -> None:
    save_with_mtp(tmp_path, family)
    _, whole, origin = loaded(tmp_path)
    comms = thread_comms(2)

    def extended(head: Any) -> Tensor:  # noqa: ANN401
        head.allocate(batch_size=1, capacity=64)
        with torch.inference_mode():
            hidden_BTE = torch.linspace(-1, 1, 8 * WIDTH).view(1, 8, WIDTH)
            return head.extend(IDS_BT[:, 1:], hidden_BTE, torch.arange(8)[None], bucket=64)[1]  # type: ignore[no-any-return]

    parts: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    if family == "qwen2":
        heads: list[Any] = [load_model(Loading(origin, comm=comm, **parts)) for comm in comms]
    else:
        modules = [load_modules(Loading(origin.target, comm=comm, **parts)) for comm in comms]
        targets = on_ranks(comms, lambda comm: ModuleRunner(modules[comm.rank], comm=comm))
        own = [load_modules(Loading(origin, comm=comm, **parts), tables=targets[comm.rank].tables) for comm in comms]
        heads = on_ranks(comms, lambda comm: MtpRunner(own[comm.rank], comm=comm))
        assert heads[1].tables[0] is targets[1].tables[0]
    found = on_ranks(comms, lambda comm: extended(heads[comm.rank]))
    assert found[0].equal(found[1])
    torch.testing.assert_close(found[0], extended(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*LIGHT, heavy("deepseek_v3")])
def test_a_plan_counts_the_layer_by_config_json_alone(family: str, tmp_path: Path) -> None:
    save_with_mtp(tmp_path, family)
    origin = mtp_of(inspect(tmp_path))
    check_readable(tmp_path, "none", of=OF_TARGET)
    (tmp_path / "model.safetensors").unlink()
    shape, _ = read_config(tmp_path, of=OF_TARGET)
    assert shape.is_head
    stored = sum(torch.Size(facts.shape).numel() for facts in origin.tensors.values())
    assert inventory(shape).num_parameters == stored
    assert inventory(replace(shape, modules=None)).num_layers == 1


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if name not in key}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return remove


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("mtp_layers"), "lacks the MTP layer that its config.json calls for"),
        (without("mtp_layers.0.mlp.up_proj"), "lacks 1 of the 18 tensors that its config.json calls for"),
        (lambda folder: edit_config(folder, num_nextn_predict_layers=0), "has none: give an EAGLE-3 head"),
        (lambda folder: edit_config(folder, intermediate_size=128), r"q?up_proj.weight is \[160, 64\], not \[128"),
    ],
)
def test_a_target_without_its_mtp_layer_is_one_sentence(
    change: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path, "qwen2")
    change(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=sentence):
        check_model(mtp_of(inspect(tmp_path)), num_ranks=1)


def test_other_families_are_one_sentence(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, "ernie4_5", num_nextn_predict_layers=1)
    said = "reads the MTP layers of deepseek_v3, glm4_moe, .* models, and .* is a ernie4_5 model: give"
    with pytest.raises(ConfigError, match=said):
        mtp_of(inspect(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ernie4_5"
    assert "is a ernie4_5 model" in refusal(lambda: check_readable(tmp_path, "none", of=OF_TARGET))


def test_a_family_whose_config_names_no_mtp_layers_is_not_said_to_have_none(tmp_path: Path) -> None:
    """The files of MiMo-V2-Flash hold model.mtp.*, which its config.json does not say."""
    (tmp_path / "config.json").write_text('{"model_type": "mimo_v2_flash"}')
    for read in (partial(check_readable, quantization="none", of=OF_TARGET), describe_mtp):
        assert f"models, and {tmp_path} is a mimo_v2_flash model: give" in refusal(partial(read, tmp_path))
