"""The end of a run, even an interrupted one: records and shows its measurements with the forecasts."""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from llama_ssp.config.drafters import draft_name
from llama_ssp.config.tasks import task_of
from llama_ssp.errors import ConfigError, FailedEvaluation
from llama_ssp.reports.records import Forecast, RankActivity, RankMemory, RunFacts
from llama_ssp.reports.summary import round_gains, summarise
from llama_ssp.session.excerpts import excerpts
from llama_ssp.session.session import Session
from llama_ssp.tasks.dispatch import conclude_task
from llama_ssp.tasks.dry_run import forecast, planned_bytes
from llama_ssp.tasks.slowness import Surroundings, changed_machine, late_draft, slowness


def finalize(session: Session) -> None:
    """Collect every rank's memory; on rank 0 write the summary, print the table, and draw picture and report.

    The report comes last, since matplotlib takes a second to import: the user can read the results meanwhile.
    """
    comm, folder, config = session.world.comm, session.folder, session.config
    session.memory.sample()
    peaks = [json.loads(peak) for peak in comm.gather_text(json.dumps(session.memory.peak_bytes))]
    activities = _activities(session)
    if folder is None:
        return
    if config.placement.num_replicas > 1:
        folder.put_in_order()
    task = task_of(config)
    planned = planned_bytes(session.plan) if session.plan else [None] * comm.size
    facts = RunFacts(
        task=task.name, model=config.model.name, draft=draft_name(config.draft), weights=config.weights.name,
        placement=_placement(session), world_size=comm.size, seed=config.seed,
        memory=[
            RankMemory(rank=rank, planned_bytes=planned[rank], measured_peak_bytes=peak)
            for rank, peak in enumerate(peaks)
        ],
        forecast=forecast(session.plan.timing) if session.plan and not task.largest_cell else Forecast(),
        startup=session.start_clock.times,
    )  # fmt: skip
    gains_of = None
    if activities:
        waits = any(each.waits for each in activities)
        gains_of = partial(round_gains, num_draft_tokens=config.speculation.most_draft_tokens, waits=waits)
    shown = excerpts(folder.lines, session.models.tokenizer, gains_of=gains_of)
    summary = summarise(
        facts, folder.lines, folder.rows, evaluation=session.evaluation, excerpts=shown, activities=activities,
        num_draft_tokens=config.speculation.most_draft_tokens if session.models.drafts else 0,
    )  # fmt: skip
    folder.write_summary(summary)
    shows_table = bool(folder.lines) and task.shows_table
    session.terminal.results(summary, run_dir=folder.path, shows_table=shows_table)
    around = Surroundings.of(session.world, session.thread_slowness)
    late = changed = None
    if plan := session.plan:
        late = late_draft(summary, plan.timing, around)
        changed = changed_machine(summary, plan.hardware, around)
    if sentence := late or slowness(summary, around) or changed:
        session.terminal.say(sentence)
    conclude_task(session)
    try:
        folder.write_report(summary)
    except ConfigError as error:  # the run is complete without its figures
        session.terminal.say(f"{error}; llama-ssp report writes report.html later")


def _activities(session: Session) -> list[RankActivity]:
    """What each rank did in rounds that overlap; empty in any other run."""
    if not session.config.speculation.overlap:
        return []
    own = json.dumps(asdict(session.activity))
    return [RankActivity(**json.loads(each)) for each in session.world.comm.gather_text(own)]


def pass_gate(session: Session) -> None:
    """Raise FailedEvaluation on every rank if the run has a gate and its evaluation failed.

    The ranks wait here for the records of rank 0, which an error of another rank would cut off.
    """
    if not session.has_gate:
        return
    found = session.evaluation
    failure = session.world.comm.broadcast_text(found.sentence if found and not found.passed else "", src=0)
    if failure:
        raise FailedEvaluation(failure)


def _placement(session: Session) -> dict[str, Any]:
    placement, layout = session.config.placement, session.models.mesh.layout
    target, draft = layout.target_ranks, layout.draft_ranks
    parts: dict[str, Any] = {"target": {"kind": placement.target.kind.name, "ranks": [*target], "tp_size": len(target)}}
    if draft:
        tp_size = 1 if layout.splits_batch else len(draft)
        parts["draft"] = {"kind": layout.draft_kind.name, "ranks": [*draft], "tp_size": tp_size}
    return parts | {"num_replicas": placement.num_replicas}
