"""A run folder is resumed with the models that it was begun with, and with completions that its run makes."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llama_ssp import catalogue
from llama_ssp.architectures.model_files import ADAPTER_FILE
from llama_ssp.weights import hub
from tests.helpers.adapters import round_weights, save_adapter, save_merged
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy

MODELS = ("tiny", "tiny-draft")
WEIGHTS, GENERATION, RECORD = "model.safetensors", "generation_config.json", "run/models.json"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both models of the shipped pair, and a run of them that lacks the second of two completions."""
    folder = tmp_path_factory.mktemp("begun")
    for name in MODELS:
        shutil.copytree(hub.resolve(catalogue.load(name)), folder / name)
    (folder / "p.txt").write_text("import\nfrom\n")
    assert complete(folder).code == 0
    tear(folder)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "folder"))


def complete(folder: Path, *words: str, target: str = "tiny") -> Ended:
    with contextlib.chdir(folder):
        return launch(
            "task=generate", "model=local", f"model.path={target}", "draft=local", "draft.model.path=tiny-draft",
            "max_new_tokens=4", "prompts=p.txt", "run_dir=run", *words,
        )  # fmt: skip


def texts(folder: Path, run: str = "run") -> list[tuple[str, list[int]]]:
    found = [json.loads(line) for line in (folder / run / "run.jsonl").read_text().splitlines()]
    return [(line["text"], line["accepted_lengths"]) for line in found]


def tear(folder: Path) -> None:
    """Take the last completion out of the run."""
    file = folder / "run" / "run.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def train(name: str) -> Change:
    """Other values of the same shapes."""

    def change(folder: Path) -> None:
        file = folder / name / WEIGHTS
        weights, size = load_file(file), file.stat().st_size
        others = {key: each * (1.01 if "q_proj" in key else 1) for key, each in weights.items()}
        save_file(others, file, {"format": "pt"})
        assert file.stat().st_size == size

    return change


def end_elsewhere(folder: Path) -> None:
    content = json.loads((folder / "tiny" / GENERATION).read_text())
    (folder / "tiny" / GENERATION).write_text(json.dumps(content | {"eos_token_id": 5}))


def stray(**changes: object) -> Change:
    """A completion that the run does not make."""

    def change(folder: Path) -> None:
        first = (folder / "run" / "run.jsonl").read_text()
        (folder / "run" / "run.jsonl").write_text(f"{first}{json.dumps(json.loads(first) | {'index': 1} | changes)}\n")

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (train("tiny"), f"({WEIGHTS} of model=local differs): give the old files to resume it, name another"),
        heavy(train("tiny-draft"), f"({WEIGHTS} of draft=local differs)"),
        (end_elsewhere, f"({GENERATION} of model=local differs)"),
        (lambda here: (here / "tiny/added_tokens.json").write_text("{}"), "(added_tokens.json of model=local is new)"),
        (lambda here: (here / "tiny" / GENERATION).unlink(), f"({GENERATION} of model=local is missing)"),
        (lambda here: (here / RECORD).unlink(), "was begun by an earlier version, which drew other random numbers"),
        (lambda here: (here / RECORD).write_text('{"target": 1}'), "models.json is damaged"),
        (stray(sample=4), "holds prompt 2 sample 5 (speculative), and this run makes speculative completions"),
        (stray(mode="plain"), "holds prompt 2 sample 1 (plain)"),
    ],
)
def test_a_folder_of_another_run_is_refused_by_what_differs(change: Change, said: str, folder: Path) -> None:
    change(folder)
    before = texts(folder)
    ended = complete(folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert said in ended.err
    assert texts(folder) == before


@pytest.mark.parametrize("change", [train("tiny"), heavy(lambda folder: (folder / RECORD).unlink())])
def test_other_files_are_taken_where_one_means_it_and_are_those_of_the_folder_then(
    change: Change, folder: Path
) -> None:
    change(folder)
    assert complete(folder, "resume=anyway").code == 0
    assert len(texts(folder)) == 2
    tear(folder)
    assert complete(folder).code == 0


@pytest.mark.heavy
def test_a_run_without_completions_takes_other_files(folder: Path) -> None:
    tear(folder)
    train("tiny")(folder)
    assert complete(folder).code == 0


def test_a_copy_elsewhere_is_the_same_model(folder: Path) -> None:
    shutil.copytree(folder / "tiny", folder / "copy")
    for file in folder.glob("*/*.*"):
        os.utime(file, (1, 1))
    assert complete(folder, target="copy").code == 0


def test_an_adapter_writes_what_the_merged_model_writes_and_is_compared_when_a_run_is_resumed(folder: Path) -> None:
    for name in MODELS:
        round_weights(folder / name)
        save_adapter(folder / f"adapter-{name}", folder / name)
        save_merged(folder / f"merged-{name}", folder / name, folder / f"adapter-{name}")
    assert complete(folder, "draft.model.path=merged-tiny-draft", "run_dir=merged", target="merged-tiny").code == 0
    words = ("model.adapter=adapter-tiny", "draft.model.adapter=adapter-tiny-draft", "run_dir=adapted")
    ended = complete(folder, *words)
    assert ended.code == 0, ended.err
    assert texts(folder, "adapted") == texts(folder, "merged") != texts(folder)
    file = folder / "adapter-tiny" / ADAPTER_FILE
    save_file({name: -each for name, each in load_file(file).items()}, file)
    assert f"({ADAPTER_FILE} of model=local differs)" in complete(folder, *words).err
