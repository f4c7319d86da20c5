"""Ours next to gpt-fast, transformers and vLLM on one GPU: `python -m benchmarks.gpu_peers --gpt-fast DIR`.

Each peer is a process. All have the same sizes, and all but gpt-fast read the same two checkpoints in bf16. All warm up
side by side, since compiling takes minutes; then each is measured alone, in turns, while the others wait. Whatever is
not here, fails, or gives no answer in time is a line with its reason. LLAMA_SSP_VLLM_PYTHON names vLLM's interpreter.

A name of the catalogue stands for synthetic weights of its shape; `--agreement` sets how many drafted tokens are
accepted, by all peers alike. Two folders are a real pair.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatch
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks import vllm_peer
from benchmarks.decoding import AGREEMENT, TEXT
from benchmarks.gpu_peers.workers import ASSISTED, DEVICE, DYNAMIC, PLAIN, SPECULATIVE, STATIC
from benchmarks.measured import ROOT, Row, store
from benchmarks.peer_process import PeerError, PeerProcess
from benchmarks.peers import weights_bytes
from benchmarks.readme import gpu_peers_text
from llama_ssp import catalogue
from llama_ssp.api.arguments import entry_of
from llama_ssp.architectures.model_files import GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from llama_ssp.reports.provenance import processor
from llama_ssp.run.calibration import copy_bytes_per_s
from llama_ssp.weights.checkpoint import SINGLE_FILE
from llama_ssp.weights.hub import WEIGHTS
from llama_ssp.weights.source import WeightSource

LOGS = ROOT / "outputs" / "gpu_peers"
VLLM_CACHE_BYTES, VLLM_MORE_BYTES = 2**30, 5 * 2**30
Request = dict[str, Any]


class Peer(NamedTuple):
    """A process that serves some modes, or the reason why it cannot start."""

    name: str
    modes: Sequence[str]
    command: Sequence[str] = ()
    absent: str | None = None

    def line(self, mode: str) -> str:
        """The name of a line of the table."""
        return f"{self.name}, {mode}"


Running = list[tuple[Peer, PeerProcess]]


def peers_of(arguments: argparse.Namespace, folders: Sequence[Path], *, num_slots: int, num_bytes: int) -> list[Peer]:
    """All peers in the order of the table; `num_bytes` are the weights of both models."""
    checkout, num_draft_tokens = arguments.gpt_fast, arguments.num_draft_tokens
    settings = {
        "folders": [*map(str, folders)],
        "num_draft_tokens": num_draft_tokens,
        "num_slots": num_slots,
        "gpt_fast": str(checkout and checkout.resolve()),
    }

    def here(name: str, *modes: str, absent: str | None = None) -> Peer:
        command = [sys.executable, "-m", "benchmarks.gpu_peers.workers", name, json.dumps(settings)]
        return Peer(name, modes, command, absent)

    def vllm(mode: str, **more: object) -> Peer:
        if DEVICE.type == "cuda":  # it asks for a share of the GPU, which the others use too
            share = (num_bytes + VLLM_MORE_BYTES) / torch.cuda.get_device_properties(DEVICE).total_memory
            more |= {"gpu_memory_utilization": share, "kv_cache_memory_bytes": VLLM_CACHE_BYTES}
        command = vllm_peer.command(str(folders[0]), num_rows=1, num_slots=num_slots, **more)
        return Peer("vLLM", [mode], command, None if vllm_peer.PYTHON else "LLAMA_SSP_VLLM_PYTHON is not set")

    drafting = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": num_draft_tokens}
    no_checkout = None if checkout and (checkout / "generate.py").is_file() else "--gpt-fast names no checkout"
    found = [
        here("llama-ssp", PLAIN, SPECULATIVE),
        here("gpt-fast", PLAIN, absent=no_checkout),
        here("transformers", DYNAMIC, STATIC, ASSISTED),
        vllm(PLAIN),
        vllm(SPECULATIVE, speculative_config=drafting | {"max_model_len": num_slots}),
    ]
    chosen = [
        [mode for mode in peer.modes if any(fnmatch(peer.line(mode), only) for only in arguments.only)]
        for peer in found
    ]
    return [peer._replace(modes=modes) for peer, modes in zip(found, chosen, strict=True) if modes]


def start(peers: Sequence[Peer], *, kept: ExitStack, lost: dict[str, str]) -> Running:
    """Start the peers that are here; `lost` gets the reasons of the others, by line."""
    running = []
    LOGS.mkdir(parents=True, exist_ok=True)
    for peer in peers:
        if peer.absent:
            lost |= {peer.line(mode): f"not here: {peer.absent}" for mode in peer.modes}
        else:
            running.append((peer, PeerProcess(peer.command, log=LOGS / f"{peer.line(peer.modes[0])}.txt")))
            kept.callback(running[-1][1].close)
    return running


def warm(
    running: Running, turns: Sequence[Sequence[Request]], *, limit_s: float, lost: dict[str, str]
) -> dict[str, str]:
    """Let all make the completions of some turns, side by side; returns the versions of those that have started."""
    found = dict[str, str]()
    for (peer, process), request in product(running, requests := [*chain(*turns)]):
        for mode in peer.modes:
            process.ask(mode=mode, **request)
    for peer, process in running:
        with suppress(PeerError):  # which each of its completions raises again
            found[peer.name] = process.answer(limit_s)["version"]
        for _, mode in product(requests, peer.modes):
            try:
                process.answer(limit_s)
            except PeerError as error:
                lost.setdefault(peer.line(mode), f"failed: {error}")
    return found


def measure(running: Running, turns: Sequence[Sequence[Request]], *, limit_s: float, lost: dict[str, str]) -> list[Row]:
    """Let one line after the other complete, each turn beginning with another one; returns the cells of the table."""
    lines = [(peer.line(mode), mode, process) for peer, process in running for mode in peer.modes]
    cells = dict[tuple[str, float], Row]()
    for number, requests in enumerate(turns):
        first = number % max(1, len(lines))
        for (name, mode, process), request in product([*lines[first:], *lines[:first]], requests):
            if name in lost:
                continue
            try:
                process.ask(mode=mode, **request)
                answer = process.answer(limit_s)
            except PeerError as error:
                lost[name] = f"failed: {error}"
                continue
            temperature, num_new = request["temperature"], request["max_new_tokens"]
            cell = {"line": name, "drafts": mode in {SPECULATIVE, ASSISTED}, "temperature": temperature}
            cell = cells.setdefault((name, temperature), cell | {"first_s": [], "s": [], "rounds": []})
            cell["first_s" if num_new == 1 else "s"].append(answer["s"])
            if num_new > 1:
                cell["rounds"].append(answer["rounds"] or num_new - 1)
    return [cell for cell in cells.values() if cell["line"] not in lost]


def turns_of(arguments: argparse.Namespace, ids: Sequence[int], *, num_tokens: int) -> list[list[Request]]:
    """The requests of each turn and of two more: a token, then all, at each temperature, behind ever another prompt.

    A completion of one token takes as long as the first token of a longer one. Ours would not read a prompt twice.
    """
    from llama_ssp.extensions.benchmark.benchmark import cut

    kinds = [*product(range(arguments.turns + 2), arguments.temperatures, (1, arguments.max_new_tokens))]
    prompts = cut(ids, num_prompts=len(kinds), num_tokens=num_tokens)
    requests = [
        {"prompts": [prompt], "temperature": temperature, "max_new_tokens": number, "seed": turn}
        for prompt, (turn, temperature, number) in zip(prompts, kinds, strict=True)
    ]
    return [[request for request in requests if request["seed"] == turn] for turn in range(arguments.turns + 2)]


def prepare(names: Sequence[str], *, agreement: float) -> dict[Path, WeightSource]:
    """Make the folders of two names of the catalogue without weights; returns them, and what `write_weights` writes."""
    from llama_ssp.extensions.synthetic.source import synthesize

    sources = synthesize([shape for name in names if (shape := catalogue.load(name).shape)], agreement=agreement)
    parent, found = LOGS / f"{'-'.join(names)}-{agreement:g}", dict[Path, WeightSource]()
    for name, source in zip(names, sources, strict=True):
        found[folder := parent / name] = source
        folder.mkdir(parents=True, exist_ok=True)
        for file in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE):
            shutil.copyfile(source.folder / file, folder / file)
        config = source.config
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
        config.save_pretrained(folder)
    return found


def write_weights(folder: Path, source: WeightSource, *, device: torch.device) -> None:
    """Write weights, made on a device, unless they are there; the folder has them from one moment to the next."""
    if not any(folder.glob(WEIGHTS)):
        tensors = {name: source.read(name, dtype=torch.bfloat16, device=device).cpu() for name in source.tensors}
        save_file(tensors, folder / "unfinished", metadata={"format": "pt"})
        (folder / "unfinished").rename(folder / SINGLE_FILE)


def compare(arguments: argparse.Namespace) -> Row:
    """Measure behind every prompt length."""
    names, num_new, turns = (arguments.target, arguments.draft), arguments.max_new_tokens, arguments.turns
    is_real = all(Path(name).is_dir() for name in names)
    sources = {} if is_real else prepare(names, agreement=arguments.agreement)
    folders = [Path(name).resolve() for name in names] if is_real else [*sources]
    ids = AutoTokenizer.from_pretrained(folders[0])(TEXT).input_ids
    entries = [entry_of("model", name, dtype="bf16", quantization=None, cache_dtype=None) for name in names]
    sizes = [weights_bytes(entry, device=DEVICE.type) for entry in entries]
    cells, copies, found, lost = list[Row](), list[float](), dict[str, str](), dict[str, str]()
    for length in arguments.prompt_tokens:
        *measured, almost, last = turns_of(arguments, ids, num_tokens=length)
        num_slots = length + num_new + arguments.num_draft_tokens + 1
        with ExitStack() as kept:
            peers = peers_of(arguments, folders, num_slots=num_slots, num_bytes=sum(sizes))
            running = start(peers, kept=kept, lost=lost)
            for folder, source in sources.items():
                write_weights(folder, source, device=DEVICE)
            found |= warm(running, [almost, last], limit_s=arguments.warm_limit, lost=lost)
            print(f"warm behind {length} tokens: {found}", flush=True)
            while arguments.wait and not arguments.wait.exists():
                time.sleep(0.05)
            copies.append(copy_bytes_per_s(DEVICE))
            new = measure(running, measured, limit_s=arguments.limit, lost=lost)
            copies.append(copy_bytes_per_s(DEVICE))
        cells += [cell | {"prompt_tokens": length} for cell in new]
    return {
        "target": names[0],
        "draft": names[1],
        "agreement": None if is_real else arguments.agreement,
        "num_draft_tokens": arguments.num_draft_tokens,
        "max_new_tokens": num_new,
        "turns": turns,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor(),
        "copy_bytes_per_s": max(copies),
        "target_bytes": sizes[0],
        "draft_bytes": sizes[1],
        "peers": {"torch": torch.__version__} | found,
        "cells": cells,
        "lost": lost,
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="7B", help="a name of the catalogue or a folder; so is --draft")
    parser.add_argument("--draft", default="tinyllama_1B")
    parser.add_argument("--agreement", type=float, default=AGREEMENT)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[6, 512])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="lines, also by patterns: 'vLLM*'")
    parser.add_argument("--gpt-fast", type=Path, metavar="DIR", help="a checkout of it")
    parser.add_argument("--warm-limit", type=float, default=600.0, metavar="S", help="of a completion until it is warm")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="of a measured completion")
    parser.add_argument("--wait", type=Path, metavar="FILE", help="measure once it exists")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/gpu_peers.jsonl")
    arguments = parser.parse_args()
    row = compare(arguments)
    print(gpu_peers_text(row))
    if arguments.store:
        store("gpu_peers", row)


if __name__ == "__main__":
    main()
