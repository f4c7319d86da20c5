"""Losses and scores of the pair, each with the gradient it needs and no more.

What it does: the weighted next-token loss, the distillation gradient that aims at acceptance,
the expected acceptance of a draft, and teacher-forced greedy scores on multiplications.
What it does not do: know about optimisers, files or schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from training import corpus
from training.batches import Batch
from training.model import Scorer
from training.tokenizer import PAD_ID

TEMPERATURE = 0.8
# Positions at a time: small enough for the caches of a core.
CHUNK = 128


def next_token_loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    """Returns the weighted mean cross entropy of a batch."""
    losses_N = functional.cross_entropy(logits_BTV.float().flatten(0, 1), batch.next_BT.flatten(), reduction="none")
    weights_N = batch.weights_BT.flatten()
    return (losses_N * weights_N).sum() / weights_N.sum()


@dataclass(frozen=True)
class Agreement:
    """Gradients that make two models agree, and how far they do: see `agreement_gradients`."""

    target_NV: Tensor
    draft_NV: Tensor
    acceptance: float


@torch.no_grad()
def agreement_gradients(target_NV: Tensor, draft_NV: Tensor, variation: float) -> Agreement:
    """Differentiates what keeps a drafted token from being accepted at the drafting temperature.

    With p and q the softmax of the target's and of the draft's logits divided by `TEMPERATURE`,
    a drafted token is accepted with the chance sum(min(p, q)), one minus the total variation.

    Args:
        target_NV: Logits of the target, one row per position.
        draft_NV: Logits of the draft.
        variation: Share of the total variation in the draft's loss, the rest being KL(p, q).

    Returns:
        The gradient of the mean total variation with respect to `target_NV`, the gradient of the
        draft's mean loss with respect to `draft_NV`, and the mean acceptance.
    """
    from_target_NV, from_draft_NV = torch.empty_like(target_NV), torch.empty_like(draft_NV)
    scale, accepted = 1.0 / (TEMPERATURE * len(target_NV)), 0.0
    for start in range(0, len(target_NV), CHUNK):
        part = slice(start, start + CHUNK)
        p_NV = (target_NV[part].float() / TEMPERATURE).softmax(-1)
        q_NV = (draft_NV[part].float() / TEMPERATURE).softmax(-1)
        q_is_lower_NV = (q_NV < p_NV).float()
        p_is_lower_NV = 1.0 - q_is_lower_NV
        q_low_N1 = (q_NV * q_is_lower_NV).sum(-1, keepdim=True)
        p_low_N1 = (p_NV * p_is_lower_NV).sum(-1, keepdim=True)
        accepted += float(q_low_N1.sum() + p_low_N1.sum())
        from_target_NV[part] = p_NV * (p_low_N1 - p_is_lower_NV) * scale
        divergence_NV = (q_NV - p_NV).mul_(1.0 - variation)
        q_NV *= (q_low_N1 - q_is_lower_NV).mul_(variation)
        from_draft_NV[part] = q_NV.add_(divergence_NV).mul_(scale)
    return Agreement(from_target_NV, from_draft_NV, accepted / len(target_NV))


@torch.no_grad()
def heldout_scores(target: Scorer, draft: Scorer, rows_BT: Tensor) -> dict[str, float]:
    """Scores both models on held-out rows: losses in nats per token, and the mean chance that a draft is accepted."""
    ids_BT, next_N = rows_BT[:, :-1], rows_BT[:, 1:].flatten()
    with torch.autocast("cpu", torch.bfloat16):
        target_NV = target(ids_BT).flatten(0, 1)
        draft_NV = draft(ids_BT).flatten(0, 1)
    p_NV, q_NV = ((logits_NV.float() / TEMPERATURE).softmax(-1) for logits_NV in (target_NV, draft_NV))
    return {
        "heldout_target": functional.cross_entropy(target_NV.float(), next_N).item(),
        "heldout_draft": functional.cross_entropy(draft_NV.float(), next_N).item(),
        "heldout_acceptance": torch.minimum(p_NV, q_NV).sum(-1).mean().item(),
    }


@torch.no_grad()
def product_rate(
    model: Scorer,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[tuple[int, int]],
    rows: int = 64,
    precision: torch.dtype = torch.float32,
) -> float:
    """Returns the share of products whose whole answer the model would write greedily.

    Greedy generation gives an answer exactly when each of its tokens, the newline included, is
    the most likely one after the true tokens before it; so one forward pass scores it, of so many rows at a time.
    `precision` is that of the matrix products.
    """
    right = 0
    for start in range(0, len(pairs), rows):
        texts = []
        for first, second in pairs[start : start + rows]:
            prompt = corpus.worked_prompt(first, second)
            texts.append((prompt, prompt + f" {first * second}\n"))
        full = [tokenizer.encode(text) for _, text in texts]
        width = max(len(ids) for ids in full)
        ids_BT = torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids in full])
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            best_BT = model(ids_BT[:, :-1]).argmax(-1)
        for row, (prompt, _) in enumerate(texts):
            begin, end = len(tokenizer.encode(prompt)), len(full[row])
            right += bool((best_BT[row, begin - 1 : end - 1] == ids_BT[row, begin:end]).all())
    return right / len(pairs)
