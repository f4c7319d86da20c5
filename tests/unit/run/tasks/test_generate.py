"""Completions on standard output, in order and with their fields; stored latencies; and the plan of a run."""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import InterruptedRun
from llama_ssp.machines import hardware
from llama_ssp.planning.spec import make_spec
from llama_ssp.reports.records import CompletionLine
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.run.tasks import dry_run as task
from llama_ssp.run.tasks.generate import generate
from llama_ssp.run.tasks.records import CompareConfig, GenerateConfig
from llama_ssp.terminal.terminal import Output, Terminal
from llama_ssp.text.messages import lasting
from llama_ssp.weights import hub
from tests.helpers.composed import compose_run
from tests.helpers.in_process import Ended, launch
from tests.helpers.runs import PLAIN
from tests.unit.run.test_prompts import requests_of

REQUESTS = requests_of(Prompt(text="first of all"), Prompt(text="second"), Prompt(text="third"), num_samples=2)


def line_of(request: PromptRequest) -> CompletionLine:
    index, sample = request.index, request.sample
    return replace(
        PLAIN, index=index, sample=sample, prompt=request.prompt, text=f"{index}{sample}", fields={"id": index}
    )


def written(
    task: GenerateConfig, ends: Sequence[int], *, is_screen: bool = False, stops: bool = False, finished: int = 0
) -> str:
    """What a batch writes whose completions end in an order, given by their numbers."""
    out = Output(file=StringIO(), force_terminal=is_screen, width=200, color_system=None, highlight=False)

    def complete(_requests: Sequence[PromptRequest], _mode: str, viewer: Viewer) -> None:
        for number in ends:
            viewer.end(line_of(REQUESTS[number]))
        if stops:
            raise InterruptedRun("stopped")

    session = SimpleNamespace(
        terminal=Terminal(out=out, err=out),
        config=SimpleNamespace(task=task, num_samples=2),
        streams=False,
        best_mode="plain",
        num_prompts=3,
        complete=complete,
        showing_progress=lambda *_, **__: nullcontext(),
        finished={line_of(request).key for request in REQUESTS[:finished]},
    )
    session.heading = partial(Session.heading, cast("Session", session))
    with pytest.raises(InterruptedRun) if stops else nullcontext():
        generate(cast("Session", session), REQUESTS)
    return cast("StringIO", out.file).getvalue()


def texts_of(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line and not line.startswith("prompt")]


def test_completions_come_as_they_end_or_in_the_order_of_the_prompts() -> None:
    ends, in_order = [3, 1, 0, 2, 5, 4], GenerateConfig(in_order=True)
    assert texts_of(written(GenerateConfig(), ends)) == ["11", "01", "00", "10", "21", "20"]
    assert texts_of(written(in_order, ends)) == ["00", "01", "10", "11", "20", "21"]
    assert texts_of(written(in_order, [3, 2], finished=2)) == ["10", "11"]
    stopped = written(in_order, [0, 5, 3], stops=True)
    assert texts_of(stopped) == ["00", "11", "21"], "a stopped run held them back"


@pytest.mark.parametrize("is_screen", [True, False])
def test_several_completions_have_names(is_screen: bool) -> None:
    """Also in a file, where they would run into each other."""
    shown = written(GenerateConfig(), [0, 3], is_screen=is_screen)
    assert "prompt 1 of 3, sample 1 of 2, first of all" in shown
    assert "prompt 2 of 3, sample 2 of 2, second" in shown


@pytest.mark.seconds
def test_fields_and_order_reach_standard_output_and_the_records(tmp_path: Path) -> None:
    records = [{"id": f"q{number}", "prompt": "import os" * (3 - number)} for number in range(3)]
    (tmp_path / "p.json").write_text(json.dumps(records))
    words = ("task=generate", "model=tiny-draft", "draft=none", "device=cpu", "batch_size=2", "max_new_tokens=4")
    files = (f"prompts={tmp_path / 'p.json'}", f"run_dir={tmp_path / 'run'}")
    ended = launch(*words, *files, "format=jsonl", "in_order=true")
    assert ended.code == 0, ended.err
    assert [json.loads(line)["id"] for line in ended.out.splitlines()] == ["q0", "q1", "q2"]
    fields = {line["index"]: line["fields"] for line in ended.lines}
    assert fields == {number: {"id": f"q{number}"} for number in range(3)}


