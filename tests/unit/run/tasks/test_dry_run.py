"""The plan of a run: what it takes from the run's config, and what a run takes from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import CapacityError
from llama_ssp.machines import hardware
from llama_ssp.planning.plan import require_room
from llama_ssp.planning.spec import make_spec
from llama_ssp.run.tasks import dry_run as task
from llama_ssp.run.tasks.records import CompareConfig
from llama_ssp.settings.schema import MODEL_DRAFT, NO_DRAFT, DrafterConfig, DraftLayout, RunConfig, WeightsKind
from llama_ssp.words import lasting


def _figures(name: str) -> dict[str, Any]:
    found = catalogue.option("hardware", name)
    assert found
    return dict(found[0])


def _run(model: str = "tiny", draft: str | None = "tiny-draft", prompt: str | None = None) -> RunConfig:
    drafter = DrafterConfig(kind=NO_DRAFT)
    if draft:
        drafter = DrafterConfig(kind=MODEL_DRAFT, model=catalogue.load(draft))
    return RunConfig(
        hardware=_figures("laptop_cpu"),
        task=CompareConfig(default_prompts=["x" * 30, "y" * 299]),
        model=catalogue.load(model),
        draft=drafter,
        prompt=prompt,
    )


def test_a_run_is_planned_with_its_own_ranks_and_with_graphs_where_it_captures_them() -> None:
    config = _run()
    config.placement.draft.ranks = [1]
    for device, asked, planned in (("cpu", True, False), ("cuda", True, True), ("cuda", False, False)):
        config.cuda_graphs = asked
        job = make_spec(config, world_size=2, prompt_tokens=50, device=device)
        assert (job.target_ranks, job.draft_ranks, job.cuda_graphs) == ((0, 1), (1,), planned)


@pytest.mark.parametrize(("name", "on_gpu"), [("tinyllama_1B", Dtype.bf16), ("7B", Dtype.fp16)])
def test_synthetic_weights_are_planned_in_16_bits_on_a_cpu_and_in_the_entrys_format_on_a_gpu(
    name: str, on_gpu: Dtype
) -> None:
    config = replace(_run(name, name), weights=WeightsKind.synthetic)
    job = make_spec(config, world_size=1, prompt_tokens=50, device="cpu")
    assert job.draft
    for model in (job.target, job.draft):
        assert (model.dtype, model.matrix_dtype("cpu")) == (Dtype.fp32, Dtype.fp16)
    assert make_spec(config, world_size=1, prompt_tokens=50, device="cuda").target.dtype is on_gpu


@pytest.mark.parametrize(
    ("prompt", "prompts", "tokens"), [(None, None, 100), ("z" * 59, None, 20), (None, "-", 128), (None, "file", 41)]
)
def test_the_longest_prompt_is_estimated_from_its_text(
    prompt: str | None, prompts: str | None, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _run(prompt=prompt)
    if prompts == "file":
        (tmp_path / "file").write_text("a\n" + "b" * 60 + "\u2028" + "b" * 59)  # one line has 120 characters
    config.prompts = str(tmp_path / "file") if prompts == "file" else prompts
    task.dry_run(config, world_size=1)
    assert f"{tokens} + 64 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("auto", [True, False])
def test_ranks_that_were_not_started_hold_nothing(auto: bool, capsys: pytest.CaptureFixture[str]) -> None:
    config = _run("30B", "7B")
    config.hardware = _figures("8xa100_80gb")
    config.placement.auto = auto
    task.dry_run(config, world_size=4)
    shown = capsys.readouterr().out
    assert ("ranks 1-3" in shown, "4-7" in shown) == (True, False)
    chosen = task.choose_for_run(config, world_size=4, on_cpu=False)[0]
    assert chosen.layout.ranks == (0, 1, 2, 3)


def test_a_dry_run_that_does_not_fit_is_shown_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CapacityError, match="rank 0 needs"):
        task.dry_run(_run("65B", "7B"), world_size=1)
    assert "too full" in capsys.readouterr().out


def test_a_dry_run_says_how_long_its_prompts_and_its_loading_take(capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB of the target, 2.5 of the draft, and 0.5 for each further copy of its embedding."""
    config = replace(_run("llama3_70B", "llama3_1B"), hardware=_figures("4xh100"), num_samples=5000, batch_size=4)
    config.placement.draft.kind = DraftLayout.sharded
    task.dry_run(config, world_size=4)
    shown = " ".join(capsys.readouterr().out.split())
    plan = task.plan_ahead(config, world_size=4)
    assert plan.timing.speculative_run_s
    hours = 10_000 / 4 * 64 * (plan.timing.plain_run_s + plan.timing.speculative_run_s) / 3600
    assert hours > 1
    said = f"the whole run: {lasting(3600 * hours)} of both modes ({4 * hours:.2g} GPU-hours) if every completion"
    assert 0 < shown.index(said) < shown.index("Memory per rank")
    assert "73 s to read 146 GB at 2 GB/s a node" in shown
    config.task = CompareConfig(default_prompts=[])
    task.dry_run(config, world_size=4)
    assert "the whole run" not in capsys.readouterr().out, "somebody will type the prompts"


def test_a_forecast_counts_whole_completions_as_the_summary_does() -> None:
    machine = hardware.load("laptop_cpu")
    plan = task.plan_of_run(_run(), world_size=1, machine=machine, lengths=[40])
    forecast = task.forecast(plan.timing)
    assert forecast.plain_ms_per_token == pytest.approx(1e3 * plan.timing.plain_run_s)
    assert plan.timing.speculative_run_s
    assert forecast.speedup == pytest.approx(plan.timing.plain_run_s / plan.timing.speculative_run_s)
    alone = task.forecast(task.plan_of_run(_run(draft=None), world_size=1, machine=machine, lengths=[40]).timing)
    assert (alone.speculative_ms_per_token, alone.speedup) == (None, None)


def test_ranks_on_a_cpu_share_it() -> None:
    machine = hardware.load("laptop_cpu")
    plan = task.plan_of_run(_run(), world_size=2, machine=machine, lengths=[40])
    require_room(plan)
    assert {rank.capacity_bytes for rank in plan.ranks} == {(machine.memory_bytes - machine.system_bytes) // 2}
