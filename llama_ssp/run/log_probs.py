"""Scores the completions of a run with the target, after they are finished: `logprobs` and `prompt_logprobs`.

The target reads every text once more, whoever drafted it, and whatever rule and placement it was decoded with. So the
figures of a text do not depend on these, but for rounding.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice

from llama_ssp.errors import InterruptedRun
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.records import LineKey, LogProbLine
from llama_ssp.run.decoders import Models
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session
from llama_ssp.run.tasks.records import GenerateConfig, OutputFormat
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.engine.likelihoods import ScoredText, law_of, log_likelihoods
from llama_ssp.text.log_probs import CompletionLogProbs, part

_Ids = Sequence[int]


def score_completions(
    models: Models, config: RunConfig, texts: Sequence[tuple[_Ids, _Ids]]
) -> Iterator[tuple[int, CompletionLogProbs]]:
    """Yield the index of each text and the log-probabilities that the config asks for, on all ranks of a replica.

    Args:
        models: the models, of which the target scores the texts; this replaces its cache.
        config: the config of the draws; it sets how many texts are read together (`batch_size`).
        texts: the ids of prompt and completion of each text.
    """
    num_top, num_of_prompt = config.logprobs, config.prompt_logprobs
    scored = [
        ScoredText(ids=[*prompt, *new], num_given=len(prompt) if num_of_prompt is None else 1, num_prompt=len(prompt))
        for prompt, new in texts
    ]
    found = log_likelihoods(
        models.target,
        scored,
        batch_size=config.batch_size,
        comm=models.mesh.replica,
        src=models.mesh.layout.verify_rank,
        num_top=max(num_top or 0, num_of_prompt or 0),
        law=None if num_top is None else law_of(config.sampling),
    )
    for place, scores in found:
        num_new = len(texts[place][1])
        new, before = slice(-num_new, None), slice(0, -num_new)
        yield (
            place,
            CompletionLogProbs(
                logprobs=None if num_top is None else part(scores.model, new, num_top=num_top),
                drawn_logprobs=part(scores.drawn, new, num_top=num_top)
                if scores.drawn and num_top is not None
                else None,
                prompt_logprobs=None if num_of_prompt is None else part(scores.model, before, num_top=num_of_prompt),
            ),
        )


def record_log_probs(session: Session, requests: Sequence[PromptRequest]) -> None:
    """Score the recorded completions of these requests that have no figures yet, on all ranks, and record these.

    With `format=jsonl`, prints them in the order of the prompts. Raises InterruptedRun on every rank if stopped.
    """
    config, mesh, folder, comm = session.config, session.models.mesh, session.folder, session.world.comm
    texts = _texts(session, requests)
    share = texts[mesh.number :: config.placement.num_replicas]
    scores = score_completions(session.models, config, [text for _, text in share])
    found: list[LogProbLine] = []
    with ExitStack() as stack:
        stack.callback(_print, session, found)
        progress = stack.enter_context(session.terminal.measuring())
        while len(found) < len(texts):
            batch = [[share[place][0], asdict(log_probs)] for place, log_probs in islice(scores, config.batch_size)]
            stops = session.stop_request.requested
            gathered = comm.gather_text(json.dumps([stops, batch if mesh.replica.rank == 0 else []]))
            results = [json.loads(text) for text in gathered]
            lines = [LogProbLine.of(key, figures) for _, pairs in results for key, figures in pairs]
            if folder:
                folder.append_log_probs(lines)
            found += lines
            progress("log-probabilities", len(found), len(texts))
            if any(was_stopped for was_stopped, _ in results) and len(found) < len(texts):
                raise InterruptedRun.in_folder(config.run_dir)


def _texts(session: Session, requests: Sequence[PromptRequest]) -> list[tuple[LineKey, tuple[_Ids, _Ids]]]:
    """Prompt and new ids of the completions to score, the longest first, the same on every rank."""
    folder = session.folder

    def missing() -> list[list[object]]:
        return [[*line.key, line.token_ids] for line in folder.lines if line.key not in folder.scored] if folder else []

    new = {(index, mode, sample): ids for index, mode, sample, ids in from_rank_0(session.world.comm, missing)}
    texts = [
        (key, (request.prompt_ids, new[key]))
        for mode in sorted({mode for _, mode, _ in new})
        for request in session.with_answers(requests, mode)
        if (key := request.line_key(mode)) in new
    ]
    return sorted(texts, key=lambda text: -sum(map(len, text[1])))


def _print(session: Session, found: Sequence[LogProbLine]) -> None:
    """Print completions with their log-probabilities as JSON lines, if the task prints its completions so."""
    task, folder = session.config.task, session.folder
    if not (folder and isinstance(task, GenerateConfig) and task.format is OutputFormat.jsonl):
        return
    lines = {line.key: line for line in folder.lines}
    for figures in sorted(found, key=lambda line: line.key):
        line = lines[figures.key]
        session.terminal.line(json.dumps(line.fields | asdict(line) | asdict(figures)))
