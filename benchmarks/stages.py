"""Stages on one machine: 8 rows of `tiny` on two stages of one thread each, next to one rank of two threads.

    .venv/bin/python -m benchmarks.stages           prints figure and bubbles
    .venv/bin/python -m benchmarks.stages --store   and stores them in benchmarks/results/stages.jsonl

Runs take turns, each a start of its own, and prompts do not count. With groups the stages work at the same time. The
bubble of one group is measured as the part of the time of two ranks that a rank of one thread with all layers does not
need, and planned by `planning.timing.bubble`. Two groups pass two stages in three steps, each of half the rows and half
the layers: one thread with half the rows says how long these would take without messages and a busy neighbour.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.measured import ROOT, Goal, store, table_of_goals
from llama_ssp.planning.timing import CostModel, bubble
from llama_ssp.run.calibration import interleave, median_ratio
from llama_ssp.run.tasks.dry_run import hardware_of, plan_of_run
from llama_ssp.settings.compose import compose, to_run_config

ROWS, NUM_NEW_TOKENS, REPETITIONS, AT_MOST = 8, 128, 7, 1.15
PROMPT = "import os"
COMMON = [
    "task=generate",
    "task.format=jsonl",
    "device=cpu",
    "draft=none",
    "ignore_eos=true",
    f"max_new_tokens={NUM_NEW_TOKENS}",
]


def rows_of(number: int) -> list[str]:
    """The settings of so many rows."""
    return [f"batch_size={number}", f"num_samples={number}"]


STAGES = ["ranks=2", "placement.target.stages=2"]
TWO_THREADS, ONE_THREAD, IN_ONE_GROUP, IN_TWO_GROUPS = "two threads", "one thread", "1 group", "2 groups"
HALF_THE_ROWS, STEPS_OF_TWO_GROUPS = "one thread, half the rows", 3
CANDIDATES: dict[str, tuple[list[str], dict[str, str]]] = {
    TWO_THREADS: (rows_of(ROWS), {"OMP_NUM_THREADS": "2"}),
    ONE_THREAD: (rows_of(ROWS), {"OMP_NUM_THREADS": "1"}),
    HALF_THE_ROWS: (rows_of(ROWS // 2), {"OMP_NUM_THREADS": "1"}),
    IN_ONE_GROUP: ([*rows_of(ROWS), *STAGES, "placement.target.groups=1"], {}),
    IN_TWO_GROUPS: ([*rows_of(ROWS), *STAGES, "placement.target.groups=2"], {}),
}


def decoding_s(name: str, _repetition: int) -> float:
    """Seconds from the first token of all rows to the last one, of a new run."""
    settings, threads = CANDIDATES[name]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | threads
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "llama_ssp", "run", *COMMON, *settings, f"prompt={PROMPT}"]
        command.insert(-1, f"run_dir={folder}/run")
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "run.jsonl").read_text().splitlines()]
    return float(max(line["ms"] for line in lines) - max(line["first_token_ms"] for line in lines)) / 1e3


def planned_bubble(num_groups: int) -> float:
    """The share of a step in which a rank waits, as the plan of the same run says."""
    (composed,) = compose(
        [*COMMON, *rows_of(ROWS), *STAGES[1:], f"placement.target.groups={num_groups}", f"prompt={PROMPT}"]
    )
    config = to_run_config(composed)
    plan = plan_of_run(config, world_size=2, machine=hardware_of(config, on_cpu=True), lengths=[len(PROMPT)])
    return bubble(CostModel(plan.spec, plan.hardware), 1)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="keep the figures")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    arguments = parser.parse_args()
    runs = {name: partial(decoding_s, name) for name in CANDIDATES}
    seconds = interleave(runs, num_repetitions=arguments.repetitions)
    goal = Goal("2 groups / two threads", median_ratio(seconds[IN_TWO_GROUPS], seconds[TWO_THREADS]), AT_MOST)
    print(table_of_goals([goal]))
    steps = 2 / STEPS_OF_TWO_GROUPS * median_ratio(seconds[IN_TWO_GROUPS], seconds[HALF_THE_ROWS])
    print(
        f"2 groups take {steps:.2f} of {STEPS_OF_TWO_GROUPS} steps of half the rows and half the layers on one thread"
    )
    bubbles = {}
    for number, name in ((1, IN_ONE_GROUP), (2, IN_TWO_GROUPS)):
        bubbles[name] = 1 - median_ratio(seconds[ONE_THREAD], seconds[name]) / 2
        planned = planned_bubble(number)
        print(f"bubble in {name}: measured {100 * bubbles[name]:.0f} %, planned {100 * planned:.0f} %")
        bubbles[f"{name}, planned"] = planned
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("seconds:", ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    if arguments.store:
        store("stages", {"ratio": goal.measured, "steps": steps, "bubbles": bubbles, "seconds": medians, "rows": ROWS})


if __name__ == "__main__":
    main()
