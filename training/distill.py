"""Finishes the draft: distillation from the frozen target, half of it on the target's own text.

What it does: trains the draft to be accepted by the target as shipped (rounded to bf16), on the
rows that `generate.py` wrote and on training rows.
What it does not do: change the target, or generate.
"""

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import Tensor
from transformers import LlamaForCausalLM

from training import batches, export, generate, objectives
from training.model import DRAFT, new_llama, scorer
from training.tokenizer import PAD_ID, load_tokenizer
from training.train import LENGTH, ROWS, Log, Optimisers, run_by_the_clock

ARITHMETIC_ROWS = 1
LONG_EVERY, LONG_ROWS, LONG_LENGTH = 12, 4, 1024


class Distiller:
    """The state of the last distillation."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.tokenizer = load_tokenizer(options.out / "tiny")
        self.target = LlamaForCausalLM.from_pretrained(options.out / "tiny", dtype=torch.float32).requires_grad_(False)
        self.draft = new_llama(DRAFT)
        start: Path = options.scratch / (options.start + ".safetensors")
        load_model(self.draft, start)
        self.mixture = batches.Mixture(self.tokenizer, options.seed)
        self.optimiser = Optimisers(self.draft, options.rate, 0.01)
        self.slow = scorer(self.target), scorer(self.draft)
        self.fast = scorer(self.target, compiles=options.compile), scorer(self.draft, compiles=options.compile)
        self.rows_BT = batches.heldout_rows(self.tokenizer, 48, LENGTH)
        self.log = Log(options.scratch / "distill.jsonl")
        self.own = generate.load_rows(options.scratch)
        self.rng = random.Random(options.seed)
        self.log.write(kind="generated", rows=len(self.own))

    def rows(self, step: int) -> Tensor:
        """Returns the ids of one step: own text, training sources and some arithmetic."""
        if step % LONG_EVERY == LONG_EVERY - 1:
            return torch.tensor(self.mixture.sources.take(LONG_ROWS, LONG_LENGTH - 1))
        own = ROWS // 2 if self.own else 0
        seen_BT = self.mixture.take(ROWS - own, ARITHMETIC_ROWS, LENGTH).ids_BT
        if not own:
            return seen_BT
        return torch.cat((torch.stack(self.rng.sample(self.own, own))[:, :LENGTH], seen_BT))

    def train_step(self, step: int, progress: float, factor: float) -> dict[str, float]:
        """Takes one step and returns the mean acceptance."""
        ids_BT, variation = self.rows(step), min(0.95, 0.5 + 0.6 * progress)
        target, draft = self.fast if ids_BT.shape[1] == LENGTH else self.slow
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target_BTV = target(ids_BT)
            draft_BTV = draft(ids_BT)
        real_BT = ids_BT != PAD_ID
        draft_NV = draft_BTV[real_BT]
        gradients = objectives.agreement_gradients(target_BTV[real_BT], draft_NV.detach(), variation)
        draft_NV.backward(gradients.draft_NV)
        self.optimiser.step(factor)
        return {"acceptance": gradients.acceptance}

    def evaluate(self) -> dict[str, float]:
        """Writes the draft as shipped and as float32, and returns the held-out scores."""
        export.save_checkpoint(self.draft, self.options.scratch / "draft-distilled.safetensors")
        export.save_model(self.draft, self.tokenizer, self.options.out / "tiny-draft")
        return objectives.heldout_scores(*self.slow, self.rows_BT)


def main() -> None:
    """Runs the distillation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True, help="the pair, as shipped")
    parser.add_argument("--start", default="draft", help="checkpoint to start the draft from")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak rate of Muon")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = Distiller(options)
    run_by_the_clock(options.minutes, take_step=made.train_step, evaluate=made.evaluate, log=made.log, kind="heldout")


if __name__ == "__main__":
    main()
