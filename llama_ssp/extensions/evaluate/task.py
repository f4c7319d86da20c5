"""`task=evaluate`: completes all prompts in both modes, and lets a suite judge the completions."""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.evaluate.martingales import ANY_ROUNDS, BLOCK, CERTAIN, Role, Rounds, roles_of
from llama_ssp.extensions.evaluate.probabilities import SampledText, score
from llama_ssp.extensions.evaluate.records import Evidence, task_and_suite
from llama_ssp.extensions.evaluate.warpers import variation_from_warpers
from llama_ssp.ranks.failures import from_rank_0
from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.summary import pairs_of
from llama_ssp.run.decoders import cuts_of
from llama_ssp.run.requests import PromptRequest
from llama_ssp.run.session import Session, Viewer
from llama_ssp.settings.drafters import SAME, drafter_of, is_certain, of_kind, vocabulary_of
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import RunConfig
from llama_ssp.storage.formats import NO_QUANTIZATION, OWN_DTYPE


def evaluate(session: Session, requests: list[PromptRequest]) -> None:
    """Complete all requests in both modes and judge them; the verdict, `session.evaluation`, exists on rank 0."""
    (task, suite), config, comm = task_and_suite(session.config), session.config, session.world.comm
    modes = (PLAIN, SPECULATIVE)
    # Plain decoding uses the run's own seed, and samples must not share their draws.
    settings = session.decoder(SPECULATIVE).settings
    of_mode = {SPECULATIVE: replace(settings, seed=(config.seed + (1 << 62)) % (1 << 63))}
    session.warm_up(requests, modes, num_requests=1)
    with session.showing_progress(requests, modes, shows_texts=False):
        for mode in modes:
            session.complete(requests, mode, Viewer(), of_mode.get(mode))
    pairs = pairs_of(session.folder.lines) if session.folder else []

    def roles(line: CompletionLine) -> list[Role]:
        if not suite.needs_sums or line.mode != SPECULATIVE:
            return []
        lengths = line.accepted_lengths, line.examined_lengths
        return roles_of(*lengths, num_tokens=line.num_new_tokens, overlaps=config.speculation.overlap)

    # Rank 0 knows the completions that the suite wants scored.
    lines = from_rank_0(comm, lambda: [(line.key, line.token_ids, roles(line)) for line in suite.scored(pairs)])
    prompts = {(request.index, request.sample): request.prompt_ids for request in requests}
    texts = [
        SampledText(prompt_ids=prompts[index, sample], token_ids=tuple(ids), roles=tuple(roles))
        for (index, _, sample), ids, roles in lines
    ]
    has_head = any(source.origin.shape.is_head for source in session.models.sources)
    scores = score(session, texts, rounds=rounds_of(config, has_head=has_head))
    evaluation = None
    if session.folder:
        log_probs = {tuple(key): found.log_probs for (key, *_), found in zip(lines, scores, strict=True)}
        sums = [found.sums for found in scores if found.sums]
        apart = variation_from_warpers(config.sampling, session.world.device) if suite.needs_sums else 0.0
        evaluation = suite.judge(
            Evidence(
                config=config,
                pairs=pairs,
                log_probs=log_probs,
                sums=sums,
                apart=apart,
                out_of_reach=[*_hidden(session)],
                is_reproducible=session.is_reproducible,
            )
        )
    session.judge(evaluation, has_gate=task.gate)


def _hidden(session: Session) -> Iterator[str]:
    """Yield the faults that samples of this run cannot show."""
    config, layout = session.config, session.models.mesh.layout
    if config.sampling.penalizes:
        yield "wrong penalties, biases and bans, which scoring applies too"
    if len(layout.scoring_ranks) > 1 and not any(cuts_of(session.models, config)):
        yield "wrong draws over shards of the vocabulary, which this run has none of"


def rounds_of(config: RunConfig, *, has_head: bool) -> Rounds:
    """Describe how the speculative rounds of a run, perhaps with a draft head or an MTP layer, draft and verify."""
    draft, rule, tree = config.draft, config.verification.rule, config.speculation.tree_shape
    fallback = [of_kind(draft.fallback)] if draft.fallback else []
    if all(is_certain(one, tree) for one in (draft, *fallback)) and rule in {DEFAULT, BLOCK}:
        rule = CERTAIN
    record = drafter_of(draft)  # a plugin's law may depend on where a round began, as a head's
    num_known = 1 if has_head or (record.draws and not record.reads_target) else ANY_ROUNDS.num_known
    if draft.fallback or vocabulary_of(draft) is not SAME or config.speculation.overlap:
        num_known = 0
    exact, models = (Dtype.fp32, NO_QUANTIZATION, OWN_DTYPE), filter(None, (config.model, draft.model))
    is_exact = all((model.dtype, model.quantization, model.cache_dtype) == exact for model in models)
    return Rounds(
        rule=rule,
        widths=tree.widths if tree else (),
        penalizes=config.sampling.penalizes,
        num_known=num_known,
        sees_rejections=rule in {DEFAULT, BLOCK} and not tree and num_known > 1 and is_exact,
    )
