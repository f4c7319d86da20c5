"""A run folder is resumed with the prompts and models that it was begun with, and where the disk was full."""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.helpers.disturbed import lines
from tests.helpers.edits import edit_json, edit_tensors
from tests.helpers.hub import shipped
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint

SMALL = ("task=generate", "model=tiny-draft", "draft=none", "max_new_tokens=2", "batch_size=4")


def complete(folder: Path, *prompts: str, max_new_tokens: int = 2) -> Ended:
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    length = f"max_new_tokens={max_new_tokens}"
    return launch(*SMALL, f"prompts={folder}/p.jsonl", f"run_dir={folder}/run", length)


def recorded(folder: Path) -> dict[int, str]:
    return {line["index"]: line["prompt"] for line in lines(folder / "run")}


def texts(run_dir: Path) -> dict[int, str]:
    return {line["index"]: line["text"] for line in sorted(lines(run_dir), key=lambda line: line["index"])}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (("import", "def", "class"), "prompt 2 of prompts={folder}/p.jsonl was 'from' when .*, and is now 'def'"),
        slow(("import",), "was 'from' when .*, and is now missing, with 1 left"),
        slow(("import", "from" + 50 * " a"), "was 'from' when .*, and is now 'from a a a"),
        heavy(("import", "from", 60 * "x " + "two"), "x x one' when .*x x two'"),
    ],
)
def test_other_prompts_are_refused_by_the_first_that_differs(
    changed: tuple[str, ...], difference: str, tmp_path: Path
) -> None:
    assert complete(tmp_path, "import", "from", 60 * "x " + "one").code == 0
    ended = complete(tmp_path, *changed)
    ended.check_refusal("name another run_dir")
    assert re.search(difference.format(folder=tmp_path), ended.err)
    assert len(recorded(tmp_path)) == 3


@pytest.mark.seconds
def test_prompts_that_follow_the_old_ones_are_completed_and_half_a_character_is_refused(tmp_path: Path) -> None:
    assert complete(tmp_path, "import", "一\x1b").code == 0
    ended = complete(tmp_path, "import", "一\x1b", "class", "from")
    assert (ended.code, recorded(tmp_path)) == (0, {0: "import", 1: "一\x1b", 2: "class", 3: "from"})
    assert "plain: 3 of 4 prompts at " in ended.err
    complete(tmp_path, "import", "\ud800").check_refusal("'\\ud800'")


@pytest.mark.parametrize("kind", [slow("granitemoehybrid, dense"), slow("kimi_linear"), heavy("qwen3_next")])
def test_a_hybrid_goes_on_with_the_texts_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    """Samples of a prompt share its states, rows are refilled, and what is missing is made in other batches."""
    build_checkpoint(tmp_path / "hybrid", kind, vocab_size=4096)
    for file in shipped("tiny").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "hybrid")
    (tmp_path / "p.txt").write_text("import\ndef f(x):\nclass A\n")
    words = (
        "task=generate",
        "model=local",
        f"model.path={tmp_path}/hybrid",
        "draft=local",
        f"draft.model.path={tmp_path}/hybrid",
        "draft.model.dtype=bf16",
        f"prompts={tmp_path}/p.txt",
        "num_samples=3",
        "batch_size=2",
        "max_new_tokens=9",
        f"run_dir={tmp_path}/run",
    )
    whole, file = samples(launch(*words)), tmp_path / "run" / "run.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    assert samples(launch(*words)) == whole
    assert len({*whole.values()}) == len(whole) == 9


