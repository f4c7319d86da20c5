"""Servers of one and of two ranks give the same texts, whatever else they serve, and end as runs do."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.starters import run_program

pytestmark = pytest.mark.slow
PROMPTS = ["def factorial(n):\n", "import os\n", "class Stack:\n", "for i in range("]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0, "top_k": 9},
    {"temperature": 1.3, "logprobs": 1}, {"temperature": 0.9, "frequency_penalty": 0.5},
]  # fmt: skip
MIXED = [
    {"prompt": PROMPTS[place % 4], "max_tokens": 8 + place % 9, "seed": place, **KINDS[place % 5]}
    for place in range(200)
]


@contextmanager
def serving(num_ranks: int, run_dir: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of so many ranks, and its address."""
    command = [sys.executable, "-m", "llama_ssp", "serve", "port=0", f"ranks={num_ranks}", f"run_dir={run_dir}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        found = next(filter(None, (re.search(r"serving on (http\S+);", line) for line in process.stderr)))
        try:
            yield process, found[1]
        finally:
            process.kill()


def ask(address: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_two_hundred_mixed_requests_have_one_text_alone_on_one_and_two_ranks_and_in_a_batch(tmp_path: Path) -> None:
    found = []
    for num_ranks in (1, 2):
        with serving(num_ranks, tmp_path / f"{num_ranks}") as (process, address), ThreadPoolExecutor(24) as pool:
            found.append(list(pool.map(lambda body: ask(address, body), MIXED)))
            assert [ask(address, body) for body in MIXED[:20]] == found[-1][:20]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 4
    assert found[0] == found[1]
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


def test_a_lost_rank_ends_the_server(tmp_path: Path) -> None:
    with serving(2, tmp_path / "run") as (process, address):
        ask(address, MIXED[1])
        log = (tmp_path / "run" / "ranks" / "001.log").read_text()
        lost = re.search(r"process (\d+)", log)
        assert lost
        os.kill(int(lost[1]), signal.SIGKILL)
        assert process.wait(60) == 1
