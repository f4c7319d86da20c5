"""Acceptance of the shipped pair by temperature, rule, K, kind of draft and kind of text: one command, one page.

    .venv/bin/python -m benchmarks.acceptance          prints the tables
    .venv/bin/python -m benchmarks.acceptance --write  writes docs/benchmarks/acceptance.md

Tokens per round count what a round adds to a text, up to K + 1. Alpha is the sum over the vocabulary of the smaller of
both probabilities, on average over the text: the chance that one drafted token is accepted (Leviathan et al. 2023,
arXiv:2211.17192, theorem 3.5). It has no time in it, so any machine gives the same figures up to rounding.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding import default_prompts
from benchmarks.measured import markdown, page_of, show
from llama_ssp import Pair, load
from llama_ssp.extensions.copies.records import NgramConfig
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.requests import encode
from llama_ssp.settings.schema import SamplingConfig, SpeculationConfig, VerificationConfig
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.processors import processor
from tests.helpers.decoders import complete

TEMPERATURES, LENGTHS = (0.0, 0.4, 0.8, 1.0), (2, 4, 8)
RULES, DRAFTS = ("speculative", "block", "coupled"), ("model", "ngram")
NUM_NEW_TOKENS, NUM_SAMPLES = 48, 2
EDITS = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n",
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n",
    "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2, 3, 4]\n",
)


def kinds_of_text() -> dict[str, list[str]]:
    """Prompts by kind: code and arithmetic are defaults of tasks; the third is to be written a second time."""
    defaults = {"code": default_prompts("compare"), "mixed": default_prompts("latency")}
    return defaults | {"repeated code": [text + text[: len(text) // 3] for text in EDITS]}


def write(
    pair: Pair, prompts: list[str], *, temperature: float, rule: str, num_draft_tokens: int, draft: str
) -> list[RowCompletion]:
    """Complete the prompts, several samples each above temperature 0."""
    config = replace(
        pair.config,
        draft=NgramConfig(kind="ngram") if draft == "ngram" else pair.config.draft,
        sampling=SamplingConfig(temperature=temperature),
        verification=VerificationConfig(rule=rule),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
        batch_size=8,
        ignore_eos=True,
    )
    decoder = build_decoder(pair.models, config, speculative=True)
    requests = [
        Request(
            index=index, sample=sample, max_new_tokens=NUM_NEW_TOKENS, prompt_ids=encode(prompt, pair.models.tokenizer)
        )
        for index, prompt in enumerate(prompts)
        for sample in range(NUM_SAMPLES if temperature else 1)
    ]
    return complete(decoder, requests)


def tokens_per_round(texts: list[RowCompletion]) -> float:
    """Accepted tokens and the one after them, without each text's last round, which the limit cuts."""
    return 1 + fmean(length for text in texts for length in text.accepted_lengths[:-1])


@torch.inference_mode()
def alpha(pair: Pair, texts: list[RowCompletion], temperature: float) -> float:
    """The sum of the smaller of both probabilities, on average over the positions of the texts."""
    process = processor(SamplingConfig(temperature=temperature))
    means = []
    for text in texts:
        ids_1T = torch.tensor([[*text.request.prompt_ids, *text.token_ids]])
        target, draft = (_logits(runner, ids_1T) for runner in (pair.models.target, pair.models.draft))
        smaller_T = torch.minimum(process(target), process(draft)).sum(-1)[0, len(text.request.prompt_ids) - 1 : -1]
        means.append(float(smaller_T.mean()))
    return fmean(means)


def _logits(runner: Any, ids_1T: Tensor) -> Tensor:  # noqa: ANN401 - target or draft
    num_tokens = ids_1T.shape[1]
    num_slots = -(-num_tokens // 8) * 8
    runner.allocate(batch_size=1, capacity=num_slots)
    logits: Tensor = runner.forward(ids_1T, torch.arange(num_tokens)[None], bucket=num_slots)
    return logits


def tables(pair: Pair) -> str:
    """Measure everything, and draw it as Markdown."""
    parts = []
    for kind, prompts in kinds_of_text().items():
        head = ["draft", "rule", *(f"T = {t:g}, K = {k}" for t, k in product(TEMPERATURES, LENGTHS))]
        lines = []
        alphas: dict[float, float] = {}
        for draft, rule in product(DRAFTS, RULES):
            cells = []
            for temperature, length in product(TEMPERATURES, LENGTHS):
                texts = write(pair, prompts, temperature=temperature, rule=rule, num_draft_tokens=length, draft=draft)
                cells.append(f"{tokens_per_round(texts):.2f}")
                if temperature and temperature not in alphas:
                    alphas[temperature] = alpha(pair, texts, temperature)
            name = "tiny-draft" if draft == "model" else draft
            lines.append([name, rule, *cells])
            sys.stderr.write(f"{kind}, {name}, {rule}\n")
        shown = ", ".join(f"{value:.3f} at temperature {temperature:g}" for temperature, value in alphas.items())
        parts += [f"## {kind.capitalize()}", markdown(head, lines), f"Alpha of `tiny-draft`: {shown}."]
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/acceptance.md")
    given = parser.parse_args()
    text = page_of("acceptance", tables=tables(load("tiny", "tiny-draft")))
    show(text, page="acceptance.md", is_written=given.write)


if __name__ == "__main__":
    main()
