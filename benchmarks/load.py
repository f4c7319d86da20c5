"""Many clients of a server at once: lost and wrong answers, memory, and what plain rows pay for drafts of others.

    .venv/bin/python -m benchmarks.load                            64 clients for 10 minutes, then plain rows alone
    .venv/bin/python -m benchmarks.load --clients 16 --seconds 60  a shorter one; --store keeps the figures

A third of the requests is decoded without drafts, a fifth has settings of its own, and one in twenty is a long stream
whose client goes after its first bytes. Each text has to be the one that its request has alone.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.measured import ROOT, store

PROMPTS = ("def factorial(n):\n", "import os\n", "class Stack:\n", "for i in range(", "x = [")
OWN: tuple[dict[str, Any], ...] = (
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"5": 2.5}},
    {"temperature": 0},
)
BODIES: tuple[dict[str, Any], ...] = tuple(
    {"prompt": PROMPTS[number % 5], "max_tokens": 4 + number % 29, "seed": number, "temperature": 0.9}
    | ({"speculative": False} if number % 3 == 0 else {})
    | (OWN[number // 5 % 7] if number % 5 == 0 else {})
    for number in range(105)
)
PLAIN = {"speculative": False}
CANCELLED, LONG_TOKENS, LIMIT_S = 0.05, 400, 900.0
_PARTS, _MIB, _MOST_MIB, _MOST_TIMES = (0.3, 0.6, 0.95), 1 << 20, 64, 1.05


@dataclass
class Report:
    """What clients have seen: answers that were wrong, and seconds to first bytes of streams and ends of answers.

    `ms_per_token` is of streams without drafts, after the first token.
    """

    wrong: list[object] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    ms_per_token: list[float] = field(default_factory=list)


@contextmanager
def asked(port: int, body: Mapping[str, object]) -> Iterator[HTTPResponse]:
    """The answer to a request for a completion, on a connection of its own."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()


def text_of(port: int, body: Mapping[str, object]) -> str:
    """The text of a whole answer, or its error."""
    with asked(port, body) as answer:
        content = json.loads(answer.read())
    return str(content["choices"][0]["text"] if answer.status == 200 else content)


def _streamed(port: int, body: Mapping[str, object]) -> tuple[str, float | None]:
    """The text of a stream, and its milliseconds per token after the first event; None for fewer than two tokens."""
    text, arrived_s, num_tokens = "", list[float](), 0
    with asked(port, {**body, "stream": True, "stream_options": {"include_usage": True}}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", ()):
                    text += choice["text"]
                    arrived_s.append(time.perf_counter())
    if num_tokens < 2:
        return text, None
    return text, 1e3 * (arrived_s[-1] - arrived_s[0]) / (num_tokens - 1)


def load(
    port: int, bodies: Sequence[Mapping[str, Any]], texts: Sequence[str], *, num_clients: int, seconds: float
) -> Report:
    """Ask by many clients for some time, and wait for all answers; those without drafts are streamed."""
    report, ends_s = Report(), time.monotonic() + seconds

    def client(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() < ends_s:
            place, started_s, ms = chosen.randrange(len(bodies)), time.monotonic(), None
            body = bodies[place]
            if chosen.random() < CANCELLED:
                with asked(port, {**body, "max_tokens": LONG_TOKENS, "stream": True}) as answer:
                    found = answer.read(20)
                report.first_s.append(time.monotonic() - started_s)
                if not found.startswith(b"data: {"):
                    report.wrong.append((body, found))
                continue
            if body.get("speculative") is False:
                text, ms = _streamed(port, body)
            else:
                text = text_of(port, body)
            report.whole_s.append(time.monotonic() - started_s)
            report.ms_per_token += [] if ms is None else [ms]
            if text != texts[place]:
                report.wrong.append((body, text, texts[place]))

    with ThreadPoolExecutor(num_clients) as pool:
        for running in [pool.submit(client, number) for number in range(num_clients)]:
            running.result()
    return report


@contextmanager
def server(*settings: str) -> Iterator[tuple[int, int]]:
    """A server of the shipped pair in processes of its own: its port, and the number of their group."""
    command = [sys.executable, "-m", "llama_ssp", "serve", "port=0", *settings]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stderr
            found = next(filter(None, (re.search(r"serving on http://\S+:(\d+)/", line) for line in process.stderr)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(found[1]), process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def anonymous_bytes(group: int) -> int:
    """Anonymous resident memory of the processes of a group."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                words = (folder / "status").read_text().partition("RssAnon:")[2].split()
                found += int(words[0]) * 1024 if words else 0
        except OSError:  # it has ended
            continue
    return found


def main() -> int:
    """Load a server, print what was found; 1 if it is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    begun, memory = os.getloadavg()[0], list[int]()
    with server("model=tiny", "draft=tiny-draft", f"batch_size={given.rows}") as (port, group):
        texts = [text_of(port, body) for body in BODIES]
        plain_texts = [text_of(port, body | PLAIN) for body in BODIES]

        def watch() -> None:
            started = time.monotonic()
            for part in _PARTS:
                time.sleep(max(started + part * given.seconds - time.monotonic(), 0))
                memory.append(anonymous_bytes(group))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        mixed = load(port, BODIES, texts, num_clients=given.clients, seconds=given.seconds)
        watching.join()
        plain = load(
            port, [body | PLAIN for body in BODIES], plain_texts, num_clients=given.clients, seconds=given.seconds / 5
        )
        with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            left = re.findall(r"^llama_ssp_(?:running|waiting) (\S+)$", page.read().decode(), re.MULTILINE)
    times = statistics.median(mixed.ms_per_token) / statistics.median(plain.ms_per_token)
    row = {
        "clients": given.clients,
        "seconds": given.seconds,
        "rows": given.rows,
        "load_before": begun,
        "load_after": os.getloadavg()[0],
        "whole": len(mixed.whole_s),
        "cancelled": len(mixed.first_s),
        "wrong": len(mixed.wrong) + len(plain.wrong),
        "left": left,
        "first_s": _spread(mixed.first_s),
        "whole_s": _spread(mixed.whole_s),
        "MiB": [each // _MIB for each in memory],
        "plain_ms_per_token": _spread(mixed.ms_per_token),
        "alone_ms_per_token": _spread(plain.ms_per_token),
        "times_alone": round(times, 3),
    }
    print(json.dumps(row, indent=1), *(mixed.wrong + plain.wrong)[:5], sep="\n")
    if given.store:
        store("load", row)
    is_flat = memory[2] - memory[1] < _MOST_MIB * _MIB
    return 0 if not row["wrong"] and is_flat and {*left} == {"0.0"} and times <= _MOST_TIMES else 1


def _spread(found: Sequence[float]) -> list[float]:
    """Median, 95th percentile and most."""
    ordered = sorted(found)
    return [round(ordered[int(part * (len(ordered) - 1))], 3) for part in (0.5, 0.95, 1.0)]


if __name__ == "__main__":
    sys.exit(main())
