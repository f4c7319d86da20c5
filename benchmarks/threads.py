"""The number of threads that a run chooses, against fixed numbers, next to other busy programs.

    python -m benchmarks.threads [--turns 5]

None, one and two other processes keep a core busy. In each of these conditions every setting decodes in a process of
its own, in turns: all cores and one by `OMP_NUM_THREADS`, and the run's own choice. The first completion of a process
is left out; the figure of a turn is the mean of the others. Goals are those of two cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.measured import Goal, markdown, table_of_goals
from llama_ssp import load
from llama_ssp.run.calibration.model_pairs import RandomLlama
from llama_ssp.settings import catalogue
from llama_ssp.weights import hub

FOLDER = Path("outputs/threads")
RANDOM, RANDOM_100M, RANDOM_DRAFT = "random-300M", "random-100M", "random-10M"
LLAMAS = {
    RANDOM: RandomLlama(width=1024, num_layers=20, vocab_size=32000, from_16_bits=True),
    RANDOM_100M: RandomLlama(width=768, num_layers=8, vocab_size=32000, from_16_bits=True),
    RANDOM_DRAFT: RandomLlama(width=128, num_layers=2, vocab_size=32000, from_16_bits=True),
}
PROMPT, NEW_TOKENS = "def factorial(n):\n", {"tiny": 256, RANDOM: 64}
SECONDS = 2.0
MOST_BUSY, AT_MOST = 2, 1.3
CHOSEN = "chosen"
BUSY = "while True:\n    sum(range(10000))"
MODES = ("plain", "speculative")


def decode(target: str, draft: str, num_tokens: int) -> None:
    """Print the milliseconds per token of this process."""
    pair = load(target, draft)
    pair.generate(PROMPT, max_new_tokens=num_tokens)
    num_done, started = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - started) < SECONDS:
        (done,) = pair.generate(PROMPT, max_new_tokens=num_tokens, seed=num_done)
        num_done += len(done.token_ids)
    print(1e3 * taken_s / num_done)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep so many cores busy."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(models: tuple[str, str], threads: str, num_tokens: int) -> float:
    """Milliseconds per token in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads != CHOSEN:
        environment["OMP_NUM_THREADS"] = threads
    command = [sys.executable, "-m", "benchmarks.threads", "--decode", *models, str(num_tokens)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def random_checkpoint(name: str) -> str:
    """The folder of a random Llama in 16 bits, written where there is none; its tokenizer is that of `tiny`."""
    folder, llama = FOLDER / name, LLAMAS[name]
    if not folder.exists():
        unfinished, tiny = folder.with_name(f"{name}-unfinished"), hub.resolve(catalogue.load("tiny"))
        unfinished.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(tiny / file, unfinished / file)
        config = llama.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (unfinished / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        tensors = {each: llama.read(each) for each in llama.tensors}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(folder)
    return str(folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=["tiny", RANDOM], help="one target")
    parser.add_argument("--decode", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        target, draft, num_tokens = arguments.decode
        decode(target, draft, int(num_tokens))
        return
    goals, lines = [], []
    settings = [str(os.cpu_count()), "1", CHOSEN]
    for name in [arguments.only] if arguments.only else ["tiny", RANDOM]:
        pair = "tiny", "tiny-draft"
        if name == RANDOM:
            pair = random_checkpoint(RANDOM), random_checkpoint(RANDOM_DRAFT)
        for mode in MODES:
            for number in range(MOST_BUSY + 1):
                taken: dict[str, list[float]] = {setting: [] for setting in settings}
                with busy(number):
                    for turn in range(arguments.turns):
                        for setting in settings if turn % 2 else reversed(settings):
                            models = pair[0], pair[1] if mode == MODES[1] else "none"
                            taken[setting].append(measure(models, setting, NEW_TOKENS[name]))
                medians = [statistics.median(taken[setting]) for setting in settings]
                ratio = medians[2] / min(medians[:2])
                goals.append(Goal(f"{name}, {mode}, {number} busy", ratio, AT_MOST))
                lines.append([name, mode, number, *(f"{ms:.2f}" for ms in medians), f"{ratio:.2f}"])
                print(f"{name}, {mode}, {number} busy: {taken}")
    heads = ["target", "mode", "other processes", "all cores, ms/token", "1 thread", CHOSEN, "chosen / best"]
    print(markdown(heads, lines))
    print(table_of_goals(goals))


if __name__ == "__main__":
    main()
