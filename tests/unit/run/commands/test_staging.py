"""Weights that a sweep's jobs copy to their nodes: which ones, under which name, and what the jobs then read."""

from pathlib import Path

import pytest

from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.hub import COMMIT, put
from tests.helpers.sbatch import Sweep, composed

pytestmark = pytest.mark.seconds

STAGED = ("hardware=laptop_cpu", "hydra.launcher.stage_to=/scratch/of me")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped model as acme/tiny in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return put(tmp_path / "hub", "acme/tiny", hub.resolve(catalogue.load("tiny")).iterdir())


@pytest.mark.heavy
def test_weights_are_staged_under_a_name_that_changes_with_them(sweep: Sweep, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in hub.resolve(catalogue.load("tiny")).iterdir():
        (weights / file.name).symlink_to(file)
    asked = ["model=local", f"model.path={weights}", "draft=tiny-draft", *STAGED]
    [job] = sweep(*asked).jobs
    place = job.index("--stage")
    source, copy = job[place + 1 : place + 3]
    assert source == str(weights)
    assert composed(job).model.path == copy
    assert Path(copy).parent == Path("/scratch/of me")
    assert job.count("--stage") == 1, "shipped weights stay where they are"
    (weights / "more.json").write_text("{}")
    assert copy not in sweep(*asked).jobs[-1]


@pytest.mark.heavy
def test_a_hub_model_that_is_not_here_cannot_be_staged(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_args, **_options: None)
    words = ("hardware=p4d_24xlarge", "model=7B", "draft=none", "task=generate")
    ended = sweep(*words, "hydra.launcher.stage_to=/scratch")
    assert (ended.code, ended.jobs) == (2, [])
    assert f"hf download {catalogue.load('7B').hub_id}" in ended.err


@pytest.mark.heavy
def test_a_hub_model_of_which_only_the_config_is_here_cannot_be_staged(sweep: Sweep, snapshot: Path) -> None:
    for weights in snapshot.glob("*.safetensors"):
        weights.unlink()
    ended = sweep("model=acme/tiny", f"model.revision={COMMIT}", "draft=none", "task=generate", *STAGED)
    assert (ended.code, ended.jobs) == (2, [])
    assert f"not in the hub's cache: hf download acme/tiny --revision {COMMIT}" in ended.err


@pytest.mark.usefixtures("snapshot")
def test_a_job_reads_a_copy_instead_of_a_revision_on_the_hub(sweep: Sweep) -> None:
    both = (f"model.revision={COMMIT}", "draft=local", "draft.model.hub_id=acme/tiny", "draft.model.revision=main")
    ended = sweep("model=acme/tiny", *both, *STAGED)
    assert ended.code == 0, ended.err
    [job] = ended.jobs
    run = composed(job)
    assert run.draft.model
    assert Path(str(run.model.path)).parent == Path(str(run.draft.model.path)).parent == Path("/scratch/of me")


@pytest.mark.heavy
def test_synthetic_weights_are_not_staged(sweep: Sweep) -> None:
    ended = sweep("model=7B", "draft=tinyllama_1B", "weights=synthetic", "hardware=p4d_24xlarge", STAGED[1])
    assert ended.code == 0, ended.err
    [job] = ended.jobs
    assert "--stage" not in job
    assert composed(job).model.path is None
