"""What transformers' own forward says of a text, for tests of log-probabilities."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.text.log_probs import CompletionLogProbs, TokenLogprob

EXACT = SamplingConfig(temperature=1.0)


@torch.inference_mode()
def laws(
    model: PreTrainedModel, ids: Sequence[int], num_prompt: int, sampling: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, V) after all tokens but the last: the model's, and those of draws."""
    logits_TV = model(torch.tensor([[*ids]])).logits[0, :-1].double()
    drawn_TV = logits_TV.clone()
    for place in range(len(drawn_TV)):
        known, new = torch.tensor(ids[: place + 1]).unique(), ids[num_prompt : place + 1]
        values = drawn_TV[place, known]
        penalty = sampling.repetition_penalty
        drawn_TV[place, known] = torch.where(values < 0, values * penalty, values / penalty)
        for token in new:
            drawn_TV[place, token] -= sampling.frequency_penalty
    drawn_TV /= sampling.temperature
    if sampling.top_k:
        drawn_TV[drawn_TV < drawn_TV.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    return logits_TV.log_softmax(-1), drawn_TV.log_softmax(-1)


def check(found: Sequence[TokenLogprob] | None, wanted_TV: Tensor, ids: Sequence[int], *, num_top: int) -> None:
    """Compare figures of the tokens `ids` with the law before each."""
    assert found is not None
    next_T1 = torch.tensor(ids)[:, None]
    assert [one.token for one in found] == [*ids]
    assert [one.logprob for one in found] == pytest.approx(wanted_TV.gather(1, next_T1)[:, 0].tolist(), abs=1e-4)
    for one, wanted_V in zip(found, wanted_TV, strict=True):
        top_ids, top = [other.token for other in one.top], [other.logprob for other in one.top]
        best = [value for value in wanted_V.topk(min(num_top, len(wanted_V))).values.tolist() if value > -60]
        assert top == pytest.approx(best, abs=1e-4)
        assert wanted_V[top_ids].tolist() == pytest.approx(best, abs=1e-4)


def check_completion(
    found: CompletionLogProbs | None,
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    sampling: SamplingConfig,
    *,
    num_top: int,
    num_of_prompt: int | None = None,
) -> None:
    assert found is not None
    ids, first = [*prompt_ids, *new_ids], len(prompt_ids)
    model_TV, drawn_TV = laws(model, ids, first, sampling)
    check(found.logprobs, model_TV[first - 1 :], new_ids, num_top=num_top)
    if sampling == EXACT:
        assert found.drawn_logprobs is None
    else:
        check(found.drawn_logprobs, drawn_TV[first - 1 :], new_ids, num_top=num_top)
    if num_of_prompt is not None:
        check(found.prompt_logprobs, model_TV[: first - 1], prompt_ids[1:], num_top=num_of_prompt)
