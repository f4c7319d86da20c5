"""Groups of gloo ranks, one start for each number of ranks and session."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from tests.distributed.ranks import (
    ONE_PASS,
    SYNTHETIC,
    Case,
    Cell,
    FromPython,
    Quantized,
    Seen,
    Together,
    need_extensions,
    see_all,
)
from tests.helpers.draft_heads import make_tensors, save_original
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.one_pass_heads import VOCABULARY, save_pair
from tests.helpers.tokenizers import save_tokenizer


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> list[Case]:
    """All cases of the tests of this folder."""
    return cases_of(request.session, Path(__file__).parent)


def cases_of(session: pytest.Session, folder: Path) -> list[Case]:
    """All cases of a session's tests in a folder, cells that share models one after the other."""
    params = [
        item.callspec.params for item in session.items if hasattr(item, "callspec") and folder in item.path.parents
    ]
    cases = {each["case"] for each in params if isinstance(each.get("case"), Cell | FromPython | Quantized | Together)}
    cases |= {case.alone for case in cases if isinstance(case, Cell)}
    return sorted(filter(_has_extensions, cases), key=str)


def _has_extensions(case: Case) -> bool:
    """Whether this installation has the extensions of a case."""
    try:
        need_extensions(case)
    except (ConfigError, pytest.skip.Exception):
        return False
    return True


@pytest.fixture(scope="session")
def pairs(asked: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    quantized = {case.family for case in asked if isinstance(case, Quantized)}
    families = {case.pair for case in asked if isinstance(case, Cell)} - {"tiny", "head", SYNTHETIC} | quantized

    def save(path: Path, family: str, **shape: Any) -> None:
        build_checkpoint(path, family, **shape)
        save_tokenizer(path, VOCAB_SIZE)

    for name in [name for name in families if name.startswith("mtp ")]:
        save_with_mtp(folder / name, name.removeprefix("mtp "))
        save_tokenizer(folder / name, VOCAB_SIZE)
        families.discard(name)
    for name in [name for name in families if name.startswith(ONE_PASS)]:
        save_pair(folder / name, name.removeprefix(ONE_PASS), likely=8)
        save_tokenizer(folder / name / "target", VOCABULARY)
        families.discard(name)
    for family in families:
        save(folder / family / "target", family, num_hidden_layers=2)
        save(folder / family / "draft", family, num_hidden_layers=1)
    for family in quantized:
        save(folder / "wide" / family, family, hidden_size=256, intermediate_size=256)
    save_original(folder / "head", make_tensors())
    return folder


@pytest.fixture(scope="session")
def seen(asked: list[Case], pairs: Path) -> Seen:
    """What each rank has seen of a case; its group does all other cases of the session at the same time."""

    @cache
    def started(num_ranks: int) -> list[dict[Case, Any]]:
        return see_all(num_ranks, [case for case in asked if case.num_ranks == num_ranks], pairs)

    def find(case: Case) -> list[Any]:
        need_extensions(case)
        return [rank[case] for rank in started(case.num_ranks)]

    return find
