"""Takes extensions out of a copy of the repository, and checks that everything else stands.

    python -m tests.extensions.without                   # all, quickly: imports, lint, types, answers, fast tests
    python -m tests.extensions.without serve slurm       # these
    python -m tests.extensions.without --whole serve     # these, with the tests of README's command that are left
    python -m tests.extensions.without --whole --halves  # half of the extensions, several times; see `halves`

The texts and figures of the copy are compared with those of the repository. Ends with 1 if something does not stand.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from llama_ssp import manifest
from tests.helpers.repository import ROOT, files

RUN = [
    "run",
    "ranks=1",
    "task=generate",
    "format=jsonl",
    "sampling=greedy",
    "prompt=import",
    "model.dtype=fp32",
    "max_new_tokens=64",
]
PLAN = ["plan", "model=30B", "draft=7B", "hardware=8xa100_80gb", "format=json"]
HELPS = (["--help"], ["run", "--help", "all"], ["plan", "--help"])
ADVICE = {"warnings", "notes", "changes", "shortage"}
"""Parts of a plan's document that may name what an extension offers."""
FAST_TESTS = ["-n", "0", "-m", "not (seconds or heavy or slow)", "tests/unit/speculate/sampling", "tests/unit/settings"]
"""In one process: the imports of further ones would take longer."""
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.+)$", re.MULTILINE)
OF_MACHINES = re.compile(r"needs \d+ GPUs?|[Tt]riton|this (build|processor|CPU|user)")
"""Reasons of skipped tests that hold with all extensions too."""
_TYPES = ".mypy_cache"
OF_RUNS = {"text", "token_ids", "accepted_lengths"}


def with_dependent(extensions: Sequence[str]) -> tuple[str, ...]:
    """The extensions, and the extensions and modules of extensions that need one of them, by the manifest."""
    return (
        *extensions,
        *(name for name, needed in manifest.NEEDS.items() if needed in extensions and name not in extensions),
    )


def halves(extensions: Sequence[str]) -> list[list[str]]:
    """Divide extensions in two by each bit of their places, and return both parts.

    For every two extensions there is a part that has the first and not the second: what an extension or a test
    needs of another extension fails in one of the copies, and so does whatever the core needs of one.
    """
    bits = range((len(extensions) - 1).bit_length())
    return [
        [name for place, name in enumerate(extensions) if place >> bit & 1 == part] for bit in bits for part in (0, 1)
    ]


def copy_without(extensions: Sequence[str], folder: Path) -> Path:
    """Copy every file of the repository but those of the extensions, of what needs them, and of their tests."""
    gone = tuple(
        f"{place}/{name.replace('.', '/')}{'.py' if '.' in name else '/'}"
        for name in with_dependent(extensions)
        for place in ("llama_ssp/extensions", "tests/extensions")
    )
    for path in files():
        if not path.as_posix().startswith(gone):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)  # tests list the files by git
    if (ROOT / _TYPES).exists():  # what is known of the same files
        shutil.copytree(ROOT / _TYPES, folder / _TYPES)
    return folder


def python(folder: Path, *words: str, **variables: str) -> str:
    """Run Python in a folder, with variables of its own; returns what it printed, or ends this program with it."""
    own = {**os.environ, **variables}
    ended = subprocess.run([sys.executable, *words], cwd=folder, env=own, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(words)}\n{ended.stdout[-40_000:]}{ended.stderr[-6000:]}")
    return ended.stdout


def imports(folder: Path) -> None:
    """Import every module; kernels of GPUs need Triton."""
    names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.glob("llama_ssp/**/*.py")]
    names = [name for name in names if not (name.endswith("__main__") or ".gpu.kernels." in name)]
    python(folder, "-c", f"import importlib; [importlib.import_module(name) for name in {sorted(names)}]")


class Answer(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


ASK = """
import json, os, sys
from llama_ssp.run.commands import plan, program, run
from llama_ssp.settings.compose import compose
compose([])  # what each of them would do first
for number, words in enumerate(json.loads(sys.argv[1])):
    if not (child := os.fork()):
        for descriptor, name in (1, "out"), (2, "err"):
            os.dup2(os.open(os.path.join(sys.argv[2], f"{number}.{name}"), os.O_CREAT | os.O_WRONLY), descriptor)
        program.main(words)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that gives each list of words to the program of a folder, in a process that has imported it already."""


def ask(folder: Path, commands: Sequence[Sequence[str]]) -> list[Answer]:
    """Give each list of words to the program of a folder."""
    with tempfile.TemporaryDirectory() as name:
        codes = python(folder, "-c", ASK, json.dumps(commands), name).split()
        return [
            Answer(int(code), *((Path(name) / f"{number}.{kind}").read_text() for kind in ("out", "err")))
            for number, code in enumerate(codes)
        ]


def printed(answer: Answer) -> str:
    """What a command printed, which must have ended well."""
    return answer.out if answer.code == 0 else sys.exit(f"exit code {answer.code}, {answer.err}")


def text_of(printed: str) -> list[dict[str, object]]:
    """The completions that a greedy run of the shipped pair has printed."""
    return [{key: value for key, value in json.loads(line).items() if key in OF_RUNS} for line in printed.splitlines()]


def figures_of(printed: str) -> dict[str, object]:
    """The document that a plan has printed, without advice."""
    return {key: value for key, value in json.loads(printed).items() if key not in ADVICE}


def words_for(asked: str, folder: Path) -> list[str]:
    """The command line that asks for what an extension has, with the file that it reads."""
    kind, _, name = asked.partition("=")
    if kind == "field":
        (folder / "field.jsonl").write_text(json.dumps({name: "1"}))
        return ["run", "task=generate", "prompts=field.jsonl"]
    if kind == "config.json":
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({name: 1}))
        return ["run", "draft=local", f"draft.model.path={name}"]
    if kind in {"file", "model_type"}:  # the only one of a folder
        (folder / kind).mkdir(exist_ok=True)
        file, text = (name, "{}") if kind == "file" else ("config.json", json.dumps({kind: "mixtral"}))
        (folder / kind / file).write_text(text)
        return ["run", "task=generate", "draft=none", f"model=./{kind}"]
    if kind == "setting":
        return ["plan", "hardware=h100", f"{name}=x"]
    if kind in {"argument", "tokenizer"}:
        given = f"{name}=2" if kind == "argument" else f"draft='tiny-draft', {kind}='{name}'"
        (folder / f"{kind}.py").write_text(f"from llama_ssp import load\nload('tiny', {given})\n")
        return ["run", "ranks=1", "--script", f"{kind}.py"]
    return [name] if kind == "command" else ["run", *(["-m"] if kind == "hydra/launcher" else []), asked]


