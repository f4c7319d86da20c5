"""Texts get the log-probabilities of the library's own logits, in any batch, in any chunks and on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llama_ssp.architectures import engine
from llama_ssp.errors import NumericError
from llama_ssp.models.loading import load_model
from llama_ssp.models.prefill import Buckets
from llama_ssp.models.runner import NullRunner, Runner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.likelihoods import ScoredText, TokenScores, log_likelihoods, score_in_rows
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.lanes import heavy
from tests.helpers.log_probs import check as compare
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.prefix_runner import PrefixRunner

ALONE, CPU = Comm.single(), torch.device("cpu")
LENGTHS, NUM_TOP = (7, 2, 30, 30, 12), 3
KINDS = ["gemma2", "qwen3_moe", *map(heavy, ("gpt_neox", "gpt_oss", "phi", "deepseek_v3"))]
TEXTS = [
    ScoredText(
        ids=torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist(),
        num_given=1 + number,
    )
    for number, length in enumerate(LENGTHS)
    if number + 1 < length
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, build_checkpoint(folder, "llama")


def load(folder: Path, comm: Comm) -> Runner:
    return load_model(Loading(inspect(folder), dtype=torch.float32, comm=comm))


def scores_of(
    target: Runner, texts: list[ScoredText], *, batch_size: int = 3, comm: Comm = ALONE, src: int = 0
) -> list[TokenScores]:
    found = dict(log_likelihoods(target, texts, batch_size=batch_size, comm=comm, src=src, num_top=NUM_TOP))
    return [found[place] for place in range(len(texts))]


def test_a_certain_model_has_as_many_tokens_as_are_asked_for() -> None:
    """Their log-probabilities are far below any that sampling draws."""
    text = ScoredText(ids=[1, 2, 3, 4])
    (found,) = scores_of(PrefixRunner(sharpness=1e4), [text], batch_size=1)
    assert [len(one.top) for one in found.model] == [NUM_TOP] * 3
    assert min(other.logprob for other in found.model[0].top) < -100


@torch.inference_mode()
def check(model: PreTrainedModel, texts: list[ScoredText], scores: list[TokenScores]) -> None:
    """Compare with what the library's forward of one whole text says."""
    for text, found in zip(texts, scores, strict=True):
        log_probs_TV = model(torch.tensor([text.ids])).logits[0, :-1].log_softmax(-1)[text.num_given - 1 :]
        ids = text.ids[text.num_given :]
        compare(found.model, log_probs_TV, ids, num_top=NUM_TOP)
        wanted_T = log_probs_TV.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert [one.logprob for one in found.model] == pytest.approx(wanted_T.tolist(), abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_token_has_the_log_probability_of_the_librarys_logits(
    saved: tuple[Path, PreTrainedModel], batch_size: int
) -> None:
    folder, model = saved
    check(model, TEXTS, scores_of(load(folder, Comm.single()), TEXTS, batch_size=batch_size))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_figures_of_the_library(kind: str, tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path, kind)
    check(model, TEXTS, scores_of(load(tmp_path, Comm.single()), TEXTS, batch_size=3))


@pytest.mark.parametrize("num_logits", [1, 3 * 5 * 11, 2**26])
def test_chunks_of_any_length_give_the_same_scores(monkeypatch: pytest.MonkeyPatch, num_logits: int) -> None:
    """A chunk of one token, one of five, and one that holds all."""
    texts = [
        ScoredText(ids=[7 * token % 11 for token in range(length)], num_given=num_given)
        for length, num_given in ((30, 20), (14, 2), (29, 28))
    ]
    alone = [scores_of(PrefixRunner(), [text], batch_size=1)[0] for text in texts]
    monkeypatch.setattr(engine, "_MOST_SCORED", num_logits)
    together = scores_of(PrefixRunner(), texts, batch_size=3)
    for one, other in zip(alone, together, strict=True):
        logprobs = [[token.logprob for token in each.model] for each in (one, other)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


@pytest.mark.parametrize("is_shared", [True, False], ids=["a target of both", "a rank without it"])
def test_every_rank_gets_the_scores(saved: tuple[Path, PreTrainedModel], is_shared: bool) -> None:
    folder, model = saved
    comms = thread_comms(2)
    nothing = NullRunner(device=CPU, vocab_size=VOCAB_SIZE, max_position_embeddings=128)
    runners = [load(folder, comm) for comm in comms] if is_shared else [nothing, load(folder, Comm.single())]
    for scores in on_ranks(comms, lambda comm: scores_of(runners[comm.rank], TEXTS, batch_size=3, comm=comm, src=1)):
        check(model, TEXTS, scores)


def test_nan_is_an_error_of_its_own_text() -> None:
    broken = PrefixRunner()
    broken.table[7] = torch.nan
    texts = [ScoredText(ids=ids) for ids in ([1, 2, 3, 4], [1, 7, 2], [5, 6])]
    texts.append(ScoredText(ids=[7, 7], num_given=2))  # nothing of it is scored
    broken.allocate(batch_size=4, capacity=32)
    how: Any = {"comm": Comm.single(), "src": 0, "num_top": NUM_TOP}
    *_, found = score_in_rows(broken, texts, range(4), Buckets(step=32, num_slots=32), **how)
    assert [isinstance(one, NumericError) for one in found] == [False, True, False, False]
    for place in (0, 2):
        assert found[place] == scores_of(PrefixRunner(), [texts[place]], batch_size=1)[0]


def test_logits_that_are_nan_end_the_scoring_on_every_rank() -> None:
    broken = PrefixRunner()
    broken.head[:] = float("nan")
    nothing = NullRunner(device=CPU, vocab_size=11, max_position_embeddings=512)
    runners: list[Runner] = [broken, nothing]

    def scored(comm: Comm) -> str:
        with pytest.raises(NumericError) as caught:
            scores_of(runners[comm.rank], [ScoredText(ids=[1, 2, 3])], batch_size=1, comm=comm)
        return str(caught.value)

    assert len(set(on_ranks(thread_comms(2), scored))) == 1
