"""Batches: new tokens a second by rows at once, plain and speculative, next to transformers, llama.cpp and vLLM.

    .venv/bin/python -m benchmarks.batches          prints the tables
    .venv/bin/python -m benchmarks.batches --write  writes docs/benchmarks/batches.md

All candidates in turns. llama.cpp takes part where its packages are installed (`benchmarks.llama_cpp`), and vLLM where
`benchmarks.vllm_peer` finds its interpreter.
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import vllm_peer
from benchmarks.acceptance import kinds_of_text
from benchmarks.decoding import ours, peers_of
from benchmarks.llama_cpp import IS_INSTALLED, LlamaCpp
from benchmarks.llama_cpp import write as write_gguf
from benchmarks.measured import markdown, page_of, show
from benchmarks.peer_process import PeerProcess
from llama_ssp import Pair, catalogue, load
from llama_ssp.extensions.benchmark.benchmark import Ours, Peers, cut
from llama_ssp.run.calibration import interleave, median_ratio
from llama_ssp.run.requests import encode
from llama_ssp.settings.schema import SamplingConfig, SpeculationConfig
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights import hub

ROWS, PROMPT_TOKENS, NUM_NEW_TOKENS, TEMPERATURE, K = (1, 8, 32, 64), (16, 512), 32, 0.8, 4
MOST_TURNS, MOST_TOKENS = 6, 4096
"""Of a cell: small batches take more turns, up to so many tokens, prompts included."""
PLAIN, FAST, AUTO, GENERATE, ASSISTED, LLAMA_CPP, VLLM = (
    "plain",
    f"K={K}",
    "K=auto",
    "transformers",
    f"transformers, assisted, K={K}",
    "llama.cpp",
    "vLLM",
)
BEST = "the better of both"
LLAMAS = {"random-100M": (768, 8), "random-10M": (128, 2)}
"""Width and layers of random Llamas."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pair in one number format: what ours, transformers and llama.cpp make of the same files."""

    name: str
    folders: tuple[Path, Path]
    quantization: str | None
    peer_dtype: torch.dtype | None
    form: str

    def load(self) -> Pair:
        """Ours; the draft stays in 16 bits."""
        return load(*map(str, self.folders), quantization=(self.quantization, None))

    def load_peers(self) -> Peers | None:
        """Those of transformers, if it has the format."""
        return peers_of(self.folders, self.peer_dtype) if self.peer_dtype else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """New tokens a second of each turn, and tokens per round, by candidate; for `plain_share` see the function."""

    tokens_per_s: dict[str, list[float]]
    tokens_per_round: dict[str, float | None]
    plain_share: float

    def times(self, candidate: str, of: str) -> float:
        """How many times the speed of another a candidate has."""
        if of == BEST:
            of = max(PLAIN, FAST, key=lambda each: statistics.median(self.tokens_per_s[each]))
        return median_ratio(self.tokens_per_s[candidate], self.tokens_per_s[of])

    def ratio(self, candidate: str, of: str) -> str:
        """That number; none for a candidate that was not here."""
        return f"{self.times(candidate, of):.2f}" if candidate in self.tokens_per_s else ""


def cases() -> list[Case]:
    """The shipped pair, and a random one in two formats."""
    target, draft = (hub.resolve(catalogue.load(name)) for name in ("tiny", "tiny-draft"))
    large, small = map(random_checkpoint, LLAMAS)
    made = large, small
    return [
        Case(
            name="`tiny` with `tiny-draft`, 16 bits",
            folders=(target, draft),
            quantization=None,
            peer_dtype=torch.float32,
            form="BF16",
        ),
        Case(
            name="Random 100 M with 10 M, 16 bits",
            folders=made,
            quantization=None,
            peer_dtype=torch.bfloat16,
            form="BF16",
        ),
        Case(name="Random 100 M with 10 M, 8 bits", folders=made, quantization="int8", peer_dtype=None, form="Q8_0"),
    ]


