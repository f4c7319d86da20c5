"""A decoder of each kind of round and draft over one target, for promises that all of them keep."""

from collections.abc import Callable

import pytest
import torch

from llama_ssp.speculate.engine.loop import Decoder
from tests.helpers.decoders import make_decoder
from tests.helpers.extensions import need
from tests.helpers.lanes import first
from tests.helpers.overlapped import overlapped_decoder
from tests.helpers.prefix_runner import PrefixRunner

Make = Callable[..., Decoder]
"""Makes a decoder of K = 4, from the sharpness of its models and the options of `make_decoder`."""


def near_pair(sharpness: float = 3.0) -> tuple[PrefixRunner, PrefixRunner]:
    """A draft that agrees with its target most of the time."""
    target, draft = PrefixRunner(sharpness=sharpness), PrefixRunner(sharpness=sharpness)
    draft.head += 0.6 * torch.randn(draft.head.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return target, draft


def _other_tokenizer(sharpness: float, **options: object) -> Decoder:
    need("tokenizers")
    from tests.extensions.tokenizers.own_vocabulary import NUM_OWN_IDS, intersection_drafter

    draft = PrefixRunner(NUM_OWN_IDS, seed=1, sharpness=sharpness)
    return make_decoder(
        PrefixRunner(sharpness=sharpness),
        None,
        make_drafter=lambda rule: intersection_drafter(draft, rule, num_draft_tokens=4),
        **options,  # type: ignore[arg-type]
    )


KINDS: dict[str, Make] = {
    "none": lambda sharpness, **options: make_decoder(near_pair(sharpness)[0], None, **options),
    "model": lambda sharpness, **options: make_decoder(*near_pair(sharpness), num_draft_tokens=4, **options),
    "ngram": lambda sharpness, **options: make_decoder(
        near_pair(sharpness)[0], None, ngram=True, num_draft_tokens=4, **options
    ),
    "other tokenizer": _other_tokenizer,
    "overlapped": lambda sharpness, **options: overlapped_decoder(*near_pair(sharpness), num_draft_tokens=4, **options),
}
kinds = pytest.mark.parametrize("make", first(KINDS.values(), num=2), ids=KINDS)
