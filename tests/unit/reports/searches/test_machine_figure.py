"""The figure of a comparison shows what a faster token costs, and names what is worth its price."""

from typing import Any

import numpy as np

from llama_ssp.reports.plan_figures import draw_machines, worth_it


def row(machine: str, usd: float, ms: float, *, draft: str | None = None, quantization: str = "fp16") -> dict[str, Any]:
    return {
        "machine": machine, "gpu": "GPU", "num_gpus": 1, "num_nodes": 1, "num_replicas": 1, "usd_per_hour": usd,
        "ms_per_token": ms, "draft": draft, "quantization": quantization,
    }  # fmt: skip


ROWS = [row("slow", 2.0, 30.0), row("fast", 3.0, 10.0), row("cheap", 1.0, 20.0, draft="7B"), row("dear", 9.0, 10.0)]


def test_a_choice_is_worth_its_price_if_nothing_as_cheap_is_as_fast() -> None:
    assert [each["machine"] for each in worth_it(ROWS)] == ["cheap", "fast"]
    assert [each["machine"] for each in worth_it([row("a", 1.0, 5.0), row("b", 1.0, 4.0)])] == ["b"]


def test_only_what_is_worth_its_price_has_a_name_and_what_is_far_slower_is_not_drawn() -> None:
    _, by_machine = draw_machines([*ROWS, row("slowest", 4.0, 31.0)], title="t").axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in by_machine.lines}
    assert drawn == {
        "slower at this price": [[2.0, 30.0], [9.0, 10.0]],
        "cheap (1 GPU, fp16)": [[1.0, 20.0]], "fast (1 GPU, fp16)": [[3.0, 10.0]],
    }  # fmt: skip


def test_a_number_format_has_a_line_with_a_draft_and_one_without() -> None:
    by_format, _ = draw_machines([*ROWS, row("small", 1.5, 15.0, quantization="int8_weight_only")], title="t").axes
    lines = {
        line.get_label(): (line.get_linestyle(), np.asarray(line.get_ydata()).tolist()) for line in by_format.lines
    }
    assert lines == {"fp16": ("--", [30.0, 10.0]), "fp16, with a draft": ("-", [20.0]), "int8wo": ("--", [15.0])}
