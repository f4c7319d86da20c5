"""Trees on models whose layers see only the latest positions write the plain text, also once it is longer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_ssp.models.cache import Taps
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.speculate.engine.loop import Decoder
from tests.helpers.decoders import complete, ids_of, make_decoder, parts_of, requests_of
from tests.helpers.draft_heads import SMALL_WIDTH, save_small_pair
from tests.helpers.extensions import of_heads
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import heavy, slow
from tests.helpers.models import build_checkpoint, load_ranks

CPU = torch.device("cpu")
WINDOWS = {"gpt_oss": 9, "cohere2": 8, "mistral": 24, "gemma3_text": 6, "gpt_neo": 2}
NUM_NEW = 44
PROMPTS = ((7, 8, 9, 7, 8), (5,), tuple(range(20, 50)))


def texts(decoder: Decoder) -> list[list[int]]:
    return ids_of(complete(decoder, requests_of(PROMPTS, NUM_NEW)))


@pytest.mark.seconds
@pytest.mark.parametrize("num_ranks", [slow(1), 2])
@pytest.mark.parametrize(
    "family", ["mistral", *map(heavy, ("gpt_oss", "gpt_neo")), *map(slow, ("cohere2", "gemma3_text"))]
)
def test_greedy_text_is_plain_text(family: str, num_ranks: int, tmp_path: Path) -> None:
    size: dict[str, Any] = {"window_size" if family == "gpt_neo" else "sliding_window": WINDOWS[family]}
    build_checkpoint(tmp_path, family, **size)
    comms = thread_comms(num_ranks)
    targets, drafts = (load_ranks(tmp_path, comms) for _ in range(2))

    def one_rank(comm: ThreadComm) -> list[list[list[int]]]:
        found = [texts(make_decoder(targets[comm.rank], None, batch_size=2, comm=comm))]
        for draft, shape in ((drafts[comm.rank], "2x2x1"), (drafts[comm.rank], "dynamic-9x4x3"), (None, "3x1x1")):
            how: Any = {"ngram": draft is None, "tree": shape, "batch_size": 2, "comm": comm}
            found.append(texts(make_decoder(targets[comm.rank], draft, **how)))
        return found

    for plain, *trees in on_ranks(comms, one_rank):
        assert len({*map(tuple, plain)}) > 1
        assert trees == [plain] * len(trees)


@pytest.mark.seconds
def test_greedy_text_with_a_heads_trees_is_plain_text(tmp_path: Path) -> None:
    """The target's layers have the window, and so has the head's own."""
    origins = save_small_pair(
        tmp_path, "mistral", {"sliding_window": 9}, of_head={"model_type": "mistral", "sliding_window": 5}
    )
    target, head = (load_model(Loading(each)) for each in origins)
    assert isinstance(head, of_heads("runner").HeadRunner)
    assert not isinstance(target, of_heads("runner").HeadRunner)
    plain = texts(make_decoder(target, None, batch_size=2))
    for shape in ("2x2x1", "dynamic-9x4x3"):
        taps = Taps(origins[1].layers, width=SMALL_WIDTH, dtype=torch.float32, device=CPU)
        made = make_decoder(
            target,
            None,
            batch_size=2,
            taps=taps,
            tree=shape,
            make_drafter=lambda rule, shape=shape, taps=taps: of_heads("drafter").HeadDrafter(  # type: ignore[misc]
                parts_of(head, taps=taps, rule=rule, tree=shape, vocab_size=target.vocab_size)
            ),
        )
        assert texts(made) == plain