def samples(ended: Ended) -> dict[tuple[int, int], str]:
    return {(line["index"], line["sample"]): line["text"] for line in ended.well().lines}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token_ids": [4, 99999]}, "has token id 99999, and the model knows 4096 ids"),
        ({"token_ids": [4, 5]}, "has a text that is not that of its token_ids"),
        ({"text": "other"}, "has a text that is not that of its token_ids"),
    ],
)
def test_a_line_whose_text_no_ids_of_the_model_have_is_damaged(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    assert complete(tmp_path, "import", "一\x1b").code == 0
    file, whole = tmp_path / "run" / "run.jsonl", (tmp_path / "run" / "run.jsonl").read_text()
    first, second = whole.splitlines()
    file.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    complete(tmp_path, "import", "一\x1b").check_refusal(
        f"prompt 2 sample 1 (plain) in run.jsonl of run_dir={tmp_path}/run {sentence}",
        "remove such a line to have its completion made again",
    )
    file.write_text(f"{first}\n")
    assert complete(tmp_path, "import", "一\x1b").code == 0
    assert texts(tmp_path / "run")[1] == json.loads(second)["text"]


@pytest.mark.seconds
def test_rows_that_no_prompt_fills_cost_nothing(tmp_path: Path) -> None:
    """So many would not fit; the settings keep what was asked for."""
    (tmp_path / "p.txt").write_text("import\nfrom\n")
    words = (*SMALL, f"prompts={tmp_path}/p.txt", f"run_dir={tmp_path}/run", "batch_size=10000000")
    ended = launch(*words)
    assert (ended.code, ended.err.count("does not fit")) == (0, 0), ended.err
    assert launch(*words, "dry_run=true", "hardware=laptop_cpu").code == 0
    assert recorded(tmp_path) == {0: "import", 1: "from"}
    assert "batch_size: 10000000\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_what_nobody_has_foreseen_is_in_the_status_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_models(*_args: object, **_options: object) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr("llama_ssp.run.pipeline.load_models", load_models)
    ended = complete(tmp_path, "import")
    assert (ended.code, "no such thing\nand more" in ended.err) == (None, True)
    assert (tmp_path / "run" / "status").read_text() == "1: ValueError: no such thing\n"


class Typed(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.heavy
def test_typed_prompts_are_counted_on_and_one_typed_twice_is_the_second_equal_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed in ("import\nfrom\n", "import\nimport\n"):
        monkeypatch.setattr(sys, "stdin", Typed(typed))
        assert launch(*SMALL, "prompts=-", f"run_dir={tmp_path}/typed", "max_new_tokens=12").code == 0
    assert complete(tmp_path, "import", "import", "from", "import", max_new_tokens=12).code == 0
    typed_texts, (first, second, other, third) = texts(tmp_path / "typed"), texts(tmp_path / "run").values()
    assert typed_texts == {0: first, 1: other, 2: second, 3: third}
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("num_bytes", [slow(1), heavy(3000)], ids=["not even for a lock", "for some completions"])
def test_a_full_disk_ends_a_run_in_a_sentence_and_with_more_room_it_is_completed(
    num_bytes: int, tmp_path: Path
) -> None:
    """No file may be longer."""
    words = (
        "task=generate",
        "prompt=import os",
        "max_new_tokens=24",
        "num_samples=12",
        "ignore_eos=true",
        "device=cpu",
        f"run_dir={tmp_path}/run",
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        ended = launch(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.code == 2, ended.err
    *progress, sentence = ended.err.splitlines()
    assert all("of 12 completions" in line for line in progress), ended.err
    assert "free some space and give the same command" in sentence, ended.err
    ended = launch(*words).well()
    assert [line["sample"] for line in ended.lines] == [*range(12)]
    assert ended.status == "done\n"
    assert not list((tmp_path / "run").glob("*.tmp"))


MODELS = ("tiny", "tiny-draft")
WEIGHTS, GENERATION, RECORD = "model.safetensors", "generation_config.json", "run/models.json"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both models of the shipped pair, and a run of them that lacks the second of two completions."""
    folder = tmp_path_factory.mktemp("begun")
    for name in MODELS:
        shutil.copytree(shipped(name), folder / name)
    (folder / "p.txt").write_text("import\nfrom\n")
    assert complete_of_other_models(folder).code == 0
    tear(folder)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "folder"))


def complete_of_other_models(folder: Path, *words: str, target: str = "tiny") -> Ended:
    with contextlib.chdir(folder):
        return launch(
            "task=generate",
            "model=local",
            f"model.path={target}",
            "draft=local",
            "draft.model.path=tiny-draft",
            "max_new_tokens=4",
            "prompts=p.txt",
            "run_dir=run",
            *words,
        )


def texts_of_other_models(folder: Path, run: str = "run") -> list[tuple[str, list[int]]]:
    found = [json.loads(line) for line in (folder / run / "run.jsonl").read_text().splitlines()]
    return [(line["text"], line["accepted_lengths"]) for line in found]


def tear(folder: Path) -> None:
    """Take the last completion out of the run."""
    file = folder / "run" / "run.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def grow(tensors: dict[str, Tensor]) -> None:
    tensors |= {name: 1.01 * values for name, values in tensors.items() if "q_proj" in name}


def train(name: str) -> Change:
    """Other values of the same shapes, in a file of the same size."""

    def change(folder: Path) -> None:
        file = folder / name / WEIGHTS
        size = file.stat().st_size
        edit_tensors(file, grow)
        assert file.stat().st_size == size

    return change


def stray(**changes: object) -> Change:
    """A completion that the run does not make."""

    def change(folder: Path) -> None:
        first = (folder / "run" / "run.jsonl").read_text()
        (folder / "run" / "run.jsonl").write_text(f"{first}{json.dumps(json.loads(first) | {'index': 1} | changes)}\n")

    return change


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (train("tiny"), f"({WEIGHTS} of model=local differs): give the old files to resume it, name another"),
        slow(train("tiny-draft"), f"({WEIGHTS} of draft=local differs)"),
        (
            lambda here: edit_json(here / "tiny" / GENERATION, eos_token_id=5),
            f"({GENERATION} of model=local differs)",
        ),
        heavy(
            lambda here: (here / "tiny/added_tokens.json").write_text("{}"), "(added_tokens.json of model=local is new)"
        ),
        heavy(lambda here: (here / "tiny" / GENERATION).unlink(), f"({GENERATION} of model=local is missing)"),
        (lambda here: (here / RECORD).unlink(), "was begun by an earlier version, which drew other random numbers"),
        (lambda here: (here / RECORD).write_text('{"target": 1}'), "models.json is damaged"),
        heavy(stray(sample=4), "holds prompt 2 sample 5 (speculative), and this run makes speculative completions"),
        (stray(mode="plain"), "holds prompt 2 sample 1 (plain)"),
    ],
)
def test_a_folder_of_another_run_is_refused_by_what_differs(change: Change, said: str, folder: Path) -> None:
    change(folder)
    before = texts_of_other_models(folder)
    complete_of_other_models(folder).check_refusal(said)
    assert texts_of_other_models(folder) == before


@pytest.mark.parametrize("change", [heavy(train("tiny")), slow(lambda folder: (folder / RECORD).unlink())])
def test_other_files_are_taken_where_one_means_it_and_are_those_of_the_folder_then(
    change: Change, folder: Path
) -> None:
    change(folder)
    assert complete_of_other_models(folder, "resume=anyway").code == 0
    assert len(texts_of_other_models(folder)) == 2
    tear(folder)
    assert complete_of_other_models(folder).code == 0


@pytest.mark.heavy
def test_a_run_without_completions_takes_other_files(folder: Path) -> None:
    tear(folder)
    train("tiny")(folder)
    assert complete_of_other_models(folder).code == 0


@pytest.mark.seconds
def test_a_copy_elsewhere_is_the_same_model(folder: Path) -> None:
    shutil.copytree(folder / "tiny", folder / "copy")
    for file in folder.glob("*/*.*"):
        os.utime(file, (1, 1))
    assert complete_of_other_models(folder, target="copy").code == 0


def as_on_a_cluster(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system have no locks, by an error number, and sync no folder."""
    sync = os.fsync

    def lock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def sync_files(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(file)

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(os, "fsync", sync_files)


@pytest.mark.seconds
@pytest.mark.parametrize("number", [errno.ENOLCK, heavy(errno.ENOSYS), heavy(errno.EOPNOTSUPP)])
def test_runs_resumptions_and_sweeps_go_on_where_neither_locks_nor_synced_folders_are(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_cluster(number, monkeypatch)
    said = f"run_dir={tmp_path}/run is on a file system without locks: let no other run use it meanwhile\n"
    whole, file = complete(tmp_path, "import", "from").well(), tmp_path / "run" / "run.jsonl"
    assert whole.err.count(said) == (tmp_path / "run" / "run.log").read_text().count(said) == 1
    before = texts(tmp_path / "run")
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    assert said in complete(tmp_path, "import", "from").well().err
    assert (texts(tmp_path / "run"), whole.status) == (before, "done\n")
    for _ in range(2):  # the second call resumes
        launch(*SMALL, "prompt=import", "-m", "seed=1,2", f"run_dir={tmp_path}/sweep").well()
    assert [(tmp_path / "sweep" / name / "status").read_text() for name in "01"] == ["done\n"] * 2


def test_a_lock_that_fails_for_another_reason_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_cluster(errno.EIO, monkeypatch)
    complete(tmp_path, "import").check_refusal("cannot use", "lock: input/output error")
