"""Packed weights as rows of bytes, which are cut, joined, reordered and moved like the rows of any weight.

    row   | group | group | ...            uint8, a row per output
    group | its weights | its word, 4 bytes |

A word is the scale of the group in fp32; `int4_rows` puts more into it. The last dimension tells the size of a group.

Shapes: O outputs, G groups of inputs, B bytes of a group's weights, W = B + 4.
"""

import torch
from torch import Tensor

from llama_ssp.storage.formats import WORD_BYTES


def join(bytes_OGB: Tensor, words_OG: Tensor) -> Tensor:
    """Join the bytes of weights and their words, numbers of 32 bits, into rows (O, G, W)."""
    return torch.cat([bytes_OGB, words_OG.contiguous()[..., None].view(torch.uint8)], dim=2)


def split(rows_OGW: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into the bytes of weights (O, G B) and the words (O, G), both copied."""
    words = rows_OGW[..., -WORD_BYTES:].contiguous().view(torch.int32)
    return rows_OGW[..., :-WORD_BYTES].flatten(1).contiguous(), words.squeeze(2)
