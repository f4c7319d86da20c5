"""Tables reach the device as torch would bring them there."""

import pytest
import torch

from llama_ssp.models.upload import to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[1, 2], [[1], [2]], [0.5], torch.arange(3)], ids=str)
def test_values_keep_their_dtype_and_shape(values: list[int] | torch.Tensor) -> None:
    expected = torch.as_tensor(values)
    found = to_device(values, CPU)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
