"""Decoders of ranks that are threads, over the parts of two models that a layout gives them."""

from collections.abc import Sequence
from typing import Any

from llama_ssp.models.runner import NullRunner
from llama_ssp.ranks.comms import Comm, Mesh
from llama_ssp.run.decoders import Models, build_decoder
from llama_ssp.settings.drafters import vocabulary_of
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout, RunConfig
from llama_ssp.speculate.engine.held import Reuse
from llama_ssp.speculate.engine.state import Request
from tests.helpers.decoders import complete
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.prefix_runner import PrefixRunner

ALONE = Layout(target_ranks=(0,), draft_ranks=(0,), draft_kind=DraftLayout.one_rank)
ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout
LAYOUTS = [
    Layout(target_ranks=target, draft_ranks=draft, draft_kind=kind)
    for target, draft, kind in [
        ((0, 1), (1,), ONE_RANK),
        ((0, 1), (2,), ONE_RANK),
        ((0, 1), (0, 1), SHARDED),
        ((1, 2), (0, 1), SHARDED),
        ((0,), (1, 2), OWN_GPU),
        ((1,), (0,), OWN_GPU),
        ((0, 1), (0, 1), REPLICATED),
        ((0, 1, 2), (0, 2), REPLICATED),
    ]
]


def texts_of_ranks(
    layout: Layout,
    config: RunConfig,
    requests: Sequence[Request],
    *,
    sizes: tuple[int, int] = (11, 11),
    sharpness: float = 1.0,
    prepared: object = None,
    speculative: bool = True,
) -> list[list[list[int]]]:
    """What each rank writes; drafts of ranks whose word does not count are other models.

    `sizes` are those of the vocabularies of target and draft.
    """
    drafting = thread_comms(len(layout.draft_ranks))
    is_replicated = layout.draft_kind is DraftLayout.replicated

    def one_rank(comm: ThreadComm) -> list[list[int]]:
        draft_comm, draft, rank = None, None, comm.rank
        if rank in layout.draft_ranks:
            draft_comm = Comm.single() if is_replicated else drafting[layout.draft_ranks.index(rank)]
            seed = 1 if is_replicated or rank == layout.draft_source_rank else 2
            draft = PrefixRunner(sizes[1], seed=seed, sharpness=sharpness)
        target = PrefixRunner(sizes[0], sharpness=sharpness)
        nowhere = NullRunner(device=target.device, vocab_size=target.vocab_size, max_position_embeddings=512)
        tokenizer: Any = None
        models = Models(
            target=target if rank in layout.target_ranks else nowhere,
            draft=draft,
            drafts=True,
            mesh=Mesh(world=comm, replica=comm, number=0, layout=layout, target=Comm.single(), draft=draft_comm),
            tokenizer=tokenizer,
            eos_ids=(3,),
            context=512,
            prepared=prepared,
            vocabulary=vocabulary_of(config.draft),
            reuse=Reuse.of([target, draft], comm),
        )
        return [done.token_ids for done in complete(build_decoder(models, config, speculative=speculative), requests)]

    return on_ranks(thread_comms(len(layout.ranks)), one_rank)
