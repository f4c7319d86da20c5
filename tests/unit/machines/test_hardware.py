"""The catalogue of machines, and what is said of a file that is wrong."""

from typing import Any

import pytest
import yaml

from llama_ssp.catalogue import conf_dir
from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware

REQUIRED = {
    "p4d_24xlarge", "8xa100_80gb", "g5_12xlarge", "8xh100", "8xh200", "1xh200", "mi250", "4xl40s", "laptop_cpu",
    "1xa100_80gb", "1xh100", "1xrtx3090", "1xrtx4090", "1xl4", "8xmi300x", "g6e_48xlarge", "p5_48xlarge",
    "p5e_48xlarge", "8xb200", "g5_48xlarge", "g6_12xlarge", "p4de_24xlarge",
}  # fmt: skip
WITHOUT_SOURCE = {"name", "device", "gpu", "num_gpus", "num_nodes", "sources", "link", "network", "profiles"}


def _figures(name: str = "p4d_24xlarge") -> dict[str, Any]:
    figures: dict[str, Any] = yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text())
    return figures


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_every_figure_of_an_entry_has_a_source(name: str) -> None:
    figures, machine = _figures(name), hardware.load(name)
    wanted = {key for key, value in figures.items() if value is not None} - WITHOUT_SOURCE
    wanted |= {f"{link}.{key}" for link in ("link", "network") if link in figures for key in figures[link]}
    assert wanted - machine.sources.keys() == set()
    assert machine.name == name


def test_machines_of_an_architecture_share_what_it_has() -> None:
    hopper = [machine for machine in map(hardware.load, hardware.names()) if machine.gpu.startswith(("H100", "H200"))]
    assert {machine.name for machine in hopper} >= {"1xh100", "8xh100", "p5_48xlarge", "1xh200"}
    assert {(machine.context_bytes, machine.kernel_s) for machine in hopper} == {(905000000, 2.4e-6)}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("4xa100", "hardware=8xa100_80gb hardware.num_gpus=4"), ("4xA10G", "hardware=g5_12xlarge"), ("h100", "1xh100"),
        ("2xmi300x", "hardware=8xmi300x hardware.num_gpus=2"), ("8xh10", "8xh100"),
        ("16xh100", "hardware=8xh100 hardware.num_nodes=2"),
    ],
)  # fmt: skip
def test_an_unknown_machine_is_answered_with_its_own_gpus(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown hardware '{name}': .*; did you mean {meant}\?$"):
        hardware.load(name)


def test_all_problems_of_a_file_are_told_at_once() -> None:
    figures = _figures() | {
        "num_gpus": -8, "memory_bytes": 1.5, "kernel_s": -1, "link": {"latency_s": 0}, "wheels": 4,
        "flops_per_s": {"fp16": 0, "fp8": 1e15}, "device": "tpu", "num_nodes": 2, "network": None,
    }  # fmt: skip
    del figures["bandwidth_bytes_per_s"]
    assert sorted(hardware.problems_of(figures)) == [
        "hardware.bandwidth_bytes_per_s is missing",
        "hardware.device=tpu must be one of cuda, cpu",
        "hardware.flops_per_s.fp16=0 must be above 0",
        "hardware.kernel_s=-1 must be 0 or more",
        "hardware.link.bandwidth_bytes_per_s is missing",
        "hardware.memory_bytes=1.5 must be a whole number, above 0",
        "hardware.num_gpus=-8 must be above 0",
        "hardware.num_nodes=2 needs hardware.network (bandwidth_bytes_per_s, latency_s)",
        *sorted(hardware.problems_of(figures))[-2:],
    ]
    assert all(name in str(hardware.problems_of(figures)) for name in ("'wheels'", "'fp8'"))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("link", 5, "must be a mapping"),
        ("flops_per_s", {}, "at least one number format"),
        ("sources", "web", "where each figure is from"),
        ("sums", {"num_ranks": 1}, "hardware.sums must be a list"),
        ("sums", [{"num_ranks": 2}], "hardware.sums[0].num_bytes is missing"),
        ("sums", [{"num_ranks": 2.5, "num_bytes": 8, "s": 1}], "hardware.sums[0].num_ranks=2.5 must be a whole number"),
        ("sums", [{"num_ranks": 2, "num_bytes": 8, "s": "fast"}], "hardware.sums[0].s=fast must be a number, above 0"),
        ("memory_bytes", "40 GB", "must be a whole number"),
        ("memory_bytes", float("nan"), "must be a whole number"),
        ("gpu", 7, "must be text"),
        ("device", ["cuda"], "hardware.device=['cuda'] must be one of cuda, cpu"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object, complaint: str) -> None:
    assert complaint in "\n".join(hardware.problems_of(_figures() | {key: value}))


def test_a_sound_file_has_no_problems_and_something_else_than_a_mapping_has_one() -> None:
    assert hardware.problems_of(_figures()) == []
    assert isinstance(hardware.build(_figures() | {"memory_bytes": 4e10}).memory_bytes, int)
    assert hardware.problems_of(["p4d"]) == ["hardware must be a mapping of figures, not ['p4d']"]
    with pytest.raises(ConfigError, match=r"unknown hardware '8xh10': .*did you mean 8xh100"):
        hardware.load("8xh10")
