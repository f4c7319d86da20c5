"""`task=generate` answers OpenAI's batch files with the texts of `Pair.generate`, and goes on where it was stopped."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp import Pair
from llama_ssp.errors import ConfigError, InterruptedRun
from llama_ssp.extensions.serve.batch import complete_batch
from llama_ssp.extensions.serve.records import BATCH, ServeTimeouts
from llama_ssp.registry import PLUGINS, load_plugins
from llama_ssp.reports.folder import RunFolder
from llama_ssp.run.prompts import read_prompts
from llama_ssp.settings.checks import check
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.settings.tasks import SERVED_FIELDS
from llama_ssp.speculate.engine import state
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.speculate.sampling.by_row import settings_of
from tests.helpers.in_process import launch
from tests.helpers.repository import ROOT

PROMPT = "def factorial(n):\n"
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "top_p": 0.8, "n": 2},
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0.9},
]


def line(custom_id: object, body: object, *, method: str = "POST", url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


LINES = [line(f"{place}", {"prompt": PROMPT, "max_tokens": 12, **one}) for place, one in enumerate(ASKED)]
WRONG = {
    "[]": "custom_id",
    line(7, {}): "custom_id",
    line("0", {"prompt": "x"}): "custom_id",
    "{": "custom_id",
    line("get", {"prompt": "x"}, method="GET"): "url",
    line("url", {"prompt": "x"}, url="/v1/embeddings"): "url",
    line("top_p", {"prompt": "x", "top_p": 7}): "top_p",
    line("stream", {"prompt": "x", "stream": True}): "stream",
    line("chat", {"messages": [{"role": "user", "content": "x"}]}, url="/v1/chat/completions"): "messages",
    line("body", None): None,
    line("list", {"prompt": {"a": 1}}): "prompt",
}


def answered(pair: Pair, folder: Path, lines: Sequence[str], *, stops: bool = False) -> list[dict[str, Any]]:
    """The answers in the run folder after a run, in the order in which they were written."""
    folder.mkdir(exist_ok=True)
    (folder / "batch.jsonl").write_text("\n".join(lines))
    config = replace(pair.config, prompts=str(folder / "batch.jsonl"), batch_size=3, seed=40)
    config.timeouts = ServeTimeouts(drain_s=0.0)
    assert read_prompts(config) == []
    file = folder / "run" / BATCH.output
    with RunFolder(folder / "run", "") as run_folder:
        session: Any = SimpleNamespace(
            config=config,
            models=pair.models,
            world=pair.world,
            folder=run_folder,
            stop_request=StopRequest(requested=stops),
            terminal=SimpleNamespace(line=len, say=len),
        )
        complete_batch(session, [])
    return [*map(json.loads, file.read_text().splitlines())]


def test_another_task_says_which_one_reads_a_batch_file(tmp_path: Path) -> None:
    (tmp_path / "batch.jsonl").write_text(LINES[0])
    ended = launch("task=compare", f"prompts={tmp_path / 'batch.jsonl'}", f"run_dir={tmp_path / 'run'}")
    ended.check_refusal("for task=generate the lines of OpenAI's batch files are read")


@pytest.mark.seconds
def test_the_field_of_the_page_is_read_from_outside_the_package(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs/extending.md").read_text().partition("## A served field")[2]
    (tmp_path / "my_fields.py").write_text(section.partition("```py\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SERVED_FIELDS, "records", SERVED_FIELDS.all())
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.3, "greedy": True},
        {"greedy": 3},
        {"greedy": False},
    ]
    lines = [line(f"{place}", {"prompt": PROMPT, "max_tokens": 12, **one}) for place, one in enumerate(bodies)]
    [unknown] = [one["response"] for one in answered(pair, tmp_path, lines[1:2])]
    assert unknown["body"]["error"]["message"].startswith("unknown field 'greedy'")
    monkeypatch.setenv(PLUGINS, "my_fields")
    load_plugins()
    found = {one["custom_id"]: one["response"]["body"] for one in answered(pair, tmp_path / "with", lines)}
    assert found["0"]["choices"][0]["text"] == found["1"]["choices"][0]["text"]
    assert found["2"]["error"]["message"] == "greedy must be true or false"
    assert found["3"]["error"] | {"type": ""} == {
        "message": "greedy=false has no effect: leave it out",
        "param": "greedy",
        "type": "",
        "code": None,
    }


@pytest.mark.seconds
def test_answers_have_the_texts_of_runs_of_their_own(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at once, resumed behind a torn answer with another line, and without the server's libraries."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InterruptedRun, match="goes on from here"):
        answered(pair, tmp_path, [*LINES[:-1], *WRONG], stops=True)
    with (tmp_path / "run" / BATCH.output).open("a") as file:
        file.write('{"id": "batch_req_')
    lines = [*LINES[:-1], *WRONG, LINES[-1]]
    found = answered(pair, tmp_path, lines)
    by_id = {answer["custom_id"]: answer["response"] for answer in found}
    assert len({answer["id"] for answer in found}) == len(found) == len(lines)
    refused = [answer["response"] for answer in found if answer["response"]["status_code"] != 200]
    assert [answer["body"]["error"]["param"] for answer in refused] == [*WRONG.values()]
    for place, one in enumerate(ASKED):
        response, number = by_id[f"{place}"], lines.index(LINES[place])
        given: dict[str, Any] = {"seed": 40 + number} | one
        own = pair.generate(PROMPT, max_new_tokens=12, num_samples=given.pop("n", 1), **given)
        assert response["status_code"] == 200
        assert [choice["text"] for choice in response["body"]["choices"]] == [completion.text for completion in own]
        assert bool(response["body"]["choices"][0]["logprobs"]) == ("logprobs" in one)
    assert answered(pair, tmp_path, lines) == found
    with pytest.raises(ConfigError, match="answers to other lines"):
        answered(pair, tmp_path, LINES[1:])


def test_settings_that_bodies_have_are_refused(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "batch.jsonl").write_text(LINES[0])
    config = replace(pair.config, prompts=str(tmp_path / "batch.jsonl"), num_samples=2)
    with pytest.raises(
        ConfigError, match="num_samples has no effect on task=generate, whose requests come from a batch"
    ):
        check(config, frozenset({"num_samples"}), world_size=1)


@pytest.mark.seconds
def test_a_line_that_fails_is_answered_by_an_error_and_no_resumption_stops_there(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one of two samples, a template that fails; other lines have their texts."""

    def of(sampling: SamplingConfig | None) -> list[float]:
        settings = settings_of(sampling)
        return [math.nan, *settings[1:]] if sampling and sampling.top_k == 7 else settings

    monkeypatch.setattr(pair.tokenizer, "chat_template", "{{ messages[7].content.x }}")
    chat = line("chat", {"messages": [{"role": "user", "content": "x"}]}, url="/v1/chat/completions")
    lines = [line("nan", {"prompt": PROMPT, "top_k": 7, "n": 2}), chat, *LINES]
    with monkeypatch.context() as patch:
        patch.setattr(state, "settings_of", of)
        found = answered(pair, tmp_path, lines)
    by_id = {answer["custom_id"]: answer["response"] for answer in found}
    assert len(found) == len(lines) == len(by_id)
    assert {name: by_id[name]["status_code"] for name in ("nan", "chat")} == {"nan": 500, "chat": 400}
    assert "token 1: logits became NaN" in by_id["nan"]["body"]["error"]["message"]
    (tmp_path / "sound").mkdir()
    others = [line(name, {"prompt": "x", "max_tokens": 1}) for name in ("nan", "chat")]  # the seeds are by line
    sound = {one["custom_id"]: one["response"]["body"] for one in answered(pair, tmp_path / "sound", others + LINES)}
    for name in map(str, range(len(LINES))):
        assert by_id[name]["body"]["choices"] == sound[name]["choices"]
    assert answered(pair, tmp_path, lines) == found
