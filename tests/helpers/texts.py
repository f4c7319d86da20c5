"""When two greedy texts of one model count as the same.

Forwards of other shapes, or over other slices, round differently. So texts are compared up to the first near tie: the
first position whose two best logits differ by less than a ten-thousandth.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

NEAR_TIE = 1e-4


def first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """Where two texts part, or None."""
    for place, (token, other) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other:
            return place
    return None if len(ids) == len(other_ids) else min(len(ids), len(other_ids))


def few_part(texts: Sequence[Sequence[int]], other_texts: Sequence[Sequence[int]]) -> bool:
    """Whether at most one of fifty sampled texts differs: one whose draw fell between two roundings of a border.

    Per draw that has a chance of about a millionth, so that two of fifty texts are a fault.
    """
    pairs = zip(texts, other_texts, strict=True)
    num_parted = sum(first_difference(ids, other_ids) is not None for ids, other_ids in pairs)
    return num_parted <= len(texts) / 50


def part_at_a_near_tie(
    model: PreTrainedModel, prompt_ids: Sequence[int], ids: Sequence[int], other_ids: Sequence[int]
) -> bool:
    """Whether two texts part, and do so at a near tie of the model; texts that part elsewhere fail the test."""
    place = first_difference(ids, other_ids)
    if place is None:
        return False
    prefix = torch.tensor([[*prompt_ids, *ids[:place]]])
    with torch.inference_mode():
        best_two = model(prefix).logits[0, -1].float().topk(2).values
    gap = float(best_two[0] - best_two[1])
    assert gap < NEAR_TIE, f"texts part at token {place}, where the two best logits are {gap:.2g} apart"
    return True


def library_greedy(model: PreTrainedModel, prompt_ids: Sequence[int], *, num_tokens: int) -> list[int]:
    """What the library's own greedy generation adds to a prompt."""
    generate: Any = model.generate  # its signature wants a class that no model's type names
    ids = generate(torch.tensor([list(prompt_ids)]), max_new_tokens=num_tokens, do_sample=False)
    new_ids: list[int] = ids[0, len(prompt_ids) :].tolist()
    return new_ids


def read_greedy(model: Any, prompt_ids: Sequence[int], *, num_tokens: int) -> list[int]:
    """The same of a model that does not generate without an image: it reads the text anew for each token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]
