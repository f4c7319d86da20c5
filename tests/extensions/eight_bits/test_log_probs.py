"""Log-probabilities of weights in int8 are those of the numbers that they stand for."""

import pytest
import torch

from llama_ssp import load
from llama_ssp.extensions.eight_bits.linear import _to_bytes
from tests.helpers.log_probs import EXACT
from tests.unit.api.test_log_probs import library, scored


@pytest.mark.heavy
def test_quantized_weights_have_the_figures_of_what_they_hold() -> None:
    reference = library()
    for module in reference.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            codes_OI, scales_O = _to_bytes(module.weight.data)
            module.weight.data = codes_OI.float() * scales_O[:, None]
    scored(load("tiny", "tiny-draft", quantization="int8_weight_only"), reference, EXACT)
