"""Makes the drafter of a rank from the run's settings and placement."""

import torch

from llama_ssp.config.drafts.drafter import drafter_of
from llama_ssp.config.drafts.model import Matching, matching_of
from llama_ssp.config.registry import imported
from llama_ssp.config.rules.rule import rule_of
from llama_ssp.config.schema import RunConfig
from llama_ssp.distributed.mesh import Mesh
from llama_ssp.drafting.batch_split import BatchSplit, BatchSplitDrafter
from llama_ssp.drafting.broadcast import BroadcastDrafter, ProbsReceiver
from llama_ssp.drafting.protocol import Drafter, DrafterParts
from llama_ssp.drafting.translation import TokenizerPair
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.rules import Rule


def make_drafter(
    config: RunConfig,
    *,
    rule: Rule,
    mesh: Mesh,
    runner: Runner | None,
    vocab_size: int,
    device: torch.device,
    split: BatchSplit | None = None,
    tokenizers: TokenizerPair | None = None,
) -> Drafter:
    """Make the drafter of a rank, in a run with a draft.

    `runner` is the draft model or this rank's slice of it, None on ranks without one. `split` divides the rows among
    ranks that each hold the whole draft model. `tokenizers` are those of both models, if the draft has its own. Raises
    ConfigError if the code of this kind of draft cannot be imported.
    """
    record, layout, num_draft_tokens = drafter_of(config.draft), mesh.layout, config.speculation.num_draft_tokens
    assert record.make, "a run without a draft needs no drafter"
    make = imported(record.make, setting=f"draft.kind={record.name}")
    parts = DrafterParts(
        config=config.draft,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        device=device,
        runner=runner,
        comm=mesh.draft,
        src=layout.draft_ranks.index(layout.draft_source_rank) if record.has_model and not split else 0,
        tokenizers=tokenizers,
    )
    if not record.has_model:
        drafter: Drafter = make(parts)
        return drafter
    inner: Drafter | None = make(parts) if runner else None
    if inner and mesh.replica.size == 1:
        return inner
    if split:
        return BatchSplitDrafter(inner, split=split, num_draft_tokens=num_draft_tokens, device=device)
    # Probabilities are sent only if no rank holds both models and the rule reads them.
    needs_probs = config.sampling.temperature > 0 and rule_of(config.verification.rule).needs_probs
    has_probs = needs_probs and matching_of(config.draft) is not Matching.text
    is_apart = has_probs and layout.draft_source_rank != layout.verify_rank
    return BroadcastDrafter(
        inner,
        comm=mesh.replica,
        src=layout.draft_source_rank,
        num_draft_tokens=num_draft_tokens,
        device=device,
        all_draft=layout.draft_ranks == layout.ranks,
        receiver=ProbsReceiver(layout.verify_rank, vocab_size) if is_apart else None,
    )
