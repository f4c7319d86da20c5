"""The time until the first token is that of this process, and each step has one time."""

import subprocess
import sys
import time
from dataclasses import asdict

from llama_ssp.tasks.startup import StartClock
from tests.helpers.repository import ROOT


def test_a_step_has_the_time_when_it_was_first_reached_counted_from_the_beginning() -> None:
    before_s = time.time()
    clock = StartClock(age_s=100.0)
    for step in ("composed_s", "imported_s", "composed_s"):
        clock.reach(step)
    found = clock.times
    assert found.composed_s is not None
    assert found.imported_s is not None
    assert 100.0 <= found.composed_s <= found.imported_s <= 100.0 + time.time() - before_s + 0.1
    assert abs(before_s - 100.0 - found.began_unix_s) < 1.0
    assert [step for step, reached in asdict(found).items() if reached is None] == [
        "joined_s", "checked_s", "loaded_s", "first_token_s",
    ]  # fmt: skip


def test_the_age_of_a_process_counts_its_interpreter_and_its_imports() -> None:
    program = "import time; time.sleep(0.2); from llama_ssp.tasks.startup import process_age_s; print(process_age_s())"
    began_s = time.monotonic()
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.2 < float(said.stdout) < time.monotonic() - began_s + 0.05
