"""On a GPU: replayed rounds give the text of eager ones, formats stay near fp32, and no round waits for the device."""

import pytest
import torch

from benchmarks import gpu_checks
from llama_ssp.config.schema import Dtype

pytestmark = pytest.mark.gpu(1)
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("dtype", [Dtype.fp32, Dtype.fp16, Dtype.bf16])
def test_replayed_rounds_give_the_text_of_eager_ones(dtype: Dtype, batch_size: int, temperature: float) -> None:
    assert not gpu_checks.same_with_graphs(CUDA, dtype=dtype, batch_size=batch_size, temperature=temperature)


def test_speculative_greedy_text_is_the_targets_own() -> None:
    assert not gpu_checks.greedy_text_is_plain_text(CUDA)


@pytest.mark.parametrize("name", gpu_checks.FORMATS)
def test_number_formats_stay_near_fp32(name: str) -> None:
    assert not gpu_checks.far_from_fp32(CUDA, name)


def test_fp32_is_that_of_the_cpu() -> None:
    assert not gpu_checks.far_from_the_cpu(CUDA)


def test_packed_prompts_give_what_padded_ones_give() -> None:
    assert not gpu_checks.packed_unlike_padded(CUDA)


def test_elementwise_parts_are_compiled() -> None:
    assert not gpu_checks.not_compiled(CUDA)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "replayed"])
def test_no_round_waits_for_the_device(cuda_graphs: bool) -> None:
    assert not gpu_checks.waits_in_a_round(CUDA, cuda_graphs=cuda_graphs)
