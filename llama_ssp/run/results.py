"""The end of a run, even an interrupted one: records and shows its measurements with the forecasts."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError, FailedEvaluation
from llama_ssp.ranks.cores import CoreTimes, used_by_others
from llama_ssp.registry import imported
from llama_ssp.reports import records
from llama_ssp.reports.formats import FORMATS
from llama_ssp.reports.provenance import processor
from llama_ssp.reports.runs import Run
from llama_ssp.reports.summary import round_gains, summarise
from llama_ssp.run.session import Session
from llama_ssp.run.slowness import Surroundings, disturbance, unusual_times
from llama_ssp.run.tasks.dry_run import forecast
from llama_ssp.settings.drafters import draft_label
from llama_ssp.settings.tasks import task_of
from llama_ssp.speculate.engine.text import IncrementalText
from llama_ssp.text.messages import count

_log = logging.getLogger(__name__)
_NUM_EXCERPTS, _MOST_PROMPT_CHARS, _MOST_TOKENS = 3, 400, 512


def finalize(session: Session) -> None:
    """Collect every rank's memory; on rank 0 write the summary, print the table, and draw picture and report.

    The report comes last, since matplotlib takes a second to import: the user can read the results meanwhile.
    """
    comm, folder, config = session.world.comm, session.folder, session.config
    if session.num_prompts == 0 and not task_of(config).results:  # a task or a file without prompts has no lines
        return
    session.memory.sample()
    experts_read_3, now = session.experts_read_3, CoreTimes.read(session.world.cores)
    own = (
        session.memory.peak_bytes,
        session.num_read_tokens,
        session.num_reused_tokens,
        [0.0] * 3 if experts_read_3 is None else experts_read_3.tolist(),
        now.own_s - session.began.own_s,
    )
    peaks, num_read, num_reused, experts, used_s = zip(*map(json.loads, comm.gather_text(json.dumps(own))), strict=True)
    activities = _activities(session) if config.speculation.overlap else []
    if folder is None:
        return
    task, plan, most_drafted = task_of(config), session.plan, config.most_draft_tokens
    planned = [rank.needed_bytes for rank in plan.ranks] if plan else [None] * comm.size
    layout, num_replicas = session.models.mesh.layout, config.placement.num_replicas
    replica_size = comm.size // num_replicas
    num_experts, num_expected, num_layers = map(sum, zip(*experts, strict=True))
    kind, ranks, stages = config.placement.target.kind, layout.target_ranks, layout.num_stages
    baseline = config.place.baseline if config.place else None
    placement: dict[str, Any] = {
        "target": {"kind": kind, "ranks": [*ranks], "tp_size": len(layout.scoring_ranks)}
        | ({"stages": stages, "groups": config.placement.target.groups or 1} if stages > 1 else {})
    }
    if ranks := layout.draft_ranks:
        tp_size = 1 if layout.splits_batch else len(ranks)
        placement["draft"] = {"kind": layout.draft_kind.name, "ranks": [*ranks], "tp_size": tp_size}
    if num_replicas > 1:
        folder.put_in_order()
    facts = records.RunFacts(
        task=task.name,
        model=config.model.label,
        draft=draft_label(config.draft),
        tree=config.speculation.tree,
        forced_lengths=config.speculation.forced_lengths,
        point=config.place.title if config.place else None,
        machine=_machine(session),
        weights=config.weights,
        reproducible=session.is_reproducible,
        baseline=records.Baseline(folder=baseline, ms_per_token=session.again_ms_per_token) if baseline else None,
        placement=placement | {"num_replicas": num_replicas},
        world_size=comm.size,
        seed=config.seed,
        memory=[
            records.RankMemory(rank=rank, planned_bytes=expected, measured_peak_bytes=peak)
            for rank, (expected, peak) in enumerate(zip(planned, peaks, strict=True))
        ],
        prompt_tokens=records.PromptTokens(
            num_read=sum(num_read[::replica_size]), num_reused=sum(num_reused[::replica_size])
        ),
        experts=records.ExpertsRead(num_read=num_experts / num_layers, num_expected=num_expected / num_layers)
        if num_layers
        else None,
        forecast=forecast(plan.timing) if plan and not task.largest_cell else records.Forecast(),
        startup=session.start_clock.times,
    )
    summary = summarise(
        facts,
        folder.lines,
        folder.results,
        evaluation=session.evaluation,
        activities=activities,
        excerpts=excerpts(folder.lines, session.models.tokenizer, overlapped=most_drafted if activities else None),
        num_draft_tokens=most_drafted if session.models.drafts else 0,
    )
    slow, disturbed = (
        _disturbance(session, summary, now, ranks_s=sum(used_s[: session.world.ranks.local_size]))
        if any(num_read) or folder.results
        else (None, None)  # an earlier part of the run measured the times, and has said why
    )
    summary = replace(summary, disturbed=disturbed or folder.disturbed_before(baseline))
    folder.write_summary(summary)
    terminal = session.terminal
    shows_table = bool(folder.lines) and task.shows_table
    terminal.results(summary, run_dir=folder.path, shows_table=shows_table)
    if slow:
        (terminal.say_again if shows_table or summary.cells else terminal.say)(slow)
    if task.finalize:
        imported(task.finalize, setting=f"task={task.name}")(session)
    run = Run(name=folder.path.name, status="", summary=summary, lines=tuple(folder.lines))
    for form in FORMATS.all().values():
        if form.file and form.purpose:
            try:
                folder.write_kept(form.file, form.text([run]))
            except ConfigError as error:  # the run is complete without its figures
                terminal.say(f"{error}; {form.remedy}")


def _machine(session: Session) -> str:
    """The ranks' processors or GPUs, as rank 0 sees its own."""
    world, size = session.world, count(session.world.comm.size, "rank")
    if world.device.type == "cuda":
        return f"{size}, each on a {torch.cuda.get_device_properties(world.device).name}"
    return f"{size} with {count(torch.get_num_threads(), 'thread')} on {processor()}"


