"""A batch on the device: token ids, lengths and limits in fixed shapes, and how a verdict moves them on.

Nothing here reads a value back to the host. Rows advance by different lengths because only `lengths_B` decides what of
the token buffer is text; what lies beyond is free space that the next round overwrites.

    tokens row | prompt ....... | generated ..... | drafted, undecided | free ....... |
    position   0                P                 length               length + K     num_slots

Shapes: B sequences, S slots, K drafted tokens, E end-of-sequence ids, W = K + 1 tokens that a round can add.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.drafting.placement import Decision
from llama_ssp.sampling.random import row_keys


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion that is wanted.

    Attributes:
        index: the prompt's index in its file; with `sample` it keys the random numbers.
        sample: which of several samples of this prompt.
        prompt_ids: token ids, at least one.
        max_new_tokens: at most so many are generated.
    """

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sample: int = 0


@dataclass(kw_only=True)
class BatchState:
    """All that a batch is, as tensors on one device.

    Attributes:
        tokens_BS: token ids (B, S), int64.
        lengths_B: how many of them are text.
        limits_B: length at which a row ends; a row that has ended has its own length as its limit.
        keys_B: key of each row's random numbers.
        eos_E: ids that end a row.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    limits_B: Tensor
    keys_B: Tensor
    eos_E: Tensor

    @classmethod
    def empty(cls, *, batch_size: int, num_slots: int, eos_ids: Sequence[int], device: torch.device) -> "BatchState":
        """A batch of rows that have all ended, with two tokens each: what a round reads even of frozen rows."""
        twos_B = torch.full((batch_size,), 2, dtype=torch.int64, device=device)
        return cls(
            tokens_BS=torch.zeros(batch_size, num_slots, dtype=torch.int64, device=device),
            lengths_B=twos_B,
            limits_B=twos_B.clone(),
            keys_B=torch.zeros_like(twos_B),
            eos_E=torch.tensor(list(eos_ids), dtype=torch.int64, device=device),
        )

    def rows_of(self, requests: Sequence[Request], *, seed: int) -> "BatchState":
        """A small batch that holds these requests' prompts, one row each, with as many slots as this one."""
        device, num_slots = self.tokens_BS.device, self.tokens_BS.shape[1]
        tokens_BS = torch.zeros(len(requests), num_slots, dtype=torch.int64)
        for row, request in enumerate(requests):
            tokens_BS[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [length + request.max_new_tokens for length, request in zip(lengths, requests, strict=True)]
        return BatchState(
            tokens_BS=tokens_BS.to(device),
            lengths_B=torch.tensor(lengths, device=device),
            limits_B=torch.tensor(limits, device=device),
            keys_B=row_keys(
                seed=seed,
                prompt_index_B=torch.tensor([request.index for request in requests], device=device),
                sample_index_B=torch.tensor([request.sample for request in requests], device=device),
            ),
            eos_E=self.eos_E,
        )

    def put(self, rows_R: Tensor, other: "BatchState") -> None:
        """Overwrite rows `rows_R` of this batch with all rows of `other`."""
        self.tokens_BS.index_copy_(0, rows_R, other.tokens_BS)
        self.lengths_B.index_copy_(0, rows_R, other.lengths_B)
        self.limits_B.index_copy_(0, rows_R, other.limits_B)
        self.keys_B.index_copy_(0, rows_R, other.keys_B)

    def commit(self, decision: Decision, offsets_W: Tensor) -> Tensor:
        """Take decided tokens as text, and end rows that met an end-of-sequence token or their limit.

        Args:
            decision: num_accepted_B of the drafted tokens, which stand in `tokens_BS` already; next_ids_B come after.
            offsets_W: 0 .. W - 1, where W - 1 is the number of drafted tokens.

        Returns:
            The round's result (B, 4 + W), int64, as `RowResult` unpacks it on the host.
        """
        num_candidates_B = decision.num_accepted_B + 1
        lengths_B1 = self.lengths_B[:, None]
        self.tokens_BS.scatter_(1, lengths_B1 + decision.num_accepted_B[:, None], decision.next_ids_B[:, None])
        candidates_BW = self.tokens_BS.gather(1, lengths_B1 + offsets_W)
        num_new_B = torch.minimum(num_candidates_B, self.limits_B - self.lengths_B)
        if self.eos_E.shape[0]:
            is_end_BW = torch.isin(candidates_BW, self.eos_E)
            first_end_B = torch.where(is_end_BW, offsets_W, offsets_W.shape[0]).amin(-1)
            num_new_B = torch.minimum(num_new_B, first_end_B + 1)
            self.lengths_B += num_new_B
            self.limits_B.copy_(torch.where(first_end_B < num_new_B, self.lengths_B, self.limits_B))
        else:
            self.lengths_B += num_new_B
        ended_B = self.lengths_B >= self.limits_B
        facts_4B = torch.stack([num_new_B, decision.num_accepted_B, ended_B, decision.stop_1.expand_as(num_new_B)])
        return torch.cat([facts_4B.t(), candidates_BW], dim=1)


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What one round did to one row, on the host.

    Attributes:
        new_ids: tokens that became text; none for a row that had ended before.
        num_accepted: drafted tokens that the rule accepted, also when the row ended before the last of them.
        ended: whether the row has ended.
        stop: whether the deciding rank wishes to stop.
    """

    new_ids: list[int]
    num_accepted: int
    ended: bool
    stop: bool

    @classmethod
    def unpack(cls, result_BX: Tensor) -> "list[RowResult]":
        """Read a result of `BatchState.commit`; on a GPU it has been copied to the host before."""
        return [
            cls(new_ids=row[4 : 4 + row[0]], num_accepted=row[1], ended=bool(row[2]), stop=bool(row[3]))
            for row in result_BX.tolist()
        ]
