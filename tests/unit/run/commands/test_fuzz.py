"""Whatever is typed: every command answers with exit code 0, 2 or 3, and never with a traceback.

The command lines are drawn by hypothesis, always the same ones: settings that exist with odd values, names that do not
exist, broken syntax, and everything that Hydra knows beside name=value. Most are planned only; some complete two tokens
with the shipped pair.
"""

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from llama_ssp import catalogue
from llama_ssp.errors import SspError
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import RunFacts
from llama_ssp.reports.summary import summarise
from llama_ssp.run.commands import plan
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.resuming import check_lines
from llama_ssp.run.tasks.records import CompareConfig
from llama_ssp.settings.compose import compose, groups_of, keys_of
from llama_ssp.settings.schema import DrafterConfig
from llama_ssp.settings.tasks import TASKS
from llama_ssp.terminal.terminal import Output, Terminal
from tests.helpers.in_process import Ended, call, launch
from tests.helpers.odd_json import mutated, to_text
from tests.helpers.reports import report
from tests.helpers.runs import CELL, FAST, PLAIN, TOYS, ToyCell, summary, write_run

if TYPE_CHECKING:
    from llama_ssp.settings.schema import RunConfig

UNHURRIED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUM_PLANS, NUM_RUNS = (10, 10, 500), (1, 5, 100)
"""Examples of each lane: plans take up to a tenth of a second each, runs up to a second."""


def amounts(default: int, heavy: int, slow: int) -> pytest.MarkDecorator:
    """How many command lines are drawn, by lane; all parts differ, and there are four slow ones."""
    slow_parts = [pytest.param(slow, part, marks=pytest.mark.slow) for part in range(1, 5)]
    cases = [(default, 0), pytest.param(heavy, 5, marks=pytest.mark.heavy), *slow_parts]
    return pytest.mark.parametrize(("num_lines", "part"), cases)


NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3.5",
    "1e3",
    "1e400",
    "-1e-400",
    "nan",
    "inf",
    "-inf",
    str(1 << 31),
    str(1 << 63),
    "9" * 40,
    "0x10",
    "1_000",
    "007",
    "true",
    "null",
)
TEXTS = (
    "",
    "''",
    '""',
    "é",
    "\u202e",
    "日本",
    "\x7f",
    "\udcff",
    "a b",
    "a,b",
    "[",
    "[]",
    "[[1],[2]]",
    "[1,,2]",
    "{}",
    "{a:1}",
    "{a:{b:[c]}}",
    "(",
    "'",
    "\\",
    "${x}",
    "${oc.env:HOME}",
    "${run_id:}",
    "${",
    "$(id)",
    "!!python/object:os.system",
    "range(1,3)",
    "choice(1,2)",
    "glob(*)",
    "interval(0,1)",
    "sort(3,1)",
    "int(x)",
    "none",
    "${run_id:}",
    "${hydra:}",
    "${hydra:runtime}",
    "${oc.env:HOME,}",
    "${oc.create:{a:1}}",
    "${oc.dict.keys:model}",
    "${model}",
    "${draft}",
    "${seed}",
    "${.x}",
    "${..}",
    "\x1b[2J",
    "\x9b",
    "'\x1b]0;x\x07'",
    "[/x]",
    "'[/x]'",
    "7B",
    "tiny",
    "../tiny",
    ".",
    "/dev/null",
    "x" * 5000,
)
ANY_TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
VALUES = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), ANY_TEXT)
NESTED = st.recursive(
    st.sampled_from((*NUMBERS, "a", "''", "tiny")),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
    max_leaves=5,
)
ODD_KEYS = (
    "",
    ".",
    "model.",
    ".model",
    "a.b.c",
    "hydra",
    "hydra.run.dir",
    "hydra/launcher",
    "hydra.launcher.nodes",
    "_target_",
    "model._target_",
    "é",
    "model@draft",
    "task.name",
)
OPTIONS = (
    "-m",
    "--multirun",
    "--cfg",
    "job",
    "--info",
    "--resolve",
    "--package",
    "-cn",
    "--config-dir",
    "-h",
    "--run",
    "--shell_completion",
    "--hydra-help",
    "--version",
)
SHORT_RUN = ("max_new_tokens=2", "device=cpu")
SOUND = (
    "task=generate",
    "task=generate task.format=jsonl",
    "task=generate task.in_order=true",
    "task=generate draft=none",
    "sampling=greedy",
    "sampling=greedy verification=greedy",
    "sampling=nucleus",
    "sampling.temperature=0",
    "sampling.top_k=1",
    "placement=replicated",
    "placement=one_rank",
    "hardware=laptop_cpu",
    "model.dtype=bf16",
    "model.quantization=int8",
    "draft.model.quantization=int8_weight_only",
    "speculation.num_draft_tokens=2",
    "batch_size=3",
    "num_samples=2",
    "max_new_tokens=4",
    "ignore_eos=true",
    "seed=5",
    "prompt=é",
    "run_dir=x",
    "task.picture=x.svg",
    "timeouts.decode_s=1e6",
    "sampling.min_p=0.1 verification=block",
)
LONG = {"max_new_tokens=1_000", "num_samples=1_000", "batch_size=1_000", "task=glob(*)"}
"""Words that are right, and whose runs take long."""
REPORT_OPTIONS = ("--output=", "--output=x", "--output=/dev/null/x", "--help", "-")


