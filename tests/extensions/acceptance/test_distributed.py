"""`task=acceptance` on several ranks: one trace, wherever the models are."""

from pathlib import Path

import numpy as np
import pytest

from llama_ssp.extensions.acceptance.trace import Trace
from tests.helpers.commands import run
from tests.helpers.plugins import LAW, launch, with_law

pytestmark = [pytest.mark.distributed(2), pytest.mark.slow]
READ = ["task=acceptance", "batch_size=4", "task.drafts=[tiny-draft,tiny-eagle]", "task.longest=3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = run([*READ, "max_new_tokens=12", "num_samples=2", f"run_dir={folder}"])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("placement", ["placement=own_gpu", "placement=sharded", "placement.num_replicas=2"])
def test_two_ranks_read_what_one_reads(placement: str, alone: Path, tmp_path: Path) -> None:
    """A draft with ranks of its own proposes along the text, and its first token, before any round, has no number."""
    done = run([*READ, f"task.texts={alone}", placement, f"run_dir={tmp_path}/run"], num_ranks=2)
    assert done.returncode == 0, done.stderr
    one, two = (Trace.read(folder, asked="trace").arrays for folder in (alone, tmp_path / "run"))
    first = one["text_length"].cumsum() - one["text_length"]
    for name in ("log_p", "tiny-draft/log_q", "tiny-draft/log_race", "tiny-eagle/log_q", "tiny-eagle/log_race"):
        found, wanted = (np.exp(np.delete(arrays[name], first, axis=0)) for arrays in (two, one))
        assert found == pytest.approx(wanted, abs=1e-5), name


def test_two_ranks_read_a_plugins_law_as_one_does_from_texts_over_parts_of_the_vocabulary(tmp_path: Path) -> None:
    folder, found = with_law(tmp_path), []
    words = ("task=acceptance", "draft=near", "num_samples=16", "batch_size=64", "max_new_tokens=8", "model.dtype=fp32")
    for num_ranks, texts in ((2, ()), (1, (f"task.texts={folder}/2",))):
        given = words if num_ranks == 2 else tuple(word for word in words if "=8" not in word and "=16" not in word)
        done = launch(folder, *given, *texts, f"run_dir={folder}/{num_ranks}", plugins=LAW, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        found.append(Trace.read(folder / str(num_ranks), asked="trace"))
    two, one = found
    assert two.rules("near", 0) == one.rules("near", 0) == ("speculative", "block", "coupled")
    for name in ("log_p", "near/log_q", "near/log_race"):
        assert np.exp(two.arrays[name]) == pytest.approx(np.exp(one.arrays[name]), abs=1e-5), name
