"""Holds the lean decoder to the library's modules, however rows, ranks and number formats are laid out."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from llama_ssp.kernels.linear import Kernel, PackedLinear, PlainLinear, can_pack
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import is_llama_kind, load_model
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import pairs
from tests.helpers.models import (
    VOCAB_SIZE,
    build_checkpoint,
    library_logits,
    load_lean,
    module_runner,
    tiny_config,
    tiny_model,
)

ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, no groups": ("llama", {"num_key_value_heads": 8}),
    "llama, layers that no plan cuts": ("llama", {"base_model_tp_plan": {}}),
    "llama, dynamic": ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, llama3": (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral, window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2, windows", {}),
    "qwen3, windows": ("qwen3, windows", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
}
# Largest difference, in units of the logits' scale.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.02}


def modules(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, changes = KINDS[kind]
    model = tiny_model(family, **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config._attn_implementation = "sdpa"
    return model


def pair(kind: str, *, batch_size: int, dtype: torch.dtype = torch.float32) -> tuple[LeanRunner, Any]:
    """The lean decoder and the library's modules over the same weights."""
    model = modules(kind, dtype)
    runners = load_lean(model), module_runner(model)
    for runner in runners:
        runner.allocate(batch_size=batch_size, capacity=40)
    return runners


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


class Library:
    """The library's own logits of the texts that rows hold, by its own cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._texts_BT = model, torch.zeros(3, 40, dtype=torch.int64)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        **_bucket: int,
    ) -> Tensor:
        """See `Runner.forward`."""
        rows_B = torch.arange(3) if cache_rows_B is None else cache_rows_B
        self._texts_BT[rows_B[:, None], positions_BT] = ids_BT
        found = []
        for row, positions_T in zip(rows_B, positions_BT, strict=True):
            found.append(library_logits(self._model, self._texts_BT[row, : positions_T[-1] + 1])[positions_T])
        logits_BTV = torch.stack(found)
        if score_positions_BR is None:
            return logits_BTV
        return logits_BTV.gather(1, score_positions_BR[..., None].expand(-1, -1, VOCAB_SIZE))


def ragged_rounds(runner: Runner | Library) -> list[Tensor]:
    """Logits of a prefill, of ragged rows, of rows rolled back, of new rows among old ones, and of what follows."""
    ids_BT = random_ids(3, 16)
    starts_B1 = torch.tensor([[4], [11], [7]])
    back_B1 = torch.tensor([[5], [9], [10]])
    offsets = torch.arange(3)
    some_R = torch.tensor([2, 0])
    return [
        runner.forward(ids_BT[:, :11], torch.arange(11).expand(3, -1), bucket=16),
        runner.forward(ids_BT.gather(1, starts_B1 + offsets), starts_B1 + offsets, bucket=24),
        runner.forward(
            ids_BT.gather(1, back_B1 + offsets) ^ 1, back_B1 + offsets, bucket=16, score_positions_BR=starts_B1 % 3
        ),
        runner.forward(ids_BT[:2, 3:12], torch.arange(9).expand(2, -1), bucket=9, cache_rows_B=some_R),
        runner.forward(ids_BT[:, 12:13], torch.tensor([[9], [12], [9]]), bucket=40),
    ]


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < TOLERANCES[dtype] * wanted.std()


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_library_s_modules(kind: str) -> None:
    lean, library = pair(kind, batch_size=3)
    for found, wanted in zip(ragged_rounds(lean), ragged_rounds(library), strict=True):
        assert_close(found, wanted)


@pairs(kind=["llama", "qwen2", "qwen3"], dtype=[torch.bfloat16, torch.float16])
def test_narrow_formats_come_as_close_as_their_rounding_allows(kind: str, dtype: torch.dtype) -> None:
    lean, library = pair(kind, batch_size=3, dtype=dtype)
    for found, wanted in zip(ragged_rounds(lean), ragged_rounds(library), strict=True):
        assert_close(found, wanted, dtype)


@pairs(
    kernel=[PlainLinear, PackedLinear],
    num_ranks=[1, 2, 3, 4, 8],
    kind=["llama", "llama, biases", "llama, layers that no plan cuts", "qwen2", "qwen3, windows"],
)
def test_every_rank_gets_the_whole_model_s_logits(tmp_path: Path, kind: str, num_ranks: int, kernel: Kernel) -> None:
    """8 heads over 2 or 4 key-value heads: 3 ranks hold uneven heads, 8 ranks hold copies of key-value heads."""
    if kernel is PackedLinear and not can_pack(torch.float32):
        pytest.skip("this build of torch has no packed product")
    family, changes = KINDS[kind]
    library = module_runner(build_checkpoint(tmp_path, family, **changes))
    library.allocate(batch_size=3, capacity=40)
    comms = thread_comms(num_ranks)
    runners = [load_lean(tmp_path, comm=comm, kernel=kernel) for comm in comms]

    def rounds(comm: Comm) -> list[Tensor]:
        runners[comm.rank].allocate(batch_size=3, capacity=40)
        return ragged_rounds(runners[comm.rank])

    wanted = ragged_rounds(library)
    for found in on_ranks(comms, rounds):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


@dataclass
class Summed:
    """Sums as a kernel over the ranks' memories does, of threads."""

    comm: ThreadComm
    num_norms: int = 0

    def takes(self, values: Tensor) -> bool:
        """All of them."""
        return values.nbytes > 0

    def takes_rows(self, part_ME: Tensor) -> bool:
        """Few rows."""
        return len(part_ME) <= 9

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up."""
        return self.comm.do_all_reduce(values)

    def add_norm(self, part_ME: Tensor, x_ME: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Add up, then add and normalize."""
        self.num_norms += 1
        return add_norm(x_ME, self.all_reduce(part_ME), weight_E, eps)