@cache
def run_keys() -> list[str]:
    more = {*groups_of(), "task.format", "task.in_order", "hardware.num_gpus"}
    return sorted({*keys_of(compose([])[0].config), *more} - {"dry_run"})


@cache
def plan_keys() -> list[str]:
    more = {"model.path", "model.shape.num_layers", "hardware.num_gpus"}
    return sorted({*keys_of(compose([], root="plan")[0].config), *more})


def overrides(keys: list[str]) -> st.SearchStrategy[str]:
    """One word of a command line."""
    known = st.sampled_from(keys)
    setting = st.builds("{}={}".format, st.one_of(known, known, known, st.sampled_from(ODD_KEYS)), VALUES | NESTED)
    prefix = st.sampled_from(["+", "++", "~", "-", "--", "=", "@", "'"])
    return st.one_of(
        setting,
        setting,
        setting,
        st.builds("{}{}".format, prefix, setting),
        st.builds("{}={}={}".format, known, VALUES, VALUES),
        st.builds("{}._target_={}".format, known, VALUES),
        known,
        VALUES,
        st.sampled_from(OPTIONS),
    )


def lines_of(keys: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(overrides(keys), min_size=1, max_size=4)


def runs() -> st.SearchStrategy[list[str]]:
    """Command lines of which some end well: settings that do so alone, and at most two of any kind."""
    sound = st.lists(st.sampled_from(SOUND), max_size=3).map(lambda words: " ".join(words).split())
    other = st.lists(overrides(run_keys()).filter(lambda word: word not in LONG), max_size=2)
    return st.builds(list.__add__, sound, other)


Run = Callable[[list[str]], Ended]
run_plan, run_report = partial(call, plan.main), partial(call, report)


def run_dry(arguments: list[str]) -> Ended:
    """`llama-ssp run`, which then loads nothing."""
    return launch("dry_run=true", *arguments)


def run_short(arguments: list[str]) -> Ended:
    """`llama-ssp run`, which then completes a prompt, in a folder of its own."""
    prompt = [] if any(word.startswith("prompts=") for word in arguments) else ["prompt=a"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, contextlib.chdir(folder):
        return launch(*prompt, *SHORT_RUN, *arguments)


def check(run: Run, arguments: list[str]) -> None:
    ended = run(arguments)
    assert ended.code in {0, 2, 3}, f"{arguments}\n{ended.err}"
    assert "Traceback" not in ended.err, f"{arguments}\n{ended.err}"
    assert ended.code == 0 or ended.err.strip(), f"{arguments} ended with {ended.code} and without a word"


def check_all(run: Run, num_lines: int, lines: st.SearchStrategy[list[str]], part: int) -> None:
    """Check so many command lines, other ones in each part."""

    def check_one(arguments: list[str]) -> None:
        check(run, arguments)

    seed(part)(settings(UNHURRIED, max_examples=num_lines)(given(lines)(check_one)))()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(catalogue.cache_dir().parent))  # of kernels and of this machine's speeds
    monkeypatch.setenv("HOME", str(tmp_path))  # ${oc.env:HOME} names a folder that may be written to
    monkeypatch.setattr("os.fsync", lambda _file: None)  # nothing here survives a crash of the machine


@pytest.mark.seconds
@amounts(*NUM_PLANS)
def test_run_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(run_dry, num_lines, lines_of(run_keys()), part)


@pytest.mark.seconds
@amounts(*NUM_RUNS)
def test_a_run_that_is_not_dry_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(run_short, num_lines, runs(), part)


@pytest.mark.seconds
@amounts(*NUM_PLANS)
def test_plan_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(run_plan, num_lines, lines_of(plan_keys()), part)


@settings(UNHURRIED, max_examples=60)
@given(st.lists(VALUES | st.sampled_from(REPORT_OPTIONS), max_size=3))
def test_report_answers_any_command_line(arguments: list[str]) -> None:
    check(run_report, arguments)


@pytest.mark.parametrize(
    ("run", "arguments", "sentence"),
    [
        (run_dry, ["speculation=${oc.env:PATH}"], "must be settings: set them one by one as speculation.KEY=VALUE"),
        (run_dry, [f"speculation.num_draft_tokens={1 << 31}"], "must be at least 1 and at most 1024"),
        (run_dry, ["--resolve"], "--resolve needs --cfg"),
        (run_short, [f"model.path={'x' * 5000}"], "cannot be read (File name too long): name another path"),
        (run_short, ["draft.model.path='~no-such-user/x'"], "cannot be read (Could not determine home directory): "),
        (run_short, ["num_samples=2147483648"], "must be at least 1 and at most 1000000 completions"),
        (run_dry, ["speculation=${run_id:}"], "speculation=20"),
        (run_dry, ["model=\x1b[2J"], r"cannot read 'model=\x1b[2J': settings are written name=value"),
        (run_short, ["model.path=\x1b[2J\x9b\u202e\x7f\r"], r"\x1b[2J\x9b\u202e\x7f\r does not exist"),
        (run_plan, ["format=\x1b"], r"cannot read 'format=\x1b': settings are written name=value"),
        (run_plan, ["=0"], "unknown setting ''"),
        (run_plan, ["hydra/launcher=[[],1]"], "hydra/launcher is for sweeps"),
        (run_report, ["x" * 5000], "cannot be read (File name too long): name the folder of a run"),
    ],
)
def test_what_was_found_once_is_a_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    ended = run(arguments)
    ended.check_refusal(sentence)
    assert ended.err.removesuffix("\n").isprintable()


FEW, MANY = settings(UNHURRIED, max_examples=6), settings(UNHURRIED, max_examples=150)
CONFIG = "seed: 7\nrun_dir: null\nstop_strings: []\nmodel:\n  name: big\n  shape: {num_layers: 2}\n"
BYTES = [
    b"",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"{",
    b"[]",
    b"null",
    b"1",
    b'"x"',
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x1b[2J",
    b"9" * 5000,
    b"NaN",
    b"\r\n\r\n",
    b"{}\n{}\n",
    "é".encode("latin-1"),
    b'{"schema_version": 1}',
    b'{"schema_version": {"a": [[]]}}',
]
YAML = [
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "&a {b: *a}",
    "&a [*a]",
    "[" * 10_000,
    "{a: " * 10_000,
    "- " * 5000 + "x",
    "? [a]\n: b",
    "? {a: b}\n: c",
    "seed: 2026-11-21",
    "seed: 2026-99-99",
    "seed: !!binary é",
    "seed: !!bool maybe",
    "seed: !!int x",
    "seed: !!float x",
    "seed: !!set {a}",
    "seed: !!timestamp x",
    "seed: !!python/object/apply:os.system [x]",
    "seed: 0b",
    "seed: 0x",
    "seed: 0o8",
    "seed: 190:20:30",
    "seed: .nan",
    "seed: 1e400",
    "seed: " + "9" * 5000,
    "seed: {1: 2, null: 3, 1.5: 4}",
    'seed: "\\ud800"',
    "seed: '\x1b'",
    "%YAML 9.9\n---\n",
    "%TAG ! x\n--- !y z",
    "--- a\n--- b",
    "\t",
    "@",
    "`",
    "<<: 1",
    "<<: [a]",
    "a: 1\na: 2",
    "=: =",
    "x" * 100_000,
    "\n".join(f"k{number}: {number}" for number in range(2000)),
    "seed: " + "x" * 2_000_000,
    "!!map [a]",
    "!!str {a: b}",
    "seed: !!omap [a]",
    "seed: !!pairs [[a]]",
    "seed: !!null x",
    "\ufeffseed: 7",
    "\x85",
    "\u2028",
    "seed: 1_",
    "_: -_",
]
FILES = ("summary.json", "run.jsonl", "config.yaml", "toys.jsonl", "status")


def odd_content(chance: random.Random, file: str) -> bytes:
    """What stands in a damaged file."""
    documents = {
        "summary.json": [asdict(replace(summary(PLAIN, FAST), task="toys", cells=[CELL]))],
        "run.jsonl": [asdict(PLAIN), asdict(FAST), asdict(replace(FAST, index=3))],
        "toys.jsonl": [asdict(CELL), asdict(replace(CELL, name="other"))],
    }
    if chance.random() < 0.1:
        return chance.choice(BYTES)
    if file in documents:
        odd = chance.randrange(len(documents[file]))
        texts = [json.dumps(each) for each in documents[file]]
        texts[odd] = to_text(mutated(chance, documents[file][odd]), ascii_only=chance.random() < 0.5)
        text = "\n".join(texts) + "\n"
    else:
        text = chance.choice(YAML) + chance.choice(["", "\n", f"\n{CONFIG}"])
    content = text.encode(chance.choice(["utf-8"] * 7 + ["utf-16", "utf-32", "latin-1"]), errors="replace")
    if chance.random() < 0.1:
        content = content[: chance.randrange(len(content) + 1)]
    if chance.random() < 0.1:
        place = chance.randrange(len(content) + 1)
        content = content[:place] + chance.choice([b"\xff", b"\0", b"\xc3(", b"\xed\xa0\x80"]) + content[place:]
    return content


def damage(folder: Path, chance: random.Random) -> None:
    """Replace one or two files of a run folder, rarely by what is no file."""
    for file in chance.sample(FILES, chance.randint(1, 2)):
        (folder / file).unlink(missing_ok=True)
        what = chance.random()
        if what < 0.02:
            (folder / file).mkdir()
        elif what < 0.04:
            os.mkfifo(folder / file)
        elif what < 0.06:
            (folder / file).symlink_to("/dev/zero")
        elif what < 0.08:
            (folder / file).symlink_to(folder / file)
        elif what > 0.1:
            (folder / file).write_bytes(odd_content(chance, file))


def resume(folder: Path) -> int:
    """Do what a resumed run does with the files of its folder: read them, and end with a summary of all."""
    consoles = [Output(file=io.StringIO(), width=80) for _ in range(2)]
    terminal = Terminal(out=consoles[0], err=consoles[1])
    run_facts = RunFacts(task="toys", model="big", draft="small", placement={}, world_size=1, seed=7, memory=[])
    try:
        with RunFolder(folder, CONFIG, ToyCell) as opened:
            json.dumps([sorted(opened.finished), [row.key for row in opened.results]])
            draft, task = DrafterConfig(kind="none"), CompareConfig()
            named = SimpleNamespace(prompts="p.txt", run_dir="run", num_samples=1, draft=draft, task=task)
            with contextlib.suppress(SspError):  # other prompts are refused; what follows would read the lines too
                check_lines(opened.lines, cast("RunConfig", named), [Prompt(text=PLAIN.prompt)])
            opened.put_in_order()
            made = summarise(run_facts, opened.lines, opened.results, num_draft_tokens=2)
            opened.write_summary(made)
            terminal.results(made, run_dir=folder)
            opened.write_status("done")
    except SspError as error:
        return error.exit_code
    return 0


def check_folder(tmp_path: Path, number: int) -> None:
    """Damage a folder; report it alone and with a sound one; resume it; and report it again."""
    chance = random.Random(number)
    shutil.rmtree(tmp_path / "sweep", ignore_errors=True)
    sound, folder = (write_run(tmp_path / "sweep" / name, PLAIN, FAST) for name in ("0", "1"))
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "toys.jsonl").write_bytes(CELL.to_json())
    damage(folder, chance)
    both = [str(sound.parent), f"--output={tmp_path / 'both'}"]
    for main, arguments, codes in (
        (report, [str(folder), f"--output={tmp_path / 'alone'}"], {0, 2}),
        (report, both, {0}),
        (lambda _: resume(folder), [], {0, 2}),
        (report, both, {0}),
    ):
        ended = call(main, arguments)
        assert ended.code in codes, f"folder {number}: {ended.err}"
        assert "Traceback" not in ended.err
        assert len(ended.err) < 20_000


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more task with results of its own."""
    TASKS.all()
    monkeypatch.setitem(TASKS.records, "toys", TOYS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_any_run_folder_is_reported_and_resumed(part: int, tmp_path: Path) -> None:
    seed(part)((MANY if part else FEW)(given(st.integers(0, 1 << 64))(lambda number: check_folder(tmp_path, number))))()


@pytest.mark.parametrize("text", YAML)
def test_any_config_is_compared(text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", PLAIN, FAST)
    (folder / "config.yaml").write_text(text, errors="replace")
    ended = call(lambda _: resume(folder), [])
    assert ended.code in {0, 2}, ended.err