def answers(folder: Path, extensions: Sequence[str]) -> None:
    """Check what the program of a copy says.

    A run, started as a user starts it on a new machine, and a plan are those of the repository; help names nothing that
    asks for the extensions, and who asks gets a sentence that names the extension.
    """
    all_asked = [(extension, asked) for extension in extensions for asked in manifest.EXTENSIONS[extension]]
    with tempfile.TemporaryDirectory() as name:
        text = python(folder, "-m", "llama_ssp", *RUN, f"run_dir={name}/own", XDG_STATE_HOME=name)
        wanted, wanted_plan = map(printed, ask(ROOT, [[*RUN, f"run_dir={name}/wanted"], PLAN]))
    words = [words_for(asked, folder) for _, asked in all_asked]
    plan, *others = ask(folder, [PLAN, *HELPS, *words])
    if text_of(text) != text_of(wanted):
        sys.exit("another text")
    if figures_of(printed(plan)) != figures_of(wanted_plan):
        sys.exit("another plan")
    shown = "".join(map(printed, others[: len(HELPS)]))
    left = "".join(file.read_text() for file in folder.glob("llama_ssp/extensions/*/records.py"))  # may have it too
    for (extension, asked), answer in zip(all_asked, others[len(HELPS) :], strict=True):
        kind, _, name = asked.partition("=")
        names = {"command": f"llama-ssp {name}", "setting": f" {name}="}.get(kind, asked)
        if names in shown and not (kind == "setting" and f'"{name}"' in left):
            sys.exit(f"help names {asked}")
        needed = manifest.NEEDS.get(extension, extension)
        if answer.code != 2 or not re.search(f"the ({extension}|{needed}) extension", answer.err):
            sys.exit(f"{asked}: exit code {answer.code}, {answer.err}")


def skipped(printed: str, extensions: Sequence[str]) -> str:
    """Say how many tests were skipped for want of each extension; another reason ends this program."""
    missing: Counter[str] = Counter()
    for number, reason in SKIPPED.findall(printed):
        needed = re.search(r"needs llama_ssp/extensions/([\w, ]+)$", reason)
        if needed and {*needed[1].split(", ")} <= {*extensions}:
            missing[needed[1]] += int(number)
        elif not OF_MACHINES.search(reason):
            sys.exit(f"{number} tests were skipped: {reason}")
    return "skipped " + (", ".join(f"{number} of {extension}" for extension, number in missing.most_common()) or "none")


def main(words: Sequence[str]) -> None:
    """Check a copy without the extensions that the words name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extensions", nargs="*", metavar="EXTENSION", help="by default all")
    parser.add_argument("--halves", action="store_true", help="take out half of them at a time")
    parser.add_argument("--whole", action="store_true", help="all tests of README's command")
    parser.add_argument("--seconds", action="store_true", help="all tests of .ci/run")
    given = parser.parse_args(words)
    chosen = given.extensions or manifest.present()
    options = ["--seconds"] if given.seconds else [] if given.whole else FAST_TESTS
    for out in halves(chosen) if given.halves else [chosen]:
        check([name for name in with_dependent(out) if "." not in name], options)


def check(extensions: Sequence[str], options: Sequence[str]) -> None:
    """Check a copy without extensions; the options are those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_without(extensions, Path(folder))

        def tests() -> None:
            print(skipped(python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options), extensions))

        steps: dict[str, Callable[[], object]] = {
            "imports": lambda: imports(copy),
            "contracts": lambda: python(
                copy, "-c", "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"
            ),
            "lint": lambda: python(copy, "-m", "ruff", "check", "--no-cache"),
            "types": lambda: python(copy, "-m", "mypy", "llama_ssp"),
            "answers": lambda: answers(copy, extensions),
            "tests": tests,
        }
        for name, step in steps.items():
            began = time.monotonic()
            step()
            print(f"without {', '.join(extensions)}: {name} stands ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
