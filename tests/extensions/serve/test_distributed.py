"""Servers of one and of two ranks give the same texts, whatever else they serve, and end as runs do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from llama_ssp import load
from llama_ssp.registry import PLUGINS
from tests.extensions.serve.server import JSON
from tests.helpers.disturbed import wait_for
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.starters import run_program

PROMPTS = ["def factorial(n):\n", "import os\n", "class Stack:\n", "for i in range("]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 9},
    {"temperature": 1.3, "logprobs": 1},
    {"temperature": 0.9, "frequency_penalty": 0.5},
]
MIXED = [
    {"prompt": PROMPTS[place % 4], "max_tokens": 8 + place % 9, "seed": place, **KINDS[place % 5]}
    for place in range(200)
]


@contextmanager
def serving(num_ranks: int, run_dir: Path, *settings: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of so many ranks, and its address."""
    command = [sys.executable, "-m", "llama_ssp", "serve", "port=0", f"ranks={num_ranks}", f"run_dir={run_dir}"]
    command += settings
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        found = next(filter(None, (re.search(r"serving on (http\S+);", line) for line in process.stderr)))
        try:
            yield process, found[1]
        finally:
            process.kill()


def ask(address: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.slow
def test_two_hundred_mixed_requests_have_one_text_alone_on_one_and_two_ranks_in_stages_and_in_a_batch(
    tmp_path: Path,
) -> None:
    found = []
    for num_ranks, *words in ((1,), (2,), (2, "placement.target.stages=2", "placement.target.groups=2")):
        place = tmp_path / f"{num_ranks} {len(words)}"
        with serving(num_ranks, place, *words) as (process, address), ThreadPoolExecutor(24) as pool:
            found.append(list(pool.map(lambda body: ask(address, body), MIXED)))
            assert [ask(address, body) for body in MIXED[:20]] == found[-1][:20]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 4
    assert found[0] == found[1] == found[2]
    (tmp_path / "batch.jsonl").write_text(
        "\n".join(
            json.dumps({"custom_id": f"{place}", "method": "POST", "url": "/v1/completions", "body": body})
            for place, body in enumerate(MIXED)
        )
    )
    done = run_program("run", "task=generate", "ranks=2", "batch_size=8", "prompts=batch.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    texts = {
        int(one["custom_id"]): one["response"]["body"]["choices"] for one in map(json.loads, done.stdout.splitlines())
    }
    assert [texts[place][0]["text"] for place in range(len(MIXED))] == found[0]


@pytest.mark.slow
def test_a_lost_rank_ends_the_server(tmp_path: Path) -> None:
    with serving(2, tmp_path / "run") as (process, address):
        ask(address, MIXED[1])
        log = (tmp_path / "run" / "ranks" / "001.log").read_text()
        lost = re.search(r"process (\d+)", log)
        assert lost
        os.kill(int(lost[1]), signal.SIGKILL)
        assert process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_interrupt_ends_what_runs(num_ranks: int, tmp_path: Path) -> None:
    with serving(num_ranks, tmp_path, "timeouts.drain_s=600") as (process, address), ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, address, {"prompt": PROMPTS[0], "max_tokens": 1900, "n": 100, "ignore_eos": True})
        wait_for(lambda: "llama_ssp_running 8.0" in page(address))
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert not long.done()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 4
        with pytest.raises(HTTPError, match="503") as caught:
            long.result()
        caught.value.close()


def page(address: str) -> str:
    with urllib.request.urlopen(address.replace("/v1", "/metrics"), timeout=60) as answer:
        return str(answer.read())


# Rows with top_k=7 are NaN; prompts that begin with token 7 find no memory, with token 8 on the last rank alone.
_FAULTY = """
import math, os, torch
from llama_ssp.speculate.engine import state
from llama_ssp.speculate.engine.round import Round
settings_of, prefill = state.settings_of, Round.prefill
def of(sampling):
    settings = settings_of(sampling)
    return [math.nan, *settings[1:]] if sampling and sampling.top_k == 7 else settings
def read(self, executor, batch, prompts, *given, **how):
    is_last = int(os.environ.get("RANK", 0)) + 1 == int(os.environ.get("WORLD_SIZE", 1))
    if (prompts.tokens_BS[:, 0] == 7).any() or (is_last and (prompts.tokens_BS[:, 0] == 8).any()):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    prefill(self, executor, batch, prompts, *given, **how)
state.settings_of, Round.prefill = of, read
"""


@pytest.mark.parametrize("num_ranks", [heavy(1), slow(2)])
def test_lines_that_fail_end_alone_on_all_ranks(num_ranks: int, tmp_path: Path) -> None:
    """But where memory is too small on one rank alone, which ends the run on all."""
    (tmp_path / "faulty.py").write_text(_FAULTY)
    wrong: dict[str, dict[str, Any]] = {"nan": {"top_k": 7}, "memory": {"prompt": [7, 9, 11]}}
    of_one: dict[str, dict[str, Any]] = {"one rank": {"prompt": [8, 9, 11]}} if num_ranks > 1 else {}

    def answers(name: str, bodies: dict[str, dict[str, Any]], code: int = 0) -> dict[str, tuple[int, Any]]:
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(
                json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})
                for custom_id, body in bodies.items()
            )
        )
        words = ["task=generate", f"ranks={num_ranks}", "batch_size=3", f"prompts={name}.jsonl", f"run_dir={name}"]
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        done = run_program("run", *words, cwd=tmp_path, more={PLUGINS: "faulty", "PYTHONPATH": path})
        assert done.returncode == code, done.stderr
        assert ("out of memory" in done.stderr) == (code > 0)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}

    sound = {f"{place}": body for place, body in enumerate(MIXED[:9])}
    lines = {name: {"max_tokens": 9, "prompt": PROMPTS[0], **body} for name, body in wrong.items()} | sound
    found, pair = answers("mixed", lines), load("tiny", "tiny-draft")
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(wrong, 500) | dict.fromkeys(
        sound, 200
    )
    assert "token 1: logits became NaN" in found["nan"][1]["error"]["message"]
    assert "out of memory" in found["memory"][1]["error"]["message"]
    for name, body in sound.items():
        given = {key: value for key, value in body.items() if key not in {"prompt", "max_tokens", "logprobs"}}
        [own] = pair.generate(body["prompt"], max_new_tokens=body["max_tokens"], **given)
        assert found[name][1]["choices"][0]["text"] == own.text
    for name, body in of_one.items():
        answers("alone", {"first": MIXED[0], name: body}, code=3)
