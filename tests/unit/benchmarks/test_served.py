"""Rows of other engines."""

from benchmarks.served import Served, served, table

ROW = {
    "model": "Qwen/Qwen3-8B",
    "system": "h100_sxm",
    "weights": "",
    "tp": "1",
    "concurrency": "17",
    "input_tokens": "2048",
    "output_tokens": "64",
    "ttft_ms": "500",
    "tpot_ms": "20",
}


def _planned_ms(engine: str, **changed: str) -> float:
    return 20 / served(ROW | {"engine": engine} | changed).ratio


def test_half_of_the_prompts_of_others_are_read_between_the_tokens_of_sglang() -> None:
    both = [_planned_ms(engine) for engine in ("vllm", "sglang")]
    # Of twice as many tokens, each has half as many prompts; its keys are a few more.
    longer = _planned_ms("vllm", output_tokens="128")
    assert both[0] - both[1] > 1.0
    assert abs(longer - both[1]) < 0.05 * (both[0] - both[1])


def test_a_row_whose_first_token_took_longer_than_all_prompts_is_queued() -> None:
    first_ms = {"500": False, "90000": True}
    assert {time: served(ROW | {"engine": "sglang", "ttft_ms": time}).is_queued for time in first_ms} == first_ms


def test_a_held_group_has_the_range_of_the_other_groups() -> None:
    names = ("h100", 1, "bf16", "vllm", 8), ("h200", 1, "bf16", "vllm", 8)
    rows = [
        Served(name, ratio, is_inside=True, is_queued=False, waited=0.0, model="7B")
        for name, ratios in zip(names, ((1.0, 1.1, 1.2), (1.1, 1.5)), strict=True)
        for ratio in ratios
    ]
    last = {line.split(" | ")[0]: line.split(" | ")[-1] for line in table(rows, 0, 2, is_held=True).splitlines()[2:]}
    assert last == {"| h100": "1, 33 % |", "| h200": "1, 50 % |"}
