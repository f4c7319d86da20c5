"""Measures a saved pair: tokens per round, cost ratio and multiplication rates.

What it does: a plain speculative sampler over transformers models at batch 1, on prompts cut
from held-out sources; timings of single forward passes; greedy answers to seen and unseen
multiplications. Writes one JSON file.
What it does not do: train, or use the runner of this repository.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from training import batches, corpus, objectives
from training.tokenizer import EOS_ID, load_tokenizer

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
DRAFTED = 4
PROMPT = 96


class Cached:
    """A model with its key-value cache, fed with ever longer token lists."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.cache, self.done = DynamicCache(), 0

    def probabilities(self, ids: list[int]) -> Tensor:
        """Feeds what the cache lacks and returns the distributions after each fed token."""
        fed_BT = torch.tensor([ids[self.done :]])
        logits_TV: Tensor = self.model(fed_BT, past_key_values=self.cache, use_cache=True).logits[0]
        self.done = len(ids)
        if self.temperature == 0.0:
            best_T = logits_TV.argmax(-1)
            return torch.nn.functional.one_hot(best_T, logits_TV.shape[-1]).float()
        return (logits_TV.float() / self.temperature).softmax(-1)

    def keep(self, length: int) -> None:
        """Forgets everything after the first `length` tokens."""
        if self.done > length:
            self.cache.crop(length - self.done)
            self.done = length


class Drafter(Protocol):
    """What drafts: a model of its own, or a head on the target's states."""

    def probabilities(self, ids: list[int]) -> Tensor:
        """Returns distributions after the latest of these tokens; the last row is that after the last token."""

    def keep(self, length: int) -> None:
        """Forgets everything after the first `length` tokens."""


def speculative_round(
    target: Cached, draft: Drafter, ids: list[int], num_drafted: int = DRAFTED
) -> tuple[list[int], int]:
    """Drafts, verifies and returns the new tokens and how many drafted ones were accepted."""
    drafted, q_KV = list(ids), []
    for _ in range(num_drafted):
        q_V = draft.probabilities(drafted)[-1]
        drafted.append(int(torch.multinomial(q_V, 1)))
        q_KV.append(q_V)
    p_KV = target.probabilities(drafted)[-num_drafted - 1 :]
    accepted = 0
    for token, p_V, q_V in zip(drafted[len(ids) :], p_KV, q_KV, strict=False):
        if float(torch.rand(())) * float(q_V[token]) >= float(p_V[token]):
            rest_V = (p_V - q_V).clamp(min=0.0)
            last = int(torch.multinomial(rest_V, 1))
            break
        accepted += 1
    else:
        last = int(torch.multinomial(p_KV[-1], 1))
    new = [*drafted[len(ids) : len(ids) + accepted], last]
    for model in (target, draft):
        model.keep(len(ids) + accepted)
    return new, accepted


@dataclass
class Pair:
    """The two models under measurement."""

    target: PreTrainedModel
    draft: PreTrainedModel

    def begin(self, temperature: float) -> tuple[Cached, Drafter]:
        """Returns both without a token in their caches."""
        return Cached(self.target, temperature), Cached(self.draft, temperature)


class Drafting(Protocol):
    """A target and something that drafts for it."""

    def begin(self, temperature: float) -> tuple[Cached, Drafter]:
        """Returns both without a token in their caches."""


@torch.no_grad()
def tokens_per_round(
    pair: Drafting,
    prompts: list[list[int]],
    temperature: float,
    length: int,
    *,
    num_drafted: int = DRAFTED,
    eos_id: int = EOS_ID,
) -> dict[str, float]:
    """Generates from each prompt and returns the mean tokens per round, its error, and the acceptance rate.

    The rate is of drafted tokens up to the first rejection of each round, which are those that were examined.
    """
    counts: list[int] = []
    means = []
    for prompt in prompts:
        target, draft = pair.begin(temperature)
        ids, rounds = list(prompt), []
        while len(ids) < len(prompt) + length:
            new, accepted = speculative_round(target, draft, ids, num_drafted)
            rounds.append(accepted + 1)
            ids += new
            if eos_id in new:
                break
        counts += rounds
        means.append(statistics.fmean(rounds))
    error = statistics.stdev(means) / len(means) ** 0.5
    return {
        "tokens_per_round": statistics.fmean(counts),
        "standard_error_over_prompts": error,
        "rounds": len(counts),
        "acceptance_rate": sum(count - 1 for count in counts) / sum(min(count, num_drafted) for count in counts),
    }


@torch.no_grad()
def forward_milliseconds(model: PreTrainedModel, width: int, repeats: int = 60) -> float:
    """Returns the median time of a forward pass of `width` tokens after 256 cached ones."""
    cache, times = DynamicCache(), []
    model(torch.randint(3, 4096, (1, 256)), past_key_values=cache, use_cache=True)
    ids_BT = torch.randint(3, 4096, (1, width))
    for _ in range(repeats):
        begin = time.perf_counter()
        model(ids_BT, past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - begin)
        cache.crop(-width)
    return 1000 * statistics.median(times)


def costs(folder: Path) -> dict[str, dict[str, float]]:
    """Times both models in both precisions."""
    result = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        times = {role: forward_milliseconds(load(folder / role, dtype), 1) for role in ("tiny", "tiny-draft")}
        verify = forward_milliseconds(load(folder / "tiny", dtype), DRAFTED + 1)
        ratio = times["tiny-draft"] / times["tiny"]
        result[name] = {
            "target_ms": times["tiny"],
            "target_five_tokens_ms": verify,
            "draft_ms": times["tiny-draft"],
            "draft_to_target": ratio,
        }
    return result


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads one model of the pair."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model


def multiplications(folder: Path) -> dict[str, float]:
    """Returns the greedy rates over all unseen products and as many seen ones."""
    tokenizer, model = load_tokenizer(folder / "tiny"), load(folder / "tiny")
    unseen = list(corpus.product_pairs(heldout=True))
    seen = random.Random(7).sample(corpus.product_pairs(heldout=False), len(unseen))
    return {
        "questions_each": len(unseen),
        "unseen": objectives.product_rate(lambda ids: model(ids).logits, tokenizer, unseen),
        "seen": objectives.product_rate(lambda ids: model(ids).logits, tokenizer, seen),
    }


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, required=True, help="folder of tiny and tiny-draft")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(options.pair / "tiny")
    rows = batches.SourceRows(tokenizer, corpus.heldout_sources(), seed=3)
    prompts = rows.take(options.prompts, PROMPT - 1)
    pair = Pair(load(options.pair / "tiny"), load(options.pair / "tiny-draft"))
    speculation = {str(t): tokens_per_round(pair, prompts, t, options.length) for t in TEMPERATURES}
    held_BT = batches.heldout_rows(tokenizer, 96, 256)
    scores = objectives.heldout_scores(lambda ids: pair.target(ids).logits, lambda ids: pair.draft(ids).logits, held_BT)
    result = {
        "drafted_per_round": DRAFTED,
        "speculation": speculation,
        "heldout_text": scores,
        "multiplication": multiplications(options.pair),
        "forward_times": costs(options.pair),
        "parameters": {
            "tiny": pair.target.num_parameters(),
            "tiny-draft": pair.draft.num_parameters(),
        },
    }
    options.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
