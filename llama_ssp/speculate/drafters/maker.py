"""Makes the drafters of a rank from the run's settings and placement."""

from collections.abc import Callable
from dataclasses import replace

import torch

from llama_ssp.models.cache import Taps
from llama_ssp.models.runner import Cached, Runner
from llama_ssp.ranks.comms import Mesh
from llama_ssp.registry import imported
from llama_ssp.settings.drafters import SAME, drafter_of, drafts_greedily, is_certain, of_kind, vocabulary_of
from llama_ssp.settings.rules import rule_of
from llama_ssp.settings.schema import RunConfig
from llama_ssp.speculate.drafters.drafter import Drafter, DrafterParts
from llama_ssp.speculate.drafters.shared import (
    AheadDrafter,
    BatchSplit,
    BatchSplitDrafter,
    BroadcastDrafter,
    ProbsReceiver,
    TapsSender,
)
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.speculate.sampling.trees import Tree


def make_drafters(
    config: RunConfig,
    *,
    mesh: Mesh,
    target: Runner,
    runner: Cached | None,
    split: BatchSplit | None = None,
    taps: Taps | None = None,
    shard: Shard = WHOLE,
    prepared: object = None,
    drawing: Callable[[Rule], Rule] = lambda rule: rule,
) -> list[Drafter]:
    """Make the drafters of a rank, in a run with a draft: the draft's, then the fallback's if rounds choose.

    Args:
        config: the config of the run.
        mesh: the ranks of target and draft.
        target: this rank's part of the target.
        runner: the draft model or this rank's slice of it; None on ranks without one.
        split: divides the rows among ranks that each hold the whole draft model.
        taps: the target's taps, if the draft is a head.
        shard: the shard of the draft's logits.
        prepared: see `DrafterParts`.
        drawing: turns the drafters' rule into the one that they draw by.

    Raises:
        ConfigError: the code of a kind of draft cannot be imported.
    """
    layout, num_draft_tokens = mesh.layout, config.most_draft_tokens
    vocab_size, device = target.vocab_size, target.device
    has_model = drafter_of(config.draft).has_model
    tree = tree_of(config, device)
    receiver = _receiver(config, mesh, vocab_size=vocab_size, device=device) if has_model else None
    sampling = replace(config.sampling, temperature=0.0) if drafts_greedily(config.draft) else config.sampling
    # A tree takes more than the best token; another vocabulary is mapped or cut to the target's before one is taken.
    is_mapped = vocabulary_of(config.draft) is not SAME
    takes_all = not mesh.draft or not runner or tree or is_mapped or runner.vocab_size > vocab_size
    rule = drawing(
        make_rule(
            sampling,
            config.verification,
            breaks_ties=bool(receiver and receiver.num_left),
            is_cut=not takes_all and mesh.draft is not None and mesh.draft.size > 1,
            shard=shard,
        )
    )

    parts = DrafterParts(
        config=config.draft,
        rule=rule,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        device=device,
        runner=runner,
        target=target,
        comm=mesh.draft,
        taps=taps,
        tree=tree,
        prepared=prepared,
        num_ahead=(num_draft_tokens - 1) * config.speculation.overlap,
        first_row=(lambda num_rows: split.own_rows(num_rows).start) if split else (lambda _num_rows: 0),
    )
    sender = None
    if taps and layout.is_apart:
        most_accepted = tree.depth if tree else num_draft_tokens
        sender = TapsSender(taps, layout.verify_rank, most_accepted=most_accepted)
    own = _made(parts) if runner or not has_model else None
    if has_model and (own is None or mesh.replica.size > 1):
        if split:
            own = BatchSplitDrafter(own, parts, split=split)
        else:
            own = (AheadDrafter if config.speculation.overlap else BroadcastDrafter)(
                own, parts, comm=mesh.replica, src=layout.draft_source_rank, receiver=receiver, taps=sender
            )
    assert own
    if not (fallback := config.speculation.chooser and config.draft.fallback):
        return [own]
    rule = drawing(make_rule(config.sampling, config.verification))  # the model's may be greedy, or cut
    return [own, _made(replace(parts, config=of_kind(fallback), rule=rule, runner=None, prepared=None))]


def _made(parts: DrafterParts) -> Drafter:
    """The drafter of this rank alone."""
    record = drafter_of(parts.config)
    assert record.make, "a run without a draft needs no drafter"
    drafter: Drafter = imported(record.make, setting=f"draft.kind={record.name}")(parts)
    return drafter


def tree_of(config: RunConfig, device: torch.device) -> Tree | None:
    """The tree that a round drafts; None for chains."""
    shape = config.speculation.tree_shape
    return Tree(shape, device) if shape else None


def _receiver(config: RunConfig, mesh: Mesh, *, vocab_size: int, device: torch.device) -> ProbsReceiver | None:
    """Probabilities are sent only if no rank holds both models and the rule reads them."""
    layout, sampling, shape = mesh.layout, config.sampling, config.speculation.tree_shape
    needs_probs = sampling.temperature > 0 and rule_of(config.verification.rule).needs_probs
    if not needs_probs or is_certain(config.draft, shape) or layout.draft_source_rank == layout.verify_rank:
        return None
    # A GPU's messages have one size; on CPUs the draft counts what is left.
    num_left = sampling.top_k or 0 if device.type == "cuda" and config.speculation.overlap else 0
    if 2 * num_left >= vocab_size:
        num_left = 0
    return ProbsReceiver(layout.verify_rank, vocab_size, truncates=sampling.truncates, num_left=num_left)
