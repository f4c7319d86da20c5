"""A pair with two tokenizers on two ranks, as a user starts it."""

from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.disturbed import lines
from tests.helpers.lanes import heavy, slow
from tests.helpers.other_tokenizer import PROMPT, save_pair

pytestmark = pytest.mark.distributed(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's checkpoints."""
    made = tmp_path_factory.mktemp("two tokenizers")
    save_pair(made)
    return made


@pytest.mark.parametrize("placement", [slow("own_gpu"), heavy("sharded"), slow("replicated")])
def test_greedy_text_is_the_targets_own_on_two_ranks(placement: str, folder: Path, tmp_path: Path) -> None:
    pair = ["model=local", "draft=local", f"model.path={folder / 'target'}", f"draft.model.path={folder / 'draft'}"]
    own = ["draft.tokenizer=own", f"placement={placement}", "sampling=greedy"]
    done = run([*pair, *own, f"prompt={PROMPT}", "max_new_tokens=50", f"run_dir={tmp_path / 'run'}"], num_ranks=2)
    assert done.returncode == 0, done.stderr
    plain, drafted = lines(tmp_path / "run")
    assert drafted["token_ids"] == plain["token_ids"]
    assert len(drafted["token_ids"]) == 50
    assert sum(drafted["accepted_lengths"]) > 25
    assert "continuing without" not in (tmp_path / "run" / "run.log").read_text()
