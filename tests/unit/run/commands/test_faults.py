"""Three hundred and fifty seeded faults of checkpoints and run folders: each ends with a sentence or is survived.

The program runs in this process, on a random pair: the target in several files with their index, the draft in one.
"""

import contextlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.in_process import Ended, launch
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

pytestmark = pytest.mark.seconds

NUM_CHECKPOINT_FAULTS = 150
NUM_RUN_FAULTS = 50


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What was done to which file."""

    file: Path
    what: str


def damage(files: list[Path], *, seed: int) -> Fault:
    """Truncate one of the files or flip a bit in up to three bytes of it, as the seed says.

    Args:
        files: to choose from; bytes of a safetensors file are flipped in its header alone.
        seed: the same seed does the same to the same files.
    """
    draw = random.Random(seed)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    if not content or draw.random() < 0.4:
        length = draw.randrange(len(content)) if content else 0
        file.write_bytes(content[:length])
        return Fault(file=file, what=f"cut to {length} of {len(content)} bytes")
    end = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else len(content)
    places = draw.sample(range(end), draw.randint(1, min(3, end)))
    for place in places:
        content[place] ^= 1 << draw.randrange(7)  # text mostly stays text: the parsers get past the encoding
    file.write_bytes(content)
    return Fault(file=file, what=f"bytes {places} flipped")


def seeds(number: int) -> list[object]:
    """All seeds, of which one in 25 runs always, a tenth with --heavy, and the rest with --slow."""
    marks = [()] * (number // 25) + [pytest.mark.heavy] * (number // 10 - number // 25)
    marks += [pytest.mark.slow] * (number - len(marks))
    return [pytest.param(seed, marks=mark) for seed, mark in enumerate(marks)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair and a finished run of it."""
    folder = tmp_path_factory.mktemp("sound")
    build_checkpoint(folder / "target", "llama", max_shard_size="100KB")
    build_checkpoint(folder / "draft", "llama", num_hidden_layers=1)
    for part in ("target", "draft"):
        save_tokenizer(folder / part, VOCAB_SIZE)
    ended = complete(folder)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, free to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "damaged"))


def complete(folder: Path, *settings: str) -> Ended:
    """Complete a prompt twice with the pair of a folder, in its run folder."""
    with contextlib.chdir(folder):
        return launch(
            "task=generate", "model=local", "model.path=target", "draft=local", "draft.model.path=draft",
            "prompt=t5 t6 t7", "max_new_tokens=6", "num_samples=2", "device=cpu", "run_dir=run", *settings,
        )  # fmt: skip


def files_of(folder: Path, *parts: str) -> list[Path]:
    return sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())


def is_a_sentence(ended: Ended) -> bool:
    return ended.code == 2 and len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("seed", seeds(NUM_CHECKPOINT_FAULTS))
def test_a_fault_of_a_checkpoint_is_a_sentence_or_does_no_harm(seed: int, folder: Path) -> None:
    shutil.rmtree(folder / "run")
    fault = damage(files_of(folder, "target", "draft"), seed=seed)
    ended = complete(folder)
    assert ended.code == 0 or is_a_sentence(ended), f"{fault}\n{ended.err}"


@pytest.mark.parametrize("seed", seeds(NUM_RUN_FAULTS))
def test_a_fault_of_a_run_folder_is_a_sentence_or_does_no_harm(seed: int, folder: Path) -> None:
    fault = damage(files_of(folder, "run"), seed=seed)
    ended = complete(folder)
    assert ended.code == 0 or is_a_sentence(ended), f"{fault}\n{ended.err}"


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("config.json", '"silu"', '"sIlu"', "target/config.json describes no model that can be built (KeyError"),
        ("generation_config.json", '"eos_token_id": 1', '"eos_token_id": "1"', 'has eos_token_id "1"'),
    ],
)
def test_values_that_only_the_library_reads_are_told_too(
    name: str, old: str, new: str, sentence: str, folder: Path
) -> None:
    file = folder / "target" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    shutil.rmtree(folder / "run")
    ended = complete(folder)
    assert is_a_sentence(ended), ended.err
    assert sentence in ended.err