@pytest.mark.heavy
def test_messages_are_completed_recorded_and_compared_when_a_run_is_resumed(tmp_path: Path) -> None:
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "chat_template.jinja").write_text(template)
    words = ("task=generate", "model=local", f"model.path={folder}", "draft=none", "device=cpu", "max_new_tokens=4")

    def ask(name: str, *records: dict[str, Any]) -> Ended:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return launch(*words, f"prompts={tmp_path / f'{name}.jsonl'}", f"run_dir={tmp_path / name}")

    system, *turns = ({"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "b")))
    first, second = ask("chat", {"messages": [system, *turns]}).lines
    assert (first["messages"], second["messages"], second["turn"]) == ([system], [system, turns[0]], 1)
    whole = f"system: s\nuser: a\nassistant: {first['text']}\nuser: b\nassistant: "
    assert ask("alone", {"prompt": "x"}, {"prompt": whole}).lines[1]["token_ids"] == second["token_ids"]
    refused = ask("chat", {"messages": [{**system, "content": "t"}, *turns]})
    assert refused.code == 2
    assert "was 'system: s\\na'" in refused.err


PAIR = ("task=compare", "model=tiny", "draft=tiny-draft", "hardware=laptop_cpu")
ELSEWHERE = ("task=compare", "model=7B", "draft=tinyllama_1B", "hardware=8xa100_80gb")


@pytest.mark.seconds
def test_a_run_is_planned_with_its_own_ranks_and_with_graphs_where_it_captures_them() -> None:
    (config, _), machine = compose_run(*PAIR), hardware.load("laptop_cpu")
    plan = task.plan_of_run(config, world_size=2, machine=machine, lengths=[40])
    assert {rank.capacity_bytes for rank in plan.ranks} == {(machine.memory_bytes - machine.system_bytes) // 2}
    config.placement.draft.ranks = [1]
    for device, asked, planned in (("cpu", True, False), ("cuda", True, True), ("cuda", False, False)):
        config.cuda_graphs = asked
        job = make_spec(config, world_size=2, prompt_tokens=50, device=device)
        assert (job.target_ranks, job.draft_ranks, job.cuda_graphs) == ((0, 1), (1,), planned)


def test_a_forecast_counts_whole_completions_as_the_summary_does() -> None:
    config, _ = compose_run(*PAIR)
    timed = task.plan_of_run(config, world_size=1, machine=hardware.load("laptop_cpu"), lengths=[40]).timing
    forecast = task.forecast(timed)
    assert forecast.plain_ms_per_token == pytest.approx(1e3 * timed.plain_run_s)
    assert timed.speculative_run_s
    assert forecast.speedup == pytest.approx(timed.plain_run_s / timed.speculative_run_s)
    alone = task.forecast(replace(timed, speculative_run_s=None))
    assert (alone.speculative_ms_per_token, alone.speedup) == (None, None)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ((f"task.default_prompts=[{'x' * 30},{'y' * 299}]",), 100),
        ((f"prompt={'z' * 59}",), 20),
        (("prompts=-",), 128),
        (("prompts={}/file",), 41),
    ],
)
def test_the_longest_prompt_is_estimated_from_its_text(words: tuple[str, ...], tokens: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a\n" + "b" * 60 + "\u2028" + "b" * 59)  # one line has 120 characters
    ended = launch(*ELSEWHERE, *(word.format(tmp_path) for word in words), "dry_run=true")
    assert f"about {tokens} + 64 tokens" in " ".join(ended.out.split())


@pytest.mark.seconds
@pytest.mark.parametrize("words", [(), ("hydra/launcher=slurm", "-m")], ids=["run", "job"])
def test_prompts_that_the_run_refuses_are_refused_by_its_plan(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("def factorial(n):\n" + "import os " * 3000)
    given = ["task=generate", f"prompts={tmp_path}/long.txt", "dry_run=true", "hardware=8xa100_80gb", *words]
    ended = launch(*given, f"run_dir={tmp_path}/runs")
    ended.check_refusal(
        "prompt 'import os", "has 6001 tokens, and with max_new_tokens=64 that is more than the context"
    )


def test_a_plan_counts_tokens_by_the_tokenizer_and_says_what_it_cannot_count(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("import os " * 3000)
    few = launch("task=generate", "prompt=import os", "dry_run=true")
    assert ", 3 + 64 tokens" in " ".join(few.out.split())
    many = launch(f"prompts={tmp_path}/long.txt", *ELSEWHERE, "dry_run=true", "max_new_tokens=8")
    shown = " ".join(many.out.split())
    assert "about 10001 + 8 tokens" in shown
    assert "warning: the run refuses prompts of more than 2040 tokens, and without a tokenizer here line 1" in shown


@pytest.mark.parametrize("auto", [True, False])
def test_ranks_that_were_not_started_hold_nothing(auto: bool, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = compose_run("model=30B", "draft=7B", "hardware=8xa100_80gb", f"placement.auto={auto}")
    task.dry_run(config, world_size=4)
    shown = capsys.readouterr().out
    assert ("ranks 2-3" in shown, "4-7" in shown) == (True, False)
    chosen = task.choose_for_run(config, world_size=4, on_cpu=False)[0]
    assert chosen.layout.ranks == (0, 1, 2, 3)


@pytest.mark.seconds
def test_a_dry_run_says_how_long_its_prompts_and_its_loading_take(capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB of the target, 2.5 of the draft, and 0.5 for each further copy of its embedding."""
    pair = ("model=llama3_70B", "draft=llama3_1B", "hardware=4xh100", "placement=sharded")
    config, _ = compose_run(*pair, "task.default_prompts=[x,y]", "num_samples=5000", "batch_size=4")
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