def _disturbance(
    session: Session, summary: records.Summary, now: CoreTimes, *, ranks_s: float
) -> tuple[str | None, str | None]:
    """Return two sentences about what disturbed the run, and log the second one.

    The first is for the user, of a run that was slower than planned. The second is for the records, of any disturbed
    run. Either is None where it does not apply.
    """
    decoder = session.decoders.get(session.best_mode)
    others = used_by_others(session.began, now, ranks_s=ranks_s)
    around = Surroundings.of(session.world, decoder.threads.slowness if decoder else {}, others)
    slow = unusual_times(summary, session.plan, around)
    if disturbed := slow or disturbance(summary, around):
        _log.info("disturbed: %s", disturbed)
    return slow, disturbed


def _activities(session: Session) -> list[records.RankActivity]:
    """The activity of each rank in rounds that overlap."""
    comm, decoder = session.world.comm, session.decoders.get(records.SPECULATIVE)
    own = records.RankActivity(rank=comm.rank, rounds_s=0.0, waited_s=0.0)
    if decoder:
        own = records.RankActivity(
            rank=comm.rank,
            rounds_s=decoder.rounds_s,
            waited_s=decoder.clock.waited_s,
            num_rounds=decoder.num_rounds,
            draft_cpu_s=decoder.clock.draft_cpu_s,
        )
    return [records.RankActivity(**json.loads(text)) for text in comm.gather_text(json.dumps(asdict(own)))]


def excerpts(
    lines: Sequence[records.CompletionLine], tokenizer: PreTrainedTokenizerBase, *, overlapped: int | None = None
) -> list[records.Excerpt]:
    """Return excerpts of a run's first completions, one per prompt, that mark which model chose each token.

    They are speculative completions if there are any. In overlapped rounds, of which `overlapped` is the K, the number
    of tokens differs; any other round has its accepted tokens and one that the target chose.
    """
    best = [line for line in lines if line.mode == records.SPECULATIVE] or lines
    chosen = sorted((line for line in best if not line.sample), key=lambda line: line.index)[:_NUM_EXCERPTS]
    found = []
    for line in chosen:
        prompt, token_ids = line.prompt[-_MOST_PROMPT_CHARS:], line.token_ids[:_MOST_TOKENS]
        accepted_lengths = line.accepted_lengths or [0] * len(token_ids)
        gains = [num_accepted + 1 for num_accepted in accepted_lengths]
        if overlapped and line.accepted_lengths:
            gains = round_gains(accepted_lengths, overlapped)
        text = IncrementalText(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
        pieces, begin = text.push(token_ids[:1]), 1  # the prefill chose it
        for num_accepted, gain in zip(accepted_lengths, gains, strict=True):
            pieces += text.push(token_ids[begin : begin + gain], num_accepted=num_accepted)
            begin += gain
        by_origin = groupby([*pieces, *text.flush()], key=lambda piece: piece.accepted)
        spans = [
            records.Span(text="".join(piece.text for piece in group), drafted=drafted) for drafted, group in by_origin
        ]
        found.append(records.Excerpt(index=line.index, sample=line.sample, mode=line.mode, prompt=prompt, spans=spans))
    return found


def pass_gate(session: Session) -> None:
    """Raise FailedEvaluation on every rank if the run has a gate and its evaluation failed.

    The ranks wait here until rank 0 has written its records: an error that another rank raised earlier would cut that
    off.
    """
    if not session.has_gate:
        return
    found = session.evaluation
    failure = session.world.comm.broadcast_text(found.sentence if found and not found.passed else "")
    if failure:
        raise FailedEvaluation(failure)
