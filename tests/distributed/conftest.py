"""Groups of gloo ranks, one launch for each world size and session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.ranks.world import start
from llama_ssp.settings.schema import DeviceKind
from tests.distributed.cells import HEAVY_PAIRS, ONLY_HEAVY, SLOW_PAIRS
from tests.distributed.ranks import LANE, QUANTIZED, seen_by
from tests.helpers.draft_heads import make_tensors, save_original
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.repository import ROOT
from tests.helpers.tokenizers import save_tokenizer

Seen = list[dict[str, Any]]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with a random pair of each family that the lane reads."""
    folder = tmp_path_factory.mktemp("pairs")
    is_slow, is_heavy = (pytestconfig.getoption(lane) for lane in ("--slow", "--heavy"))
    for family in sorted({*QUANTIZED, *HEAVY_PAIRS * (is_slow or is_heavy), *SLOW_PAIRS * is_slow}):
        for part, num_layers in (("target", 2), ("draft", 1)):
            build_checkpoint(folder / family / part, family, num_hidden_layers=num_layers)
            save_tokenizer(folder / family / part, VOCAB_SIZE)
    for family in QUANTIZED:
        build_checkpoint(folder / "wide" / family, family, hidden_size=256, intermediate_size=256)
        save_tokenizer(folder / "wide" / family, VOCAB_SIZE)
    save_original(folder / "head", make_tensors())
    return folder


@pytest.fixture(scope="session")
def launched(pairs: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Callable[..., Seen]:
    """What each rank of a group has seen; a group of one size is started once, and one rank is this process."""
    known: dict[tuple[int, str], Seen] = {}
    is_slow = pytestconfig.getoption("--slow")
    lane = "heavy" if pytestconfig.getoption("--heavy") else "default"
    if lane == "heavy" and pytestconfig.getoption("markexpr") == "heavy":
        lane = ONLY_HEAVY
    os.environ[LANE] = "slow" if is_slow else lane

    def launch(num_ranks: int, chosen: str = "cells") -> Seen:
        if (num_ranks, chosen) not in known and (num_ranks, chosen) == (1, "cells"):
            with start(device=DeviceKind.cpu, timeout_s=120) as world:
                known[1, chosen] = [json.loads(json.dumps(seen_by(world, pairs, chosen)))]
        elif (num_ranks, chosen) not in known:
            out = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
                "-m", "tests.distributed.ranks", str(pairs), str(out), chosen,
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            known[num_ranks, chosen] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]
        return known[num_ranks, chosen]

    return launch
