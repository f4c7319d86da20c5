"""The parts of a vocabulary that ranks have: of embeddings, and of logits.

Shapes: V vocabulary, E embedding width.
"""

from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.matrices import vocabulary_parts
from llama_ssp.ranks.comms import Comm


def embed(ids: Tensor, weight_VE: Tensor, part: range, comm: Comm) -> Tensor:
    """Look token ids (...) up in the parts of an embedding that ranks have; the result is (..., E)."""
    rows = ids - part.start
    elsewhere = (rows < 0) | (rows >= len(part))
    embedded = functional.embedding(rows.masked_fill_(elsewhere, 0), weight_VE)
    return comm.all_reduce(embedded.masked_fill_(elsewhere[..., None], 0))


def own_part(logits: Tensor, vocab_size: int, comm: Comm) -> Tensor:
    """Return the logits of this rank's part of the vocabulary, given these logits alone or those of all tokens."""
    own = vocabulary_parts(vocab_size, comm.size)[comm.rank]
    return logits[..., own.start : own.stop] if logits.shape[-1] == vocab_size else logits
