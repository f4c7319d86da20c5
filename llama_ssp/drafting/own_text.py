"""A draft's own text on the device: the prompt in its own tokens, then the pieces that spell each new token.

    target's row   | prompt ....... | t5     | t6       | t7     |
    draft's row    | own prompt ......... | d5 | d6 d6 d6 | d7 d7 |     written anew before each draft
    positions      0                      own prompt's length    length

The text is a function of the target's row, so a round that runs twice writes it twice, and it is right however many
tokens have come since the last draft. It has at most `OWN_SLOTS_PER_SLOT` tokens per token of the target, so the host
knows how many slots a round reads: a longer prompt loses its beginning, a longer spelling its end.

Shapes: B sequences, R rows being prefilled, S slots of the target, X slots of the draft, M pieces of a token, V
vocabulary of the target.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.sizes import OWN_SLOTS_PER_SLOT
from llama_ssp.drafting.vocabularies import Alignment
from llama_ssp.models.cache import Workspace
from llama_ssp.sampling.context import Rows
from llama_ssp.shapes import static_shape


class VocabularyMap(NamedTuple):
    """An `Alignment` on the device.

    Attributes:
        shared_V: the draft's id of each token of the target; where there is none, one past the draft's last id.
        pieces_VM: the draft's ids that spell each token, padded.
        num_pieces_V: how many there are.
    """

    shared_V: Tensor
    pieces_VM: Tensor
    num_pieces_V: Tensor

    @classmethod
    def of(cls, alignment: Alignment, *, draft_size: int, device: torch.device) -> "VocabularyMap":
        """Put an alignment on a device; `draft_size` is the size of the draft's head."""
        shared = [draft_size if token is None else token for token in alignment.shared]
        width = max(map(len, alignment.pieces))
        pieces = [spelled + (0,) * (width - len(spelled)) for spelled in alignment.pieces]
        numbers = [len(spelled) for spelled in alignment.pieces]
        return cls(*(torch.tensor(table, device=device) for table in (shared, pieces, numbers)))

    def to_target(self, logits_BD: Tensor) -> Tensor:
        """Move the draft's logits to the target's ids (B, V): minus infinity for tokens that the draft lacks.

        Processors normalise what is left, so that the draft draws among the tokens of both vocabularies.

        Source: Timor et al. 2025, arXiv:2502.05202, Algorithm 4.
        """
        return pad(logits_BD, (0, 1), value=float("-inf")).index_select(1, self.shared_V)


class OwnText(Workspace):
    """The draft's text of every row.

    Args:
        num_slots: X.
        most_tokens: the length at which a text stops to grow.

    Attributes:
        tokens_BX: the draft's ids, and one slot for what is not kept.
    """

    def __init__(self, *, batch_size: int, num_slots: int, most_tokens: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.tokens_BX = torch.zeros(batch_size, num_slots + 1, dtype=torch.int64, device=device)
        self._prompt_lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._own_prompt_lengths_B = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._nowhere, self._most = torch.tensor([num_slots, most_tokens], device=device).unbind()

    def fits(self, *, batch_size: int, num_slots: int) -> bool:
        """Whether it has exactly these rows, and enough slots."""
        return self.tokens_BX.shape[0] == batch_size and self.num_slots >= num_slots

    def put(self, rows_R: Tensor, own_tokens_RX: Tensor, own_lengths_R: Tensor, *, lengths_R: Tensor) -> None:
        """Begin new rows with their own prompts; `lengths_R` are those of the target's."""
        self.tokens_BX[rows_R, : own_tokens_RX.shape[1]] = own_tokens_RX
        self._prompt_lengths_B.index_copy_(0, rows_R, lengths_R)
        self._own_prompt_lengths_B.index_copy_(0, rows_R, own_lengths_R)

    def write(self, rows: Rows, vocabularies: VocabularyMap) -> Tensor:
        """Write the pieces of all new tokens of the target; returns the lengths (B, 1), at least 1.

        A vacated row has two tokens, and then so short a text that it can be read in any bucket.
        """
        tokens_BS, lengths_B1 = rows.tokens_BS, rows.lengths_B[:, None]
        own_prompt_B1 = self._own_prompt_lengths_B[:, None]
        stops_BS = torch.ones_like(tokens_BS).cumsum(1)  # unlike a range, right for any number of slots in a trace
        is_new_BS = (stops_BS > self._prompt_lengths_B[:, None]) & (stops_BS <= lengths_B1)
        spelled_BS = own_prompt_B1 + (vocabularies.num_pieces_V[tokens_BS] * is_new_BS).cumsum(1)
        # What exceeds the limit of any earlier token is cut from all later ones.
        limits_BS = (stops_BS * OWN_SLOTS_PER_SLOT).minimum(self._most)
        excess_BS = ((limits_BS - spelled_BS) * is_new_BS).clamp_max(0)
        ends_BS = spelled_BS + excess_BS.cummin(1).values
        starts_BS = torch.cat([own_prompt_B1, ends_BS], dim=1)[:, :-1]
        pieces_BSM = vocabularies.pieces_VM[tokens_BS]
        offsets_M = torch.arange(static_shape(pieces_BSM)[-1], device=tokens_BS.device)
        places_BSM = starts_BS[..., None] + offsets_M
        places_BSM = torch.where(places_BSM < ends_BS[..., None], places_BSM, self._nowhere)
        self.tokens_BX.scatter_(1, places_BSM.flatten(1), pieces_BSM.flatten(1))
        return ends_BS[:, -1:].minimum(lengths_B1 * OWN_SLOTS_PER_SLOT).clamp_min(1)
