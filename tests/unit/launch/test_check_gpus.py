"""What machine-install.sh ends with: a GPU that does not compute, or is missing, is said with its reason."""

import pytest
import torch

from launch import check_gpus


def test_a_device_that_cannot_answer_or_computes_something_else_has_its_reason_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_gpus.fault_of(torch.device("cpu")) is None
    fault = check_gpus.fault_of(torch.device("meta"))
    assert fault
    assert "\n" not in fault
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda first, _second: torch.zeros_like(first))
    assert check_gpus.fault_of(torch.device("cpu")) == "a product in torch.float32 sums to 0 instead of 65536"


def test_every_gpu_that_fails_or_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {0: None, 1: "no kernel image is available"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(faults))
    monkeypatch.setattr(check_gpus, "fault_of", lambda device: faults[device.index])
    assert check_gpus.main(["8"]) == 2
    said = capsys.readouterr()
    assert said.err == f"torch {torch.__version__} on cuda:1: no kernel image is available\n"
    faults[1] = None
    assert check_gpus.main(["8"]) == 0
    assert capsys.readouterr().out == f"torch {torch.__version__} computes on 2 of 8 GPUs\n"
    faults.clear()
    assert check_gpus.main([]) == 0
    assert check_gpus.main(["8"]) == 2
    assert "sees none of the 8 GPUs" in capsys.readouterr().err