def random_checkpoint(name: str) -> Path:
    """The folder of a random Llama in 16 bits, written where there is none; its tokenizer is that of `tiny`."""
    folder, (width, num_layers) = Path("outputs/random") / name, LLAMAS[name]
    if not folder.exists():
        unfinished, tiny = folder.with_name(f"{name}-unfinished"), hub.resolve(catalogue.load("tiny"))
        unfinished.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(tiny / file, unfinished / file)
        config = LlamaConfig(
            hidden_size=width,
            num_hidden_layers=num_layers,
            intermediate_size=4 * width,
            head_dim=32,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            vocab_size=32000,
            max_position_embeddings=1024,
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def candidates_of(pair: Pair, prompts: Sequence[tuple[int, ...]]) -> dict[str, Ours]:
    """Our candidates for one batch."""
    speculation = {
        PLAIN: None,
        FAST: SpeculationConfig(num_draft_tokens=K),
        AUTO: SpeculationConfig(num_draft_tokens="auto"),
    }
    base = replace(
        pair.config, sampling=SamplingConfig(temperature=TEMPERATURE), ignore_eos=True, batch_size=len(prompts)
    )
    found = {}
    requests = [Request(index=0, prompt_ids=prompts[0], max_new_tokens=NUM_NEW_TOKENS)]
    for name, each in speculation.items():
        config, speculative = replace(base, speculation=each or base.speculation), each is not None
        found[name] = ours(pair, config, prompts, num_new_tokens=NUM_NEW_TOKENS, speculative=speculative)
        with torch.inference_mode():
            found[name].decoder.warm_up(requests)
    return found


def measure(
    pair: Pair,
    peers: Peers | None,
    file: Path | None,
    vllm: PeerProcess | None,
    *,
    num_prompt_tokens: int,
    num_rows: int,
    turns: int,
) -> Cell:
    """All candidates in turns on one batch; `file` is the target's for llama.cpp."""
    text = encode("\n".join(kinds_of_text()["code"]), pair.models.tokenizer)
    prompts = cut(text, num_prompts=num_rows, num_tokens=num_prompt_tokens)
    own = candidates_of(pair, prompts)

    def mine(each: Ours, turn: int) -> float:
        return 1e3 / each.ms_per_token(turn)

    candidates: dict[str, Callable[[int], float]] = {name: partial(mine, each) for name, each in own.items()}
    if peers:
        run = partial(
            peers.ms_per_token, prompts, num_new_tokens=NUM_NEW_TOKENS, sampling=SamplingConfig(temperature=TEMPERATURE)
        )
        candidates[GENERATE] = lambda _: 1e3 / run(num_draft_tokens=None)
        if num_rows == 1:
            candidates[ASSISTED] = lambda _: 1e3 / run(num_draft_tokens=K)
    if vllm:
        complete = partial(
            vllm_peer.tokens_per_s, vllm, prompts, num_new_tokens=NUM_NEW_TOKENS, temperature=TEMPERATURE
        )
        candidates[VLLM] = lambda _: complete()
        complete()
    with ExitStack() as stack:
        if file:
            num_slots, num_threads = num_prompt_tokens + NUM_NEW_TOKENS, torch.get_num_threads()
            other = LlamaCpp(file, num_rows=num_rows, num_slots=num_slots, num_threads=num_threads)
            stack.callback(other.close)
            complete_all = partial(other.tokens_per_s, prompts, num_new_tokens=NUM_NEW_TOKENS, temperature=TEMPERATURE)
            candidates[LLAMA_CPP] = lambda turn: complete_all(seed=turn)
        of_a_turn = num_rows * (num_prompt_tokens + NUM_NEW_TOKENS)
        num_turns = max(turns, min(MOST_TURNS, MOST_TOKENS // of_a_turn))
        found = interleave(candidates, num_repetitions=num_turns, num_warmup=0)
    rounds = {name: each.tokens_per_round for name, each in own.items()}
    return Cell(tokens_per_s=found, tokens_per_round=rounds, plain_share=plain_share(own[AUTO]))


def plain_share(auto: Ours) -> float:
    """Share of plain rounds in the second half of its completions."""
    drafted = [k for done in auto.done for each in done for k in each.draft_lengths[len(each.draft_lengths) // 2 :]]
    return drafted.count(0) / len(drafted)


def page(tables: dict[tuple[str, int], dict[int, Cell]], *, turns: int, vllm: str | None) -> str:
    """The page of the docs, from the cells of each case and prompt length by rows."""
    others = f", llama-cpp-python {version('llama-cpp-python')}" if IS_INSTALLED else ""
    others += f", vLLM {vllm}" if vllm else ""
    absent = [name for name, is_there in ((LLAMA_CPP, IS_INSTALLED), (VLLM, vllm)) if not is_there]
    parts = []
    for (name, num_prompt_tokens), cells in tables.items():
        lines = []
        candidates = dict.fromkeys(candidate for cell in cells.values() for candidate in cell.tokens_per_s)
        for candidate in candidates:
            speeds = [cell.tokens_per_s.get(candidate) for cell in cells.values()]
            lines.append([candidate, *(f"{statistics.median(each):.0f}" if each else "" for each in speeds)])
        for candidate, other in [(FAST, PLAIN), (AUTO, BEST), *product((GENERATE, VLLM, LLAMA_CPP), [PLAIN])]:
            if candidate in candidates:
                lines.append([f"{candidate} / {other}", *(cell.ratio(candidate, other) for cell in cells.values())])
        lines += [
            [f"tokens per round, {FAST}", *(f"{cell.tokens_per_round[FAST] or 1:.2f}" for cell in cells.values())],
            [f"{AUTO}: plain rounds in the second half", *(f"{cell.plain_share:.0%}" for cell in cells.values())],
        ]
        losing = [rows for rows, cell in cells.items() if cell.times(FAST, PLAIN) < 1]
        said = f"Speculation with {FAST} loses from {losing[0]} rows on." if losing else f"{FAST} gains at all of them."
        heads = ["rows", *map(str, cells)]
        parts += [f"## {name}, prompts of {num_prompt_tokens} tokens", markdown(heads, lines), said]
    return page_of(
        "batches",
        prompts=" and ".join(map(str, PROMPT_TOKENS)),
        tokens=NUM_NEW_TOKENS,
        turns=turns,
        others=others,
        threads=torch.get_num_threads(),
        temperature=TEMPERATURE,
        tables="\n\n".join(parts),
        absent=f" Not installed: {' and '.join(absent)}." if absent else "",
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="of the largest batches")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPT_TOKENS, help="their tokens")
    parser.add_argument("--only", help="cases whose name has this text")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/batches.md")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    tables: dict[tuple[str, int], dict[int, Cell]] = {}
    vllm_version = None
    with tempfile.TemporaryDirectory() as kept:
        for case in cases():
            if arguments.only and arguments.only not in case.name:
                continue
            pair, peers, file = case.load(), case.load_peers(), None
            if IS_INSTALLED:
                write_gguf(case.folders[0], file := Path(kept) / f"{case.form}.gguf", case.form)
            vllm = None
            if vllm_peer.PYTHON and case.quantization is None:
                slots = max(arguments.prompts) + NUM_NEW_TOKENS
                command = vllm_peer.command(str(case.folders[0]), num_rows=max(arguments.rows), num_slots=slots)
                vllm = PeerProcess(command, VLLM_CPU_OMP_THREADS_BIND=f"0-{torch.get_num_threads() - 1}")
                vllm_version = vllm.answer()["version"]
            for length, rows in product(arguments.prompts, arguments.rows):
                print(f"timing {case.name}, prompts of {length} tokens, {rows} rows", flush=True)
                cell = measure(pair, peers, file, vllm, num_prompt_tokens=length, num_rows=rows, turns=arguments.turns)
                tables.setdefault((case.name, length), {})[rows] = cell
            if vllm:
                vllm.close()
    show(page(tables, turns=arguments.turns, vllm=vllm_version), page="batches.md", is_written=arguments.write)


if __name__ == "__main__":
    main()
