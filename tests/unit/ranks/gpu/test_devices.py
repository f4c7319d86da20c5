"""Errors after which a run cannot go another way."""

import pytest
import torch

from llama_ssp.ranks.gpu.devices import ends_run


class CodedError(RuntimeError):
    """An error of torch's with CUDA's code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (CodedError(700), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (CodedError(209), False),  # no kernel image: another kernel may have one
        (CodedError(900), False),  # not permitted while a graph is captured
        (RuntimeError("out of resource: shared memory, Required: 200000, Hardware limit: 101376"), False),
    ],
)
def test_only_a_full_or_lost_device_ends_a_run(error: Exception, *, wanted: bool) -> None:
    assert ends_run(error) is wanted


def test_the_error_behind_an_error_counts() -> None:
    """A capture that runs out of memory also fails to end, and that is what is raised."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise CodedError(901)
    except CodedError as error:
        assert ends_run(error)  # noqa: PT017 - what it was raised for
