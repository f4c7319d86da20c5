"""The figures of plans and searches, and how `llama-ssp plan` asks for them."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.reports.plan_figures import draw, draw_plan, draw_search
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import GIB
from llama_ssp.planning.plan import Plan, document, make_plan
from llama_ssp.run.commands import plan as entry
from llama_ssp.settings.schema import DraftLayout
from tests.helpers import in_process
from tests.helpers.extensions import module_of
from tests.helpers.in_process import Ended
from tests.helpers.lanes import slow
from tests.helpers.planning import make_spec
from tests.helpers.starters import run_file

A10G = hardware.load("g5_12xlarge")


def call(*settings: str) -> Ended:
    return in_process.call(entry.main, [*settings])


def _plan(target: str, draft: str | None, *, num_ranks: int) -> Plan:
    return make_plan(make_spec(target, draft, num_ranks=num_ranks), hardware.load("p4d_24xlarge"))


def searches() -> Any:
    return module_of("advice.search")


@cache
def choices() -> list[dict[str, Any]]:
    """What the planner suggests for a large model on four small GPUs."""
    found: list[dict[str, Any]] = searches().search(
        make_spec("65B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded), A10G
    )
    return found


@pytest.mark.seconds
@pytest.mark.parametrize("draft", ["7B", None])
def test_a_figure_is_drawn_with_and_without_a_draft(draft: str | None, tmp_path: Path) -> None:
    plan, file = _plan("30B", draft, num_ranks=8), tmp_path / "plan.svg"
    draw(plan, file)
    assert "<svg" in file.read_text()
    memory, by_k, *_ = draw_plan(plan).axes
    for place, rank in enumerate(plan.ranks):
        stacked = [group.patches[place] for group in memory.containers]  # type: ignore[attr-defined]
        assert sum(patch.get_height() for patch in stacked) * GIB == pytest.approx(rank.needed_bytes)
    expected = [*document(plan)["time"]["speculative_ms_per_token_by_k"]]
    times = [np.asarray(line.get_ydata()).tolist() for line in by_k.lines if line.get_label() == "speculative"]
    assert times == ([expected] if expected else [])


def test_a_figure_draws_bytes_and_times_up_to_the_longest_rows_also_with_8_bits() -> None:
    machine = hardware.load("h100")
    plan = make_plan(make_spec("llama3_8B", batch_size=16, prompt_tokens=8000), machine)
    sizes, times = draw_plan(plan).axes[2:]
    (own, narrow), (own_s, narrow_s) = (
        [np.asarray(line.get_xydata()) for line in axes.lines[:2]] for axes in (sizes, times)
    )
    assert own[-1][0] == plan.largest_context > 8064
    assert 0.97 * machine.rank_bytes < own[-1][1] * GIB <= machine.rank_bytes
    assert (narrow[:, 1] < own[:, 1]).all()
    assert (narrow_s[:, 1] < own_s[:, 1]).all()
    asked = replace(plan.spec, prompt_tokens=plan.largest_context - plan.spec.max_new_tokens)
    assert own_s[-1][1] == pytest.approx(1e3 * make_plan(asked, machine).timing.plain_s)


@pytest.mark.seconds
def test_a_figure_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    for file in (tmp_path / "missing" / "plan.png", tmp_path / "plan.docx"):
        with pytest.raises(ConfigError, match="cannot be written"):
            draw(_plan("7B", None, num_ranks=1), file)


@pytest.mark.seconds
def test_the_figure_has_the_fastest_choice_of_the_asked_model_for_every_size() -> None:
    (axes,) = draw_search(searches().Search(machine=A10G, choices=choices())).axes
    dots = {(x, y) for line in axes.lines for x, y in np.asarray(line.get_xydata()).tolist()}
    for size in (1, 2, 4):
        fitting = [
            one["ms_per_token"]
            for one in choices()
            if one["target"] == "65B" and one["num_ranks"] == size and one["ms_per_token"]
        ]
        assert (size, min(fitting)) in dots if fitting else all(x != size for x, _ in dots)
    assert any("with a draft" in str(line.get_label()) for line in axes.lines)


def test_a_search_in_which_nothing_fits_is_drawn_empty(tmp_path: Path) -> None:
    small = replace(A10G, num_gpus=1, memory_bytes=2**30)
    found = searches().search(make_spec("65B", "7B"), small)
    draw(searches().Search(machine=small, choices=found), tmp_path / "search.svg")


@pytest.mark.seconds
@pytest.mark.parametrize("package", [slow("rich"), "matplotlib"])
def test_a_missing_package_is_named_with_what_installs_it(package: str, tmp_path: Path) -> None:
    words = ["model=7B", "figure=plan.png", "format=json"]
    finished = run_file("plan.py", *words, without=[package], cwd=tmp_path)
    assert finished.returncode == 2
    assert f"needs {package}: pip install {package}" in finished.stderr


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("figure=/missing/a.png", "figure=/missing/a.png: create the folder /missing first, or name"),
        ("hardware=8xh100,4xl40s figure=a.png", "figure=a.png takes one machine, and hardware= names 2: give one of"),
    ],
)
def test_a_figure_in_no_folder_or_of_two_machines_is_refused(settings: str, complaint: str) -> None:
    call(*settings.split()).check_refusal(complaint)


def test_commands_of_a_search_draw_nothing() -> None:
    found = searches().search(make_spec("7B", None, num_ranks=1), A10G, ["figure=a.png", "seed=3"])
    assert found[0]["settings"].count("seed=3") == 1
    assert not [word for one in found for word in one["settings"] if word.startswith("figure")]


@pytest.mark.seconds
def test_a_figure_is_drawn_though_the_reader_of_the_table_ends_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end(_plan: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("llama_ssp.reports.plan_tables.show", end)
    with suppress(BrokenPipeError):
        call("model=7B", "hardware=h100", f"figure={tmp_path / 'plan.png'}")
    assert (tmp_path / "plan.png").is_file()
