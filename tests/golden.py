"""Records what the program says, so that a change of its shape can be held to it.

    python -m tests.golden OUT     # texts of runs, plans, sentences and exit codes, tables of reports
    diff -r OUT_BEFORE OUT_AFTER   # what a change has changed

Everything runs on one CPU and takes some minutes. Times are left out. Texts are those of fp32 and of formats whose
kernels give the same bits each time.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from llama_ssp import load
from tests.helpers.repository import ROOT

PROMPTS = ["def factorial(n):\n", "import os\nimport sys\nfrom", "12 * 34 ="]
FORMATS = ("none", "int8_weight_only", "int4_weight_only", "fp8_weight_only")
DRAFTS = (None, "tiny-draft", "tiny-eagle", "ngram")
RULES = ("speculative", "block", "coupled")
PLACEMENTS = {
    1: ["task=compare", "task=latency num_warmup=0 prompt=x", "draft=tiny-eagle speculation.tree=2x2x1"],
    2: [
        "placement=sharded",
        "placement=one_rank",
        "placement=own_gpu speculation.overlap=true",
        "placement=replicated",
    ],
    3: ["placement=sharded", "placement=replicas"],
    4: ["placement=own_gpu", "model.quantization=int8_weight_only"],
}
MODELS = (
    "7B",
    "30B draft=7B",
    "65B_8bit draft=7B",
    "llama3_70B draft=llama3_1B",
    "llama3_8B draft=eagle3_llama3_8B",
    "mixtral_8x7B",
    "qwen3_30B_A3B draft=qwen3_0.6B",
    "tiny",
    "tiny draft=ngram speculation.tree=3x1x1",
)
MACHINES = ("h100", "8xa100_80gb", "p4d_24xlarge", "laptop_cpu", "2xh200")
CHOICES = ("", "placement=sharded", "batch_size=16 speculation.num_draft_tokens=auto")
MISTAKES = (
    "run modle=7B",
    "run model=tinny",
    "run task=nothing",
    "run speculation.num_draft_tokens=0",
    "run draft=mtp",
    "run sampling.temperature=-1",
    "run placement=own_gpu",
    "run model=30B",
    "run prompts=missing.txt",
    "rnu",
    "plan model=65B draft=7B hardware=g5_12xlarge",
    "plan hardware=nothing",
    "report nowhere",
    "serve host=0.0.0.0",
    "calibrate model=7B",
    "run task=evaluate suite=x",
    "run max_new_tokens=100000",
    "run verification=block tree=2x2",
)
_TIMES = re.compile(r"\d+(\.\d+)?(e-?\d+)? ?(ms|s|x|tokens/s|GB/s|%)\b")


def texts() -> Iterator[tuple[str, object]]:
    """The token ids of calls of the library, by format, draft, rule and temperature."""
    for quantization, draft in product(FORMATS, DRAFTS):
        pair = load("tiny", draft, dtype="fp32", quantization=quantization)
        for rule, temperature in product(RULES if draft else ("coupled",), (0.0, 0.8)):
            if temperature or rule == "speculative":
                done = pair.generate(
                    PROMPTS, max_new_tokens=24, temperature=temperature, seed=3, batch_size=2, verification=rule
                )
                yield f"{quantization} {draft} {rule} {temperature}", [completion.token_ids for completion in done]


def placed() -> Iterator[tuple[str, object]]:
    """The lines of run.jsonl of commands, by ranks and settings, without times."""
    for ranks, choices in PLACEMENTS.items():
        for choice in choices:
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder) / "run"
                words = [f"ranks={ranks}", *choice.split(), f"run_dir={run_dir}", "device=cpu", "max_new_tokens=24"]
                code, _ = program("run", *words)
                file = run_dir / "run.jsonl"
                lines = file.read_text().splitlines() if file.exists() else []
                kept = ("index", "sample", "mode", "text", "finish_reason", "accepted_lengths")
                yield f"{ranks} {choice}", [code, [{key: json.loads(line)[key] for key in kept} for line in lines]]


def plans() -> Iterator[tuple[str, object]]:
    """Plans as JSON and as tables, with their exit codes."""
    for model, machine, choice in product(MODELS, MACHINES, CHOICES):
        words = f"model={model} hardware={machine} {choice}".split()
        words += [] if any(word.startswith("draft=") for word in words) else ["draft=none"]
        yield " ".join(words), program("plan", *words, *(["format=json"] if choice else []))
    yield "search", program("plan", "model=30B", "hardware=8xa100_80gb", "search=true")


def program(*words: str) -> tuple[int, str]:
    """The exit code of `llama-ssp` and what it printed, without paths and times."""
    command = [sys.executable, "-m", "llama_ssp", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def main(out: Path) -> None:
    """Write everything into a folder."""
    out.mkdir(parents=True)
    kinds = {"texts": texts, "placed": placed, "plans": plans}
    for name, record in kinds.items():
        with contextlib.redirect_stdout(io.StringIO()):
            found = dict(record())
        (out / f"{name}.json").write_text(json.dumps(found, indent=0, sort_keys=True))
    said = {words: program(*words.split()) for words in MISTAKES}
    said = {words: (code, _TIMES.sub("TIME", text)) for words, (code, text) in said.items()}
    (out / "sentences.json").write_text(json.dumps(said, indent=0, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
