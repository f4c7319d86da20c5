"""A run folder is resumed with the models that it was begun with, and with completions that its run makes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llama_ssp.run.commands import manifest
from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from llama_ssp.weights.adapter import ADAPTER_FILE
from tests.helpers.adapters import round_weights, save_adapter, save_merged
from tests.helpers.in_process import Ended, launch
from tests.helpers.lanes import heavy

pytestmark = pytest.mark.seconds

WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with both models of the shipped pair, and two prompts."""
    for name in ("tiny", "tiny-draft"):
        shutil.copytree(hub.resolve(catalogue.load(name)), tmp_path / name)
    (tmp_path / "p.txt").write_text("import\nfrom\n")
    return tmp_path


def complete(folder: Path, *words: str, target: str = "tiny") -> Ended:
    return launch(
        "task=generate", "model=local", f"model.path={folder}/{target}", "draft=local",
        f"draft.model.path={folder}/tiny-draft", "max_new_tokens=4", f"prompts={folder}/p.txt", f"run_dir={folder}/run",
        *words,
    )  # fmt: skip


def tear(folder: Path) -> list[str]:
    """Take the last completion out of the run; returns those that are left."""
    file = folder / "run" / "run.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    return lines[:-1]


def train(folder: Path) -> None:
    """Other values of the same shapes."""
    weights = load_file(folder / WEIGHTS)
    for name in weights:
        if "q_proj" in name:
            weights[name] *= 1.01
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def end_elsewhere(folder: Path) -> None:
    content = json.loads((folder / GENERATION).read_text())
    (folder / GENERATION).write_text(json.dumps(content | {"eos_token_id": 5}))


def add_token(folder: Path) -> None:
    (folder / "added_tokens.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "model", "said"),
    [
        (train, "tiny", f"({WEIGHTS} of model=local differs)"),
        heavy(train, "tiny-draft", f"({WEIGHTS} of draft=local differs)"),
        (end_elsewhere, "tiny", f"({GENERATION} of model=local differs)"),
        heavy(add_token, "tiny", "(added_tokens.json of model=local is new)"),
        heavy(lambda folder: (folder / GENERATION).unlink(), "tiny", f"({GENERATION} of model=local is missing)"),
    ],
)
def test_other_files_are_refused_by_their_names_and_taken_where_one_means_it(
    change: Callable[[Path], None], model: str, said: str, folder: Path
) -> None:
    assert complete(folder).code == 0
    kept, size = tear(folder), (folder / model / WEIGHTS).stat().st_size
    change(folder / model)
    assert (folder / model / WEIGHTS).stat().st_size == size
    ended = complete(folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert said in ended.err
    assert "give the old files to resume it, name another run_dir, or give resume=anyway" in ended.err
    assert (folder / "run" / "run.jsonl").read_text() == "".join(kept)
    assert complete(folder, "resume=anyway").code == 0
    assert len(tear(folder)) == 1
    assert complete(folder).code == 0, "these are the files of the folder now"


def test_a_copy_elsewhere_is_the_same_model(folder: Path) -> None:
    lines = complete(folder).lines
    tear(folder)
    shutil.copytree(folder / "tiny", folder / "copy")
    for file in folder.glob("*/*.*"):
        os.utime(file, (1, 1))
    assert [line["text"] for line in complete(folder, target="copy").lines] == [line["text"] for line in lines]


def test_an_adapter_writes_what_the_merged_model_writes_and_is_compared_when_a_run_is_resumed(folder: Path) -> None:
    for name in ("tiny", "tiny-draft"):
        round_weights(folder / name)
        save_adapter(folder / f"adapter-{name}", folder / name)
        save_merged(folder / f"merged-{name}", folder / name, folder / f"adapter-{name}")
    draft, other = f"draft.model.path={folder}/merged-tiny-draft", f"run_dir={folder}/other"
    merged = complete(folder, draft, other, target="merged-tiny")
    words = [f"model.adapter={folder}/adapter-tiny", f"draft.model.adapter={folder}/adapter-tiny-draft"]
    ended = complete(folder, *words)
    assert ended.code == 0, ended.err
    assert [line["text"] for line in ended.lines] == [line["text"] for line in merged.lines]
    assert [line["accepted_lengths"] for line in ended.lines] == [line["accepted_lengths"] for line in merged.lines]
    base = complete(folder, f"run_dir={folder}/base")
    assert [line["text"] for line in ended.lines] != [line["text"] for line in base.lines]
    tear(folder)
    assert "(adapter_config.json of model=local is missing" in complete(folder, words[1]).err
    file = folder / "adapter-tiny" / ADAPTER_FILE
    save_file({name: -each for name, each in load_file(file).items()}, file)
    assert f"({ADAPTER_FILE} of model=local differs)" in complete(folder, *words).err


@pytest.mark.heavy
def test_a_run_without_completions_takes_other_files(folder: Path) -> None:
    assert complete(folder).code == 0
    (folder / "run" / "run.jsonl").write_text("")
    train(folder / "tiny")
    assert complete(folder).code == 0


@pytest.mark.heavy
def test_manifests_find_what_lies_between_the_blocks(folder: Path) -> None:
    def write_manifests() -> None:
        for name in ("tiny", "tiny-draft"):
            assert manifest.main([str(folder / name)]) == 0

    write_manifests()
    verified = ("model.verify=true", "draft.model.verify=true")
    assert complete(folder, *verified).code == 0
    tear(folder)
    with (folder / "tiny" / WEIGHTS).open("r+b") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))  # the beginning of the first tensor
        stream.write(b"\0\0")
    write_manifests()
    assert complete(folder).code == 0, "too little for the blocks"
    tear(folder)
    assert f"({WEIGHTS} of model=local differs)" in complete(folder, *verified).err


def test_a_folder_of_an_earlier_version_is_refused_by_what_differs(folder: Path) -> None:
    assert complete(folder).code == 0
    tear(folder)
    (folder / "run" / "models.json").unlink()
    ended = complete(folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "was begun by an earlier version, which drew other random numbers" in ended.err
    assert "or give resume=anyway" in ended.err
    assert complete(folder, "resume=anyway").code == 0


@pytest.mark.heavy
def test_a_damaged_record_of_the_files_is_a_sentence(folder: Path) -> None:
    assert complete(folder).code == 0
    (folder / "run" / "models.json").write_text('{"target": 1}')
    ended = complete(folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "models.json is damaged" in ended.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sample": 4}, "prompt 2 sample 5 (speculative)"), ({"mode": "plain"}, "prompt 2 sample 1 (plain)")],
)
def test_completions_that_the_run_does_not_make_are_refused(
    changes: dict[str, object], said: str, folder: Path
) -> None:
    assert complete(folder).code == 0
    (first,) = tear(folder)
    stray = json.dumps(json.loads(first) | {"index": 1} | changes)
    (folder / "run" / "run.jsonl").write_text(f"{first}{stray}\n")
    ended = complete(folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert f"holds {said}, and this run makes speculative completions with num_samples=1" in ended.err
