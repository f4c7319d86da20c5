"""The figure of a comparison shows what a faster token costs, and names what is worth its price."""

from typing import Any

from llama_ssp.reports.charts import Kind
from llama_ssp.reports.plan_figures import machines_worth_it, time_by_price, worth_it


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
    chart = machines_worth_it([*ROWS, row("slowest", 4.0, 31.0)])
    assert [*chart.legend] == ["slower at this price", "cheap (1 GPU, fp16)", "fast (1 GPU, fp16)"]
    assert sorted(mark.points[0] for mark in chart.marks) == [(1.0, 20.0), (2.0, 30.0), (3.0, 10.0), (9.0, 10.0)]
    assert "slow (1 GPU, fp16): 2.00 USD/h, 30.00 ms/token" in chart.alt


def test_a_number_format_has_a_line_with_a_draft_and_one_without() -> None:
    chart = time_by_price([*ROWS, row("small", 1.5, 15.0, quantization="int8_weight_only")])
    assert [*chart.legend] == ["fp16", "fp16, with a draft", "int8wo"]
    lines = {name: mark.points for name, mark in chart.legend.items()}
    assert lines["fp16"] == [(2.0, 30.0), (3.0, 10.0)]
    assert sum(mark.kind is Kind.dot for mark in chart.marks) == 4
