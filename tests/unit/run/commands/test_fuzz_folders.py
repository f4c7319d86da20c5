"""Whatever stands in a run folder: a report and a resumed run answer with an exit code and a sentence.

Hypothesis takes the files of a sound folder and replaces parts of them: fields of another type, numbers at their
limits, nesting without end, other encodings, text that was cut off. It draws the same folders each time.
"""

import contextlib
import io
import json
import os
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from llama_ssp.errors import SspError
from llama_ssp.reports.folder import RunFolder
from llama_ssp.reports.records import RunFacts
from llama_ssp.reports.summary import summarise
from llama_ssp.run.commands import report
from llama_ssp.run.prompts import Prompt
from llama_ssp.run.resuming import check_lines
from llama_ssp.run.tasks.records import CompareConfig
from llama_ssp.settings.drafters import NgramConfig
from llama_ssp.terminal.terminal import Output, Terminal
from tests.helpers.in_process import call
from tests.helpers.runs import CELL, FAST, PLAIN, summary, write_run
from tests.unit.run.commands.test_fuzz import UNHURRIED

if TYPE_CHECKING:
    from llama_ssp.settings.schema import RunConfig

FEW, MANY = settings(UNHURRIED, max_examples=6), settings(UNHURRIED, max_examples=150)
CONFIG = "seed: 7\nrun_dir: null\nstop_strings: []\nmodel:\n  name: big\n  shape: {num_layers: 2}\n"
RAW = {
    "@digits": "9" * 5000, "@nines": "9" * 400, "@deep": "[" * 5000 + "]" * 5000,
    "@objects": '{"a":' * 3000 + "1" + "}" * 3000, "@nan": "NaN",
    "@inf": "-Infinity", "@1e400": "1e400", "@1e-400": "1e-400", "@half": '"\\ud800"',
    "@long": '"' + "x" * 100_000 + '"', "@list": "[" + "0," * 20_000 + "0]", "@nested": "[" * 500 + "]" * 500,
}  # fmt: skip
"""JSON that `json.dumps` does not write, by the text that stands in for it."""
ODD: list[Any] = [
    *RAW, None, True, 0, -1, 1, 1024, 1025, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 0.0, -0.0, 0.5, -1.5, 1e308,
    -1e308, 5e-324, 1e-31, 2.0**62, "", "1", "\x1b[2J", "\u202e", "</script>", "é" * 50, [], [0], [1, 2], [[]], [None],
    [1.5], {}, {"a": 1}, {"a": {"b": []}}, {"": None}, {"plain": 0.0}, "speculative", "plain",
]  # fmt: skip
BYTES = [
    b"", b"\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"[" * 100_000,
    b'{"a":' * 100_000, b"\x1b[2J", b"9" * 5000, b"NaN", b"\r\n\r\n", b"{}\n{}\n", "é".encode("latin-1"),
    b'{"schema_version": 1}', b'{"schema_version": {"a": [[]]}}',
]  # fmt: skip
YAML = [
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "&a {b: *a}", "&a [*a]", "[" * 10_000, "{a: " * 10_000,
    "- " * 5000 + "x", "? [a]\n: b", "? {a: b}\n: c", "seed: 2026-11-21", "seed: 2026-99-99", "seed: !!binary é",
    "seed: !!bool maybe", "seed: !!int x", "seed: !!float x", "seed: !!set {a}", "seed: !!timestamp x",
    "seed: !!python/object/apply:os.system [x]", "seed: 0b", "seed: 0x", "seed: 0o8", "seed: 190:20:30", "seed: .nan",
    "seed: 1e400", "seed: " + "9" * 5000, "seed: {1: 2, null: 3, 1.5: 4}", "seed: \"\\ud800\"",
    "seed: '\x1b'", "%YAML 9.9\n---\n",
    "%TAG ! x\n--- !y z", "--- a\n--- b", "\t", "@", "`", "<<: 1", "<<: [a]", "a: 1\na: 2", "=: =", "x" * 100_000,
    "\n".join(f"k{number}: {number}" for number in range(2000)), "seed: " + "x" * 2_000_000, "!!map [a]",
    "!!str {a: b}",
    "seed: !!omap [a]", "seed: !!pairs [[a]]", "seed: !!null x", "\ufeffseed: 7", "\x85", "\u2028", "seed: 1_", "_: -_",
]  # fmt: skip
FILES = ("summary.json", "run.jsonl", "config.yaml", "benchmark.jsonl", "status")


def places(tree: Any) -> list[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """The paths of all parts of a document, itself included."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [(), *((key, *below) for key, value in items for below in places(value))]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:  # noqa: ANN401 - JSON
    """The document with another part at this path; `...` takes the part away."""
    if not path:
        return value
    tree = tree.copy()
    if value is ... and len(path) == 1:
        del tree[path[0]]
    else:
        tree[path[0]] = put(tree[path[0]], path[1:], value)
    return tree


def odd_document(chance: random.Random, document: dict[str, Any]) -> str:
    """One or two parts replaced, taken away or added."""
    tree: Any = document
    for _ in range(chance.randint(1, 2)):
        found = places(tree)
        path = chance.choice(found[1:] or found)
        tree = put(tree, path, ... if path and chance.random() < 0.1 else chance.choice(ODD))
        if isinstance(tree, dict) and chance.random() < 0.1:
            tree |= {chance.choice(["x", "", "\x1b", "y" * 9999]): chance.choice(ODD)}
    text = json.dumps(tree, ensure_ascii=chance.random() < 0.5)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def odd_content(chance: random.Random, file: str) -> bytes:
    """What stands in a damaged file."""
    documents = {
        "summary.json": [asdict(replace(summary(PLAIN, FAST), cells=[CELL]))],
        "run.jsonl": [asdict(PLAIN), asdict(FAST), asdict(replace(FAST, index=3))],
        "benchmark.jsonl": [asdict(CELL), asdict(replace(CELL, prompt_tokens=512))],
    }
    if chance.random() < 0.1:
        return chance.choice(BYTES)
    if file in documents:
        odd = chance.randrange(len(documents[file]))
        texts = [json.dumps(each) for each in documents[file]]
        texts[odd] = odd_document(chance, documents[file][odd])
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
    run_facts = RunFacts(task="compare", model="big", draft="small", placement={}, world_size=1, seed=7, memory=[])
    try:
        with RunFolder(folder, CONFIG) as opened:
            json.dumps([sorted(opened.finished), [row.key for row in opened.cells]])
            draft, task = NgramConfig(kind="ngram"), CompareConfig()
            named = SimpleNamespace(prompts="p.txt", run_dir="run", num_samples=1, draft=draft, task=task)
            with contextlib.suppress(SspError):  # other prompts are refused; what follows would read the lines too
                check_lines(opened.lines, cast("RunConfig", named), [Prompt(text=PLAIN.prompt)])
            opened.put_in_order()
            made = summarise(run_facts, opened.lines, opened.cells, num_draft_tokens=2)
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
    (folder / "benchmark.jsonl").write_bytes(CELL.to_json())
    damage(folder, chance)
    for main, arguments, codes in (
        (report.main, [str(folder), f"--output={tmp_path / 'alone'}"], {0, 2}),
        (report.main, [str(sound.parent), f"--output={tmp_path / 'both'}"], {0}),
        (lambda _: resume(folder), [], {0, 2}),
        (report.main, [str(sound.parent), f"--output={tmp_path / 'both'}"], {0}),
    ):
        ended = call(main, arguments)
        assert ended.code in codes, f"folder {number}: {ended.err}"
        assert "Traceback" not in ended.err
        assert len(ended.err) < 20_000


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives a crash of the machine."""
    monkeypatch.setattr("os.fsync", lambda _file: None)


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
