"""Packed weights as rows of bytes, which are cut, joined, reordered and moved like the rows of any weight.

    row   | group | group | ...            uint8, a row per output
    group | its weights | its word, 4 bytes |

A word is the scale of the group in fp32; `int4_rows` puts more into it.

Shapes: O outputs, G groups of inputs, B bytes of a group's weights, W bytes of a row.
"""

import torch
from torch import Tensor

from llama_ssp.settings.formats import WORD_BYTES


def join(bytes_OGB: Tensor, words_OG: Tensor) -> Tensor:
    """Join the bytes of weights and their words, numbers of 32 bits, into rows (O, W)."""
    return torch.cat([bytes_OGB, words_OG.contiguous()[..., None].view(torch.uint8)], dim=2).flatten(1)


def split(rows_OW: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Split rows into the bytes of weights (O, G B), B of them in a group, and the words (O, G), both copied."""
    groups = rows_OW.unflatten(1, (-1, num_bytes + WORD_BYTES))
    words = groups[..., num_bytes:].contiguous().view(torch.int32)
    return groups[..., :num_bytes].flatten(1).contiguous(), words.squeeze(2)
