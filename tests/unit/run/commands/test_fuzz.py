"""Whatever is typed: every command answers with exit code 0, 2 or 3, and never with a traceback.

The command lines are drawn by hypothesis, always the same ones: settings that exist with odd values, names that do not
exist, broken syntax, and everything that Hydra knows beside name=value. Most are planned only; some complete two tokens
with the shipped pair.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from llama_ssp import catalogue
from llama_ssp.run.commands import plan, report
from llama_ssp.settings.compose import compose, groups_of, keys_of
from tests.helpers.in_process import Ended, call, launch

UNHURRIED = settings(
    derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
NUM_PLANS, NUM_RUNS = (10, 20, 500), (1, 6, 100)
"""Examples of each lane: plans take up to a tenth of a second each, runs up to a second."""


def amounts(default: int, heavy: int, slow: int) -> pytest.MarkDecorator:
    """How many command lines are drawn, by lane; the slow ones in four parts that differ."""
    slow_parts = [pytest.param(slow, part, marks=pytest.mark.slow) for part in range(1, 5)]
    cases = [(default, 0), pytest.param(heavy, 0, marks=pytest.mark.heavy), *slow_parts]
    return pytest.mark.parametrize(("num_lines", "part"), cases)


NUMBERS = (
    "0", "-1", "1", "2", "3.5", "1e3", "1e400", "-1e-400", "nan", "inf", "-inf", str(1 << 31), str(1 << 63), "9" * 40,
    "0x10", "1_000", "007", "true", "null",
)  # fmt: skip
TEXTS = (
    "", "''", '""', "é", "\u202e", "日本", "\x7f", "\udcff", "a b", "a,b", "[", "[]", "[[1],[2]]", "[1,,2]", "{}",
    "{a:1}", "{a:{b:[c]}}", "(", "'", "\\", "${x}", "${oc.env:HOME}", "${run_id:}", "${", "$(id)",
    "!!python/object:os.system", "range(1,3)", "choice(1,2)", "glob(*)", "interval(0,1)", "sort(3,1)", "int(x)", "none",
    "${run_id:}", "${hydra:}", "${hydra:runtime}", "${oc.env:HOME,}", "${oc.create:{a:1}}",
    "${oc.dict.keys:model}", "${model}", "${draft}", "${seed}", "${.x}", "${..}",
    "\x1b[2J", "\x9b", "'\x1b]0;x\x07'", "[/x]", "'[/x]'",
    "7B", "tiny", "../tiny", ".", "/dev/null", "x" * 5000,
)  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
VALUES = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), ANY_TEXT)
NESTED = st.recursive(
    st.sampled_from((*NUMBERS, "a", "''", "tiny")),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
    max_leaves=5,
)
RUN_KEYS = sorted(
    {*keys_of(compose([])[0].config), *groups_of(), "task.format", "task.num_warmup", "hardware.num_gpus"} - {"dry_run"}
)
PLAN_KEYS = sorted(
    {*keys_of(compose([], root="plan")[0].config), "model.path", "model.shape.num_layers", "hardware.num_gpus"}
)
ODD_KEYS = (
    "", ".", "model.", ".model", "a.b.c", "hydra", "hydra.run.dir", "hydra/launcher", "hydra.launcher.nodes",
    "_target_", "model._target_", "é", "model@draft", "task.name",
)  # fmt: skip
OPTIONS = (
    "-m", "--multirun", "--cfg", "job", "--info", "--resolve", "--package", "-cn", "--config-dir", "-h", "--run",
    "--shell_completion", "--hydra-help", "--version",
)  # fmt: skip
SHORT_RUN = ("max_new_tokens=2", "device=cpu")
SOUND = (
    "task=generate", "task=generate task.format=jsonl", "task=latency task.num_warmup=0", "task=generate draft=none",
    "sampling=greedy", "sampling=greedy verification=greedy", "sampling=nucleus", "sampling.temperature=0",
    "sampling.top_k=1", "placement=replicated", "placement=one_rank", "hardware=laptop_cpu", "model.dtype=bf16",
    "model.quantization=int8", "draft.model.quantization=int8_weight_only", "speculation.num_draft_tokens=2",
    "batch_size=3", "num_samples=2", "max_new_tokens=4", "ignore_eos=true", "seed=5", "prompt=é", "run_dir=x",
    "task.picture=x.svg", "timeouts.decode_s=1e6", "sampling.min_p=0.1 verification=block",
)  # fmt: skip
LONG = {"max_new_tokens=1_000", "num_samples=1_000", "batch_size=1_000", "task=glob(*)"}
"""Words that are right, and whose runs take long."""
REPORT_OPTIONS = ("--output=", "--output=x", "--output=/dev/null/x", "--help", "-")


def overrides(keys: list[str]) -> st.SearchStrategy[str]:
    """One word of a command line."""
    known = st.sampled_from(keys)
    setting = st.builds("{}={}".format, st.one_of(known, known, known, st.sampled_from(ODD_KEYS)), VALUES | NESTED)
    prefix = st.sampled_from(["+", "++", "~", "-", "--", "=", "@", "'"])
    return st.one_of(
        setting, setting, setting,
        st.builds("{}{}".format, prefix, setting),
        st.builds("{}={}={}".format, known, VALUES, VALUES),
        st.builds("{}._target_={}".format, known, VALUES),
        known, VALUES, st.sampled_from(OPTIONS),
    )  # fmt: skip


def lines_of(keys: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(overrides(keys), min_size=1, max_size=4)


def runs() -> st.SearchStrategy[list[str]]:
    """Command lines of which some end well: settings that do so alone, and at most two of any kind."""
    sound = st.lists(st.sampled_from(SOUND), max_size=3).map(lambda words: " ".join(words).split())
    other = st.lists(overrides(RUN_KEYS).filter(lambda word: word not in LONG), max_size=2)
    return st.builds(list.__add__, sound, other)


def run_dry(arguments: list[str]) -> int:
    """The main function of run.py, which then loads nothing."""
    return passed_on(launch("dry_run=true", *arguments))


def passed_on(ended: Ended) -> int:
    sys.stderr.write(ended.err)
    assert ended.code is not None, ended.err
    return ended.code


def run_short(arguments: list[str]) -> int:
    """The main function of run.py, which then completes a prompt, in a folder of its own."""
    prompt = [] if any(word.startswith("prompts=") for word in arguments) else ["prompt=a"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, contextlib.chdir(folder):
        return passed_on(launch(*prompt, *SHORT_RUN, *arguments))


def check(ended: Ended, arguments: list[str]) -> None:
    assert ended.code in {0, 2, 3}, f"{arguments}\n{ended.err}"
    assert "Traceback" not in ended.err, f"{arguments}\n{ended.err}"
    assert ended.code == 0 or ended.err.strip(), f"{arguments} ended with {ended.code} and without a word"


def check_all(main: Callable[[list[str]], int], num_lines: int, lines: st.SearchStrategy[list[str]], part: int) -> None:
    """Check so many command lines, other ones in each part."""

    def check_one(arguments: list[str]) -> None:
        check(call(main, arguments), arguments)

    seed(part)(settings(UNHURRIED, max_examples=num_lines)(given(lines)(check_one)))()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setenv("XDG_CACHE_HOME", str(catalogue.cache_dir().parent))  # of kernels and of this machine's speeds
    monkeypatch.setenv("HOME", str(tmp_path))  # ${oc.env:HOME} names a folder that may be written to


@amounts(*NUM_PLANS)
def test_run_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(run_dry, num_lines, lines_of(RUN_KEYS), part)


@amounts(*NUM_RUNS)
def test_a_run_that_is_not_dry_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(run_short, num_lines, runs(), part)


@amounts(*NUM_PLANS)
def test_plan_answers_any_command_line(num_lines: int, part: int) -> None:
    check_all(plan.main, num_lines, lines_of(PLAN_KEYS), part)


@settings(UNHURRIED, max_examples=60)
@given(st.lists(VALUES | st.sampled_from(REPORT_OPTIONS), max_size=3))
def test_report_answers_any_command_line(arguments: list[str]) -> None:
    check(call(report.main, arguments), arguments)


@pytest.mark.parametrize(
    ("main", "arguments", "sentence"),
    [
        (run_dry, ["speculation=${oc.env:PATH}"], "must be settings: set them one by one as speculation.KEY=VALUE"),
        (run_dry, [f"speculation.num_draft_tokens={1 << 31}"], "must be at least 1 and at most 1024"),
        (run_dry, ["--resolve"], "--resolve needs --cfg"),
        (run_short, [f"model.path={'x' * 5000}"], "cannot be read (File name too long): name another path"),
        (
            run_short,
            ["draft.model.path='~no-such-user/x'"],
            "cannot be read (Could not determine home directory): name",
        ),
        (run_short, ["num_samples=2147483648"], "must be at least 1 and at most 1000000 completions"),
        (run_dry, ["speculation=${run_id:}"], "speculation=20"),
        (run_dry, ["model=\x1b[2J"], r"cannot read 'model=\x1b[2J': settings are written name=value"),
        (run_short, ["model.path=\x1b[2J\x9b\u202e\x7f\r"], r"\x1b[2J\x9b\u202e\x7f\r does not exist"),
        (plan.main, ["format=\x1b"], r"cannot read 'format=\x1b': settings are written name=value"),
        (plan.main, ["=0"], "unknown setting ''"),
        (plan.main, ["hydra/launcher=[[],1]"], "hydra/launcher is for sweeps"),
        (report.main, ["x" * 5000], "cannot be read (File name too long): name the folder of a run"),
    ],
)
def test_what_was_found_once_is_a_sentence(
    main: Callable[[list[str]], int], arguments: list[str], sentence: str
) -> None:
    ended = call(main, arguments)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert sentence in ended.err
    assert ended.err.removesuffix("\n").isprintable()
