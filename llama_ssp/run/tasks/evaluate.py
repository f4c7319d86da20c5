"""`task=evaluate`: completes all prompts in both modes, and lets a suite judge the completions."""

import json
from collections.abc import Sequence

from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine, Evaluation, LineKey
from llama_ssp.run.evaluation.evidence import CompletionPair, Evidence, pairs_of
from llama_ssp.run.evaluation.martingales import Role, roles_of
from llama_ssp.run.jobs import PromptTask
from llama_ssp.run.session import Session, Viewer
from llama_ssp.run.tasks.probabilities import SampledText, TextScore, score
from llama_ssp.settings.tasks import task_and_suite

_SEED_STEP = 1 << 62


def speculative_seed(seed: int) -> int:
    """The seed of speculative decoding: plain decoding uses the run's, and samples must not share their draws."""
    return (seed + _SEED_STEP) % (2 * _SEED_STEP)


def evaluate(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs in both modes and judge them; the verdict, `session.evaluation`, exists on rank 0."""
    task, suite = task_and_suite(session.config)
    session.has_gate = task.gate
    modes = (PLAIN, SPECULATIVE)
    session.decoder(SPECULATIVE).seed = speculative_seed(session.config.seed)
    session.warm_up(jobs, modes, num_jobs=1)
    with session.showing_progress(jobs, modes, shows_texts=False):
        for mode in modes:
            session.complete(jobs, mode, Viewer())
    pairs = pairs_of(session.folder.lines) if session.folder else []
    scores = _score(session, jobs, pairs)
    if session.folder:
        evidence = Evidence(
            config=session.config,
            pairs=pairs,
            log_probs={key: found.log_probs for key, found in scores.items()},
            sums=[found.sums for found in scores.values() if found.sums],
        )
        evaluation = suite.judge(evidence)
        assert isinstance(evaluation, Evaluation)
        session.evaluation = evaluation


def _score(session: Session, jobs: Sequence[PromptTask], pairs: Sequence[CompletionPair]) -> dict[LineKey, TextScore]:
    """Score the completions that the suite names; rank 0 knows them."""
    _, suite = task_and_suite(session.config)
    named = [
        (line.key, line.token_ids, _roles(line, session) if suite.needs_sums and line.mode == SPECULATIVE else [])
        for line in suite.scored(pairs)
    ]
    lines = json.loads(session.world.comm.broadcast_text(json.dumps(named), src=0))
    prompts = {(job.request.index, job.request.sample): job.request.prompt_ids for job in jobs}
    texts = [
        SampledText(prompt_ids=prompts[index, sample], token_ids=tuple(ids), roles=tuple(roles))
        for (index, _, sample), ids, roles in lines
    ]
    scores = score(session, texts)
    return {(index, mode, sample): found for ((index, mode, sample), *_), found in zip(lines, scores, strict=True)}


def _roles(line: CompletionLine, session: Session) -> list[Role]:
    return roles_of(
        line.accepted_lengths, line.examined_lengths, num_tokens=line.num_new_tokens,
        overlaps=session.config.speculation.overlap,
    )  # fmt: skip
