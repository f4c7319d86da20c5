"""Measures what drafts for a target: tokens per round, and of a pair of models also losses and multiplications.

What it does: lets the engine continue prompts cut from held-out sources with a draft model or a draft head, and prints
JSON lines. With `--scores` a last line has the scores of a pair on held-out text, and on seen and unseen
multiplications.
What it does not do: train, or time anything.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from llama_ssp import Pair, load
from llama_ssp.api.pair import Completion
from training import batches, corpus, objectives
from training.model import scorer
from training.tokenizer import load_tokenizer

PROMPT = 96


def rounds_of(completion: Completion, length: int, num_drafted: int) -> Iterator[int]:
    """Yields what each round accepted, of those that began with room for all of its tokens."""
    num_written = 1
    for accepted in completion.accepted_lengths:
        if num_written + num_drafted + 1 > length:
            return
        yield accepted
        num_written += accepted + 1


def tokens_per_round(
    pair: Pair, prompts: list[list[int]], temperature: float, length: int, *, num_drafted: int
) -> dict[str, float]:
    """Continues each prompt and returns the mean tokens per round, its error, and the acceptance rate.

    The rate is of drafted tokens up to the first rejection of each round, which are those that were examined.
    """
    completions = pair.generate(prompts, max_new_tokens=length, temperature=temperature, num_draft_tokens=num_drafted)
    rounds = [found for each in completions if (found := [*rounds_of(each, length, num_drafted)])]
    accepted = [number for found in rounds for number in found]
    return {
        "tokens_per_round": 1 + statistics.fmean(accepted),
        "standard_error_over_prompts": statistics.stdev(map(statistics.fmean, rounds)) / len(rounds) ** 0.5,
        "rounds": len(accepted),
        "acceptance_rate": sum(accepted) / sum(min(number + 1, num_drafted) for number in accepted),
    }


def scores(target_folder: Path, draft_folder: Path) -> dict[str, object]:
    """Returns losses on held-out text, greedy rates over all unseen products and as many seen ones, and sizes."""
    tokenizer = load_tokenizer(target_folder)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (target_folder, draft_folder)
    )
    unseen = list(corpus.product_pairs(heldout=True))
    seen = random.Random(7).sample(corpus.product_pairs(heldout=False), len(unseen))
    rates = {
        name: objectives.product_rate(scorer(target), tokenizer, pairs)
        for name, pairs in (("unseen", unseen), ("seen", seen))
    }
    held_BT = batches.heldout_rows(tokenizer, 96, 256)
    return {
        "heldout_text": objectives.heldout_scores(scorer(target), scorer(draft), held_BT),
        "multiplication": {"questions_each": len(unseen), **rates},
        "parameters": {"tiny": target.num_parameters(), "tiny-draft": draft.num_parameters()},
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("llama_ssp/shipped/tiny"), help="folder of the target")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the head or draft model")
    parser.add_argument("--text", type=Path, help="folder of held-out text files; default: Python's held-out sources")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--drafted", type=int, nargs="+", default=[4], help="drafted tokens per round")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scores", action="store_true", help="score a pair of models, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    files = corpus.text_files(options.text) if options.text else corpus.heldout_sources()
    rows = batches.SourceRows(load_tokenizer(options.target), files, seed=3)
    prompts = rows.take(options.prompts, PROMPT - 1)
    pair = load(options.target, options.draft, dtype="fp32")
    for temperature, number in product(options.temperatures, options.drafted):
        found = tokens_per_round(pair, prompts, temperature, options.length, num_drafted=number)
        print(json.dumps({"temperature": temperature, "drafted_per_round": number, **found}), flush=True)
    if options.scores:
        print(json.dumps(scores(options.target, options.draft)))


if __name__ == "__main__":
    main()
