"""`task=evaluate`: completes all prompts in both modes, and lets a suite judge the completions."""

from llama_ssp.evaluation.evidence import Evidence
from llama_ssp.evaluation.martingales import Role, roles_of
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine, Evaluation
from llama_ssp.reports.summary import pairs_of
from llama_ssp.run.jobs import PromptTask
from llama_ssp.run.session import Session, Viewer
from llama_ssp.run.tasks.probabilities import SampledText, score
from llama_ssp.settings.tasks import task_and_suite


def evaluate(session: Session, jobs: list[PromptTask]) -> None:
    """Complete all jobs in both modes and judge them; the verdict, `session.evaluation`, exists on rank 0."""
    (task, suite), config = task_and_suite(session.config), session.config
    session.has_gate = task.gate
    modes = (PLAIN, SPECULATIVE)
    # Plain decoding uses the run's own seed, and samples must not share their draws.
    session.decoder(SPECULATIVE).seed = (config.seed + (1 << 62)) % (1 << 63)
    session.warm_up(jobs, modes, num_jobs=1)
    with session.showing_progress(jobs, modes, shows_texts=False):
        for mode in modes:
            session.complete(jobs, mode, Viewer())
    pairs = pairs_of(session.folder.lines) if session.folder else []

    def roles(line: CompletionLine) -> list[Role]:
        if not suite.needs_sums or line.mode != SPECULATIVE:
            return []
        lengths = line.accepted_lengths, line.examined_lengths
        return roles_of(*lengths, num_tokens=line.num_new_tokens, overlaps=config.speculation.overlap)

    # Rank 0 knows the completions that the suite wants scored.
    lines = from_rank_0(
        session.world.comm, lambda: [(line.key, line.token_ids, roles(line)) for line in suite.scored(pairs)]
    )
    prompts = {(job.request.index, job.request.sample): job.request.prompt_ids for job in jobs}
    texts = [
        SampledText(prompt_ids=prompts[index, sample], token_ids=tuple(ids), roles=tuple(roles))
        for (index, _, sample), ids, roles in lines
    ]
    scores = score(session, texts)
    if session.folder:
        evidence = Evidence(
            config=config,
            pairs=pairs,
            log_probs={tuple(key): found.log_probs for (key, *_), found in zip(lines, scores, strict=True)},
            sums=[found.sums for found in scores if found.sums],
        )
        evaluation = suite.judge(evidence)
        assert isinstance(evaluation, Evaluation)
        session.evaluation = evaluation
