"""The tables of plans."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from llama_ssp.catalogue import Dtype
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import GIB
from llama_ssp.planning.plan import Plan, document, make_plan
from llama_ssp.reports.plan_tables import ITEMS, show
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.text.messages import rounded
from tests.helpers.extensions import need
from tests.helpers.planning import make_spec
from tests.helpers.runs import with_toys


def _plan(target: str, draft: str | None, *, num_ranks: int, machine: str = "p4d_24xlarge") -> Plan:
    return make_plan(make_spec(target, draft, num_ranks=num_ranks), hardware.load(machine))


def _printed(plan: Plan, width: int = 110, *, is_full: bool = False) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    show(plan, console, is_full=is_full)
    return console.export_text()


def test_the_full_table_has_every_item_of_memory_a_column_for_equal_ranks_and_all_notes() -> None:
    plan = replace(_plan("30B", "7B", num_ranks=8), warnings=("the draft cannot gain",))
    text = _printed(plan, is_full=True)
    assert re.search("rank 0.*rank 1 .*ranks 2-3.*ranks 4-7", text), "of 250 blocks of tokens two ranks have 32"
    assert [label for label in ITEMS if label not in text] == []
    assert text.index("capacity") < text.index("free")
    for sentence in ("warning: the draft cannot gain", "note: 52 heads over 8 ranks", "plain step, ms: "):
        assert sentence in text
    assert [note for note in plan.notes if f"note: {note}" not in " ".join(text.split())] == []
    assert "MiB" in _printed(_plan("tiny", "tiny-draft", num_ranks=1, machine="laptop_cpu")), "of small models"


@pytest.mark.parametrize("draft", ["7B", "tinyllama_1B", None])
def test_a_plan_of_one_screen_leaves_out_what_decides_nothing(draft: str | None) -> None:
    plan = replace(_plan("30B", draft, num_ranks=8, machine="8xa100_80gb"), warnings=("the draft cannot gain",))
    text, words = _printed(plan, width=80), " ".join(_printed(plan, width=80).split())
    assert len(text.splitlines()) <= 30
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if re.match("[a-z]", line)}
    items = [name for name in rows if name.startswith("weights") or name in {*ITEMS, "other items"}]
    for column in range(-len(rows["total"]) + 1, 0):
        sizes = (0.0 if rows[name][column] == "-" else float(rows[name][column]) for name in items)
        assert sum(sizes) == pytest.approx(float(rows["total"][column]), abs=0.006 * len(items))
    told = *plan.warnings, *(note for note in plan.notes if note not in plan.details), plan.basis
    assert [sentence for sentence in told if sentence not in words] == []
    assert len(plan.details) == 2
    assert [note for note in plan.details if note in words] == []
    assert "format=full has every item of memory" in words


def test_an_item_that_is_large_on_some_rank_has_a_row_and_a_peak_that_decides_too() -> None:
    machine = hardware.load("8xh200")
    plan = make_plan(make_spec("13B", num_ranks=1, batch_size=64), machine)
    (full,) = plan.ranks
    assert full.target_cache_bytes > 0.05 * full.total_bytes
    assert "cache, target" in _printed(plan)
    assert "peak while loading" not in _printed(plan)
    loading = replace(full, loading_peak_bytes=full.total_bytes + GIB)
    assert f"peak while loading {loading.needed_bytes / GIB:.2f}" in " ".join(
        _printed(replace(plan, ranks=(loading,))).split()
    )


@pytest.mark.parametrize("is_full", [False, True])
def test_equal_ranks_that_are_no_neighbours_share_a_column(is_full: bool) -> None:
    plan = make_plan(make_spec("qwen3_14B", num_ranks=16), replace(hardware.load("8xh200"), num_nodes=2))
    assert len({rank.target_heads for rank in plan.ranks}) == 2
    text = _printed(plan, width=200, is_full=is_full)
    head = next(line for line in text.splitlines() if " like rank " in line)
    numbers = [int(found or 1) for found in re.findall(r"(?:(\d+) like )?rank \d+", head)]
    assert (len(numbers), sum(numbers)) == (6, len(plan.ranks))


@pytest.mark.parametrize("is_full", [False, True])
def test_of_more_kinds_of_ranks_than_fit_the_fullest_are_shown_and_that_is_said(is_full: bool) -> None:
    plan = make_plan(make_spec("qwen3_14B", num_ranks=16), replace(hardware.load("8xh200"), num_nodes=2))
    wide, narrow = (_printed(plan, width=width, is_full=is_full) for width in (200, 80))
    assert "…" not in narrow
    assert "fullest" not in wide
    said = re.search(r"the fullest (\d) kinds of (\d)", narrow)
    assert said
    lines = (next(line for line in text.splitlines() if line.startswith("total")) for text in (narrow, wide))
    totals = [sorted(map(float, line.split()[1:])) for line in lines]
    assert [len(found) for found in totals] == [int(number) for number in said.groups()]
    assert totals[0] == totals[1][-len(totals[0]) :]


def test_several_machines_in_full_have_a_plan_each() -> None:
    plans = [make_plan(make_spec("13B", num_ranks=8), hardware.load(name)) for name in ("8xh100", "8xh200")]
    console = Console(record=True, width=80, file=io.StringIO())
    show(plans, console, is_full=True)
    text = console.export_text()
    assert text.count("peak while loading") == len(plans)
    assert "hardware= with one of them" not in text


def _verdict(machine: HardwareConfig, target: str = "7B", draft: str | None = None) -> str:
    spec = make_spec(target, draft, num_ranks=machine.num_gpus)
    return _printed(make_plan(spec, machine), width=200).lstrip().splitlines()[0]


def test_the_first_line_is_the_verdict_of_the_mode_that_was_asked_and_names_a_faster_one() -> None:
    machine = replace(hardware.load("8xh100"), num_gpus=2)
    time = document(make_plan(make_spec("13B", "tinyllama_1B", num_ranks=2), machine))["time"]
    said = _verdict(machine, "13B", "tinyllama_1B")
    ms, rate = (rounded(time[f"speculative_{name}"]) for name in ("ms_per_token", "run_tokens_per_s"))
    assert time["speedup"] > 1
    between = " to ".join(rounded(end) for end in time["speculative_ms_per_token_range"])
    assert said == f"fits: speculative {ms} ms/token ({between}), {rate} tokens/s with prompts"
    time = document(make_plan(make_spec("7B", "7B"), hardware.load("h100")))["time"]
    slower, plain = (rounded(time[f"{mode}_ms_per_token"]) for mode in ("speculative", "plain"))
    said = _verdict(hardware.load("h100"), "7B", "7B")
    assert said.startswith(f"fits: speculative {slower} ms/token (")
    assert said.endswith(f"; plain takes {plain}")


def test_a_best_k_is_named_only_where_it_gains() -> None:
    need("advice")
    good, bad = (" ".join(_printed(_plan(target, "7B", num_ranks=1)).split()) for target in ("13B", "7B"))
    assert "best K = " in good
    assert "best K = " not in bad
    assert "no K gains" in bad


def test_the_time_table_says_what_its_figures_mean_and_what_they_rest_on() -> None:
    spec = replace(make_spec("30B", "7B", num_ranks=4, batch_size=3), num_replicas=2)
    plan = make_plan(spec, hardware.load("p4d_24xlarge"))
    text = " ".join(_printed(plan).split())
    assert "Time after the first token; tokens/s over 3 rows of each of 2 replicas" in text
    assert "forecast by data sheet; this engine has not been measured on this GPU" in text
    time = document(plan)["time"]
    for mode in ("plain", "speculative"):
        assert time[f"{mode}_tokens_per_s"] == pytest.approx(6e3 / time[f"{mode}_ms_per_token"])
        assert f"{time[f'{mode}_tokens_per_s']:.1f}" in text
    assert f"{time['plain_first_token_ms']:.0f} ms" in text


@pytest.mark.parametrize("name", ["1xh100", "8xh200", "1xrtx4090", "g5_12xlarge", "4xl40s", "8xb200", "laptop_cpu"])
def test_a_plan_says_on_which_gpus_this_engine_has_run(name: str) -> None:
    machine = hardware.load(name)
    plan = make_plan(make_spec("7B", device=machine.device), machine)
    has_run = "this engine has run on one GPU of this kind (docs/findings/gpus.md)" in plan.basis
    assert has_run == machine.gpu.startswith(("H100", "H200"))
    assert ("this engine has not been measured" in plan.basis) != has_run


def test_the_memory_of_a_pair_is_what_an_h100_took() -> None:
    spec = make_spec("7B", "tinyllama_1B", of_target={"dtype": Dtype.bf16}, of_draft={"dtype": Dtype.bf16})
    (rank,) = make_plan(spec, hardware.load("1xh100")).ranks
    assert 15.55 <= rank.needed_bytes / GIB <= 1.02 * 15.55  # measured before short prompts were graphs


def test_without_a_terminal_no_line_is_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    plan = _plan("30B", "7B", num_ranks=8)
    show(plan)
    lines = capsys.readouterr().out.splitlines()
    told = (note for note in plan.notes if note not in plan.details)
    for sentence in (*plan.warnings, *told, document(plan)["time"]["acceptance_source"]):
        assert any(line.endswith(sentence) for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_tight_fit_is_called_tight() -> None:
    machine = replace(hardware.load("p4d_24xlarge"), num_gpus=1)
    (full,) = make_plan(make_spec("7B"), machine).ranks
    tight = replace(machine, memory_bytes=int(full.needed_bytes / 0.98))
    roomy = replace(machine, memory_bytes=int(full.needed_bytes / 0.96))
    plan = make_plan(make_spec("7B"), tight)
    assert (document(plan)["fits"], document(plan)["is_tight"]) == (True, True)
    text = " ".join(_printed(plan).split())
    assert "fits, tight" in text
    assert "note: a tight fit: 2.0 % of the memory of rank 0 is left" in text
    assert "tight" not in _printed(make_plan(make_spec("7B"), roomy))


def test_a_laptop_leaves_memory_to_its_operating_system_and_has_no_gpus() -> None:
    machine = hardware.load("laptop_cpu")
    spec = make_spec("13B_8bit", "7B", device="cpu", cuda_graphs=False)
    plan = make_plan(spec, machine)
    assert plan.ranks[0].capacity_bytes == machine.memory_bytes - machine.system_bytes < 14 * GIB
    assert not plan.fits
    text = " ".join(_printed(plan).split())
    assert "3 of 16 GiB are left to the operating system" in text
    assert "GPU" not in text
    assert all("GPU" not in sentence for sentence in (*plan.warnings, *plan.notes, plan.basis))


def test_a_terminal_of_80_columns_breaks_no_word_and_scrolls_little() -> None:
    text = _printed(_plan("30B", "7B", num_ranks=8, machine="8xa100_80gb"), width=80)
    words = "ms/token", "tokens/s", "prompts", "speed-up"
    assert [word for word in words if word not in text] == []
    console = Console(record=True, width=80, file=io.StringIO())
    machines = [replace(hardware.load(name), usd_per_hour=20.0) for name in ("p4d_24xlarge", "8xrtx_pro_6000")]
    show([make_plan(make_spec("30B", "7B", num_ranks=8), machine) for machine in machines], console)
    text = console.export_text()
    assert [word for word in ("speculative", "capacity", "USD/M", "tokens/s", "p4d_24xlarge") if word not in text] == []


def test_machines_without_a_draft_have_no_column_for_one() -> None:
    for draft in ("7B", None):
        console = Console(record=True, width=80, file=io.StringIO())
        show([make_plan(make_spec("13B", draft, num_ranks=8), hardware.load("8xh100"))] * 2, console)
        assert ("speculative" in console.export_text()) is bool(draft)


def test_the_shown_gain_is_that_of_the_shown_times_and_its_range_has_a_middle() -> None:
    plan = _plan("30B", "tinyllama_1B", num_ranks=8)
    low, high = document(plan)["time"]["speedup_range"]
    rows = {
        line.split()[0]: line.split() for line in _printed(plan).splitlines() if re.match(r"(plain|spec\w+) +\d", line)
    }
    assert rows["speculative"][-1] == f"{plan.timing.speedup:.2f}x"
    assert float(rows["plain"][1]) / float(rows["speculative"][1]) == pytest.approx(plan.timing.speedup, rel=0.01)
    middle = f"gain {low:.2f}x to {high:.2f}x, middle {(low * high) ** 0.5:.2f}x"
    assert middle in " ".join(_printed(plan).split())


def test_a_note_is_printed_once_and_sums_need_several_gpus() -> None:
    spec = make_spec("13B", "7B", num_ranks=1, draft_kind=DraftLayout.own_gpu, draft_ranks=(1,))
    notes = make_plan(spec, hardware.load("2xl4")).notes
    assert any("collectives in a round" in note for note in notes)
    assert not any("over 1 GPU" in note for note in notes)
    same = make_plan(make_spec("qwen3_30B_A3B", "qwen3_30B_A3B", num_ranks=8), hardware.load("8xh100")).notes
    assert len({*same}) == len(same)
    many = make_plan(make_spec("65B", num_ranks=8, batch_size=4096), hardware.load("8xh100")).notes
    assert not any("e+0" in note for note in many)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shortens_no_figure(width: int) -> None:
    plan = _plan("65B", "7B", num_ranks=8)
    text = _printed(plan, width, is_full=True)
    assert "…" not in _printed(plan, width)
    assert "…" not in text
    time = document(plan)["time"]
    parts = time["target_forward"]
    assert f"plain step, ms: matrices {parts['matrices_ms']:.2f}" in " ".join(text.split())
    assert f"4 x {time['draft_step_ms']:.2f} draft" in " ".join(text.split())


def test_a_pair_that_nobody_measured_has_its_low_and_high_figures_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    with_toys(monkeypatch)
    spec = replace(make_spec("llama3_70B", "llama3_1B", num_ranks=8), acceptance=None)
    text = _printed(make_plan(spec, hardware.load("8xa100_80gb")), width=400, is_full=True)
    (line,) = (line for line in text.splitlines() if "tokens per round" in line)
    assert re.search(
        r"\(\d\.\d\d-\d\.\d\d\) tokens per round; acceptance 0.75 \(0.50-0.88\): nobody has measured", line
    )
    assert re.search(r"speculative [\d.]+ to [\d.]+, first token [\d.]+ to [\d.]+, gain [\d.]+x to [\d.]+x", text)
    assert sum("measure" in line for line in text.splitlines()) == 4, "the basis, the figure, how to get it, and sums"
    assert "batch up to" not in text
    assert "memory bandwidth" not in text