def add_norm(
    x_ME: Tensor, added_ME: Tensor | None, weight_E: Tensor, eps: float, *, ids_M: Tensor | None = None
) -> Tensor:
    """The kernel of a GPU, by torch's operators."""
    if ids_M is not None:
        assert added_ME is not None
        x_ME.copy_(added_ME[ids_M])
    elif added_ME is not None:
        x_ME.add_(added_ME)
    return functional.rms_norm(x_ME, weight_E.shape, weight_E / weight_E.shape[0] ** 0.5, eps)


@pytest.mark.parametrize(
    ("kind", "num_norms", "lacking"), [("llama", 4 + 3 + 4, 2), ("llama", 4 + 3 + 4, 1), ("llama, biases", 0, 2)]
)
def test_a_kernel_that_sums_takes_the_next_norm_with_it(
    tmp_path: Path, kind: str, num_norms: int, lacking: int
) -> None:
    """In each of three forwards of few tokens but at the end of the second, which scores some; biases come between.

    A rank that lacks the kernel of the norm alone sums as the others do: they would wait for each other.
    """
    family, changes = KINDS[kind]
    build_checkpoint(tmp_path, family, **changes)
    comms = thread_comms(2)
    sums = [Summed(comm) for comm in comms]
    groups = [(comm, replace(comm, peers=own)) for comm, own in zip(comms, sums, strict=True)]
    runners = [[load_lean(tmp_path, comm=comm, kernel=PlainLinear) for comm in group] for group in groups]

    def rounds(comm: ThreadComm) -> list[list[Tensor]]:
        for runner in runners[comm.rank]:
            runner._own.add_norm = None if comm.rank == lacking else add_norm
            runner.allocate(batch_size=3, capacity=40)
        return [*map(ragged_rounds, runners[comm.rank])]

    for alone, fused in on_ranks(comms, rounds):
        for one, other in zip(alone, fused, strict=True):
            assert_close(one, other)
            assert lacking < 2 or torch.equal(one, other)
    assert [own.num_norms for own in sums] == [num_norms] * 2


@pytest.mark.parametrize(
    ("family", "changes", "is_lean"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("llama", {"hidden_act": "gelu"}, False),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            False,
        ),
        ("gemma", {}, False),
        ("gpt_neox", {}, False),
        ("granite", {"num_key_value_heads": 4, "logits_scaling": 8.0}, False),
    ],
)
def test_only_models_that_it_computes_get_the_lean_decoder(
    tmp_path: Path, family: str, changes: dict[str, Any], is_lean: bool
) -> None:
    assert is_llama_kind(tiny_config(family, **changes)) is is_lean
    build_checkpoint(tmp_path, family, **changes)
    runner = load_model(Loading(inspect(tmp_path)))
    assert (type(runner) is LeanRunner) is is_lean
