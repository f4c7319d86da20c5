"""What `reproducible=true` lacks on a GPU is one sentence before anything is loaded, as far as settings say."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from llama_ssp.architectures.reading import read_config
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.eight_bits.linear import _Int8WeightOnly
from llama_ssp.extensions.gpu import one_order
from llama_ssp.kernels.linear import FewRows, PlainLinear
from llama_ssp.kernels.parts import Heads, KeptRows
from llama_ssp.models.quantization.weight_only import WeightOnlyLinear
from llama_ssp.settings.checks import check_plan, check_values
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import RunConfig
from tests.helpers.doors import config_of
from tests.helpers.extensions import need
from tests.helpers.models import build_checkpoint

GREEDY = "sampling=greedy"
REFUSED = {
    "model.dtype=fp32": "16 bits and heads of at most 256 dimensions",
    "model.quantization=nf4 model.dtype=bf16": "model.quantization=nf4 has none",
    "speculation.tree=2x1": "chains on a GPU.* leave speculation.tree out",
    "sampling.temperature=0.7 sampling.top_p=0.9": "draws from all tokens on a GPU",
    "draft=tiny-eagle sampling.temperature=0.7": "a rule without the head's probabilities on a GPU",
    "draft.model.dtype=fp32 sampling.temperature=0.7": "draft.model.dtype=bf16",
    "draft.window=16 sampling.temperature=0.8": "torch's kernels attend to windows there: leave draft.window out",
    "draft=self draft.window=16 sampling.temperature=0.8": "torch's kernels attend to windows there",
}
RIGHT = [
    "model.dtype=bf16 draft.model.dtype=bf16",
    "draft=tiny-eagle sampling=greedy",
    "draft=tiny-eagle verification=coupled",
    "draft=none model.quantization=int4_weight_only",
    "draft.model.dtype=fp32 sampling=greedy",
    "sampling=greedy sampling.top_p=0.9",
    "draft.window=16 sampling=greedy",
    "draft=self draft.window=16 verification=coupled",
    "draft=self draft.layers=1 sampling.temperature=0.8",
    "draft=ngram sampling.temperature=0.8",
]


def config(words: str) -> RunConfig:
    return config_of(["reproducible=true", "device=cuda", "model.dtype=bf16", *words.split()])


def _need(words: str) -> None:
    extensions = {
        "nf4": "bitsandbytes",
        "draft=self": "self_drafts",
        "draft.window": "windows",
        "draft=ngram": "copies",
    }
    for word, extension in extensions.items():
        if word in words:
            need(extension)


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_settings_that_are_in_the_way_on_a_gpu_are_named(words: str, sentence: str) -> None:
    _need(words)
    with pytest.raises(ConfigError, match=f"^reproducible=true needs .*{sentence}"):
        check_values(config(words))


@pytest.mark.parametrize("words", RIGHT)
def test_other_runs_on_a_gpu_are_not_refused(words: str) -> None:
    _need(words)
    check_values(config(words))


def test_rows_with_settings_of_their_own_and_modules_of_transformers_are_refused(tmp_path: Path) -> None:
    by_row = config("draft=none")
    by_row.sampling.by_row = True
    with pytest.raises(ConfigError, match="one setting for all rows on a GPU"):
        check_values(by_row)
    build_checkpoint(tmp_path, "mixtral")
    with pytest.raises(ConfigError, match="mixtral models run on the modules of transformers"):
        check_values(config("draft=none"), read_config(tmp_path)[0])


def packed(few_rows: FewRows | None) -> WeightOnlyLinear:
    operands = torch.ones(6, 4, dtype=torch.int8), torch.ones(6)
    return _Int8WeightOnly(operands, None, few_rows)


def test_a_layer_takes_the_kernel_of_a_few_rows_for_all_rows_or_the_model_does_not_hold() -> None:
    calls = list[int]()

    def product(x_MI: Tensor, *operands: Tensor, residual_MO: Tensor | None = None, **_: object) -> Tensor:
        calls.append(len(x_MI))
        y_MO = x_MI @ operands[0].t().to(x_MI.dtype)
        return y_MO if residual_MO is None else y_MO + residual_MO

    few_rows = Mock(product_of_few_rows=product)
    for weight, make in (
        (torch.ones(6, 4, dtype=torch.bfloat16), PlainLinear),
        (torch.ones(6, 4), lambda *_: packed(few_rows)),
    ):
        equal, number = one_order.OneOrder(product), one_order._ROWS_AT_ONCE
        layer = equal.kernel(make)(weight, None)
        x, residual = torch.ones(number + 3, 4).bfloat16(), torch.arange(number + 3.0).bfloat16()[:, None].repeat(1, 6)
        calls.clear()
        assert torch.equal(layer(x, residual.clone()), residual + 4)
        assert layer(x[:200]).shape == (200, 6)
        assert (calls, equal.holds) == ([number, 3, 200], True)
    for make in (lambda *_: packed(None), PlainLinear):  # a format without a kernel, and numbers in fp32
        equal = one_order.OneOrder(product)
        equal.kernel(make)(torch.ones(6, 4), None)
        assert not equal.holds


def test_a_plan_for_gpus_is_refused_by_the_same_sentence() -> None:
    (composed,) = compose(["reproducible=true", "hardware=h100", "speculation.tree=2x1"], root="plan")
    config: Any = to_run_config(composed)
    with pytest.raises(ConfigError, match="chains on a GPU"):
        check_plan(config)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_operators_hold_on_this_gpu(dtype: torch.dtype) -> None:
    from llama_ssp.extensions.gpu.kernels.linear import product_of_few_rows

    device = torch.device("cuda")
    equal = one_order.find_equal_bits(torch.empty(0, dtype=dtype, device=device))
    assert equal
    for num, num_kv, dim in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (8, 1, 256)):
        how: Any = {"device": device, "dtype": dtype, "has_windows": True, "kept": KeptRows(dtype)}
        assert equal.attention(Heads(num, num_kv, dim, dim**-0.5), **how)
    for num_outputs, num_inputs in ((4096, 4096), (576, 1536), (1000, 1104), (128, 8192)):
        weight_OI, x_MI = (torch.randn(size, num_inputs).to(device, dtype) for size in (num_outputs, 512))
        residual_MO = -product_of_few_rows(x_MI, weight_OI)  # what it leaves of a sum is not rounded away
        rest_MO = product_of_few_rows(x_MI, weight_OI, residual_MO=residual_MO)
        for num_rows in (*range(1, 18), 33, 100):
            found_MO = product_of_few_rows(x_MI[:num_rows], weight_OI, residual_MO=residual_MO[:num_rows])
            assert torch.equal(found_MO, rest_MO[:num_rows]), num_rows
