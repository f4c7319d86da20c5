"""Keeps the decoders of a pair, so that later calls replay what earlier ones traced or captured.

All share the models' caches, which have room for one number of rows. A call with another number allocates them, and
then every decoder captures its graphs again.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

import torch

from llama_ssp.config.schema import RunConfig
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.engine.stops import StopStrings
from llama_ssp.session.draft_length import settle_length
from llama_ssp.session.loading import Models, build_decoder

_MOST_KEPT = 4
"""Each decoder holds CUDA graphs or traces of its own."""
_ROOM_STEP, _NEW_STEP = 256, 64
"""Rows have room for a multiple of so many tokens and new tokens: larger caches would drop all graphs."""


class Decoders:
    """The decoders that were used last, by all settings that decide which operators a round runs."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Decoder] = OrderedDict()

    @contextmanager
    def ready(
        self, models: Models, config: RunConfig, requests: Sequence[Request], *, speculative: bool
    ) -> Iterator[Decoder]:
        """Yield the decoder of a config, with room for the requests; forget it if the block fails.

        An interruption may leave a decoder in the middle of a capture.
        """
        key = (
            speculative, config.batch_size, config.speculation.num_draft_tokens, config.verification.rule,
            torch.get_num_threads(), astuple(config.sampling),
        )  # fmt: skip
        decoder = self._kept.get(key) or build_decoder(models, config, speculative=speculative, serves_many=True)
        self._kept[key] = decoder
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        decoder.seed = config.seed
        decoder.stops = StopStrings(models.tokenizer, config.stop_strings) if config.stop_strings else None
        try:
            decoder.make_room([_room(requests, context=models.context)])
            if speculative:
                longest = max(len(request.prompt_ids) + request.max_new_tokens // 2 for request in requests)
                settle_length(decoder, config, comm=models.mesh.world, num_slots=longest)
            yield decoder
        except BaseException:
            self._kept.pop(key, None)
            raise


def _room(requests: Sequence[Request], *, context: int) -> Request:
    """A request with room for all of these, and for slightly longer ones in later calls."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    num_new = max(request.max_new_tokens for request in requests)
    longest = min(-(-longest // _ROOM_STEP) * _ROOM_STEP, context)
    num_new = min(-(-num_new // _NEW_STEP) * _NEW_STEP, longest - 1)
    return Request(index=0, prompt_ids=(0,) * (longest - num_new), max_new_tokens=num_new)
