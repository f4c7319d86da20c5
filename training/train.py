"""Trains the target from scratch and, on the same batches, a first draft distilled from it.

What it does: runs for a given number of minutes with a schedule driven by the clock, logs JSON
lines, and keeps checkpoints it can resume from.
What it does not do: the last distillation of the draft (see `distill.py`) or measurement.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import nn

from training import batches, corpus, export, generate, objectives
from training.model import DRAFT, TARGET, new_llama, scorer
from training.tokenizer import load_or_train

ROWS, LENGTH = 16, 256
# Every so many steps, late in the run, the rows are few and long.
LONG_SHAPES = ((4, 1024), (2, 2048))
LONG_EVERY = 5
WARMUP_STEPS = 60
DECAY_FROM = 0.5
VARIATION = 0.5
FIRST_SAVE = 40
EVALUATE_EVERY_MINUTES = 2.0


@dataclass
class Optimisers:
    """Muon for the matrices between embedding and output head, AdamW for the rest of one model."""

    model: nn.Module
    rate: float
    decay: float
    parts: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        inner: list[nn.Parameter] = []
        outer: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            between = parameter.ndim == 2 and not name.startswith(("model.embed_tokens.", "lm_head."))
            (inner if between else outer).append(parameter)
        muon = torch.optim.Muon(inner, lr=self.rate, weight_decay=self.decay, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(outer, lr=self.rate * 0.6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.parts = [muon, adam]
        for part in self.parts:
            for group in part.param_groups:
                group["peak"] = group["lr"]

    def step(self, factor: float) -> None:
        """Updates the weights at a fraction of the peak rates and clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * factor
            part.step()
            part.zero_grad(set_to_none=True)


def rate_factor(step: int, progress: float) -> float:
    """Returns the fraction of the peak rate: warm-up by steps, level, linear decay by clock."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    falling = (1.0 - progress) / (1.0 - DECAY_FROM)
    return warm * min(1.0, max(0.02, falling))


@dataclass(frozen=True)
class Stage:
    """What changes during the run.

    Attributes:
        begin: Part of the run after which the stage applies.
        agreement: Weight in the target's loss of its total variation from the draft.
        arithmetic: Arithmetic rows among the rows of a step.
        own: Rows of the target's own text among them, once there is any.
        long: Whether some steps have long rows.
    """

    begin: float
    agreement: float
    arithmetic: int
    own: int = 0
    long: bool = False


STAGES = (
    Stage(0.0, 0.0, 5),
    Stage(0.35, 0.2, 5),
    Stage(0.57, 0.5, 5, own=2),
    Stage(0.68, 0.8, 6, own=3, long=True),
)


class Log:
    """A file of JSON lines."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file

    def write(self, **values: float | str) -> None:
        """Appends one record."""
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(rounded) + "\n")


def run_by_the_clock(
    minutes: float,
    *,
    take_step: Callable[[int, float, float], dict[str, float]],
    evaluate: Callable[[], dict[str, float]],
    log: Log,
    kind: str,
) -> None:
    """Takes steps until the minutes are spent; logs what they return, and now and then what `evaluate` does as `kind`.

    A step gets its number, the part of the run that is over, and the fraction of the peak rates: a warm-up by steps,
    then linear decay.
    """
    begin = time.monotonic()
    step, progress, evaluated = 0, 0.0, 0.0
    while progress < 1.0:
        factor = min(1.0, (step + 1) / 30) * max(0.02, 1.0 - progress)
        figures = take_step(step, progress, factor)
        step += 1
        spent = (time.monotonic() - begin) / 60
        progress = spent / minutes
        if step % 10 == 0:
            log.write(kind="train", step=step, minutes=spent, **figures)
        if spent - evaluated > EVALUATE_EVERY_MINUTES or progress >= 1.0:
            evaluated = spent
            log.write(kind=kind, step=step, minutes=spent, **evaluate())


class Trainer:
    """The state of one training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.scratch: Path = options.scratch
        self.tokenizer = load_or_train(self.scratch / "tokenizer")
        self.target, self.draft = new_llama(TARGET), new_llama(DRAFT)
        self.step, self.spent = 0, 0.0
        if options.resume:
            self._resume()
        self.first_step = self.step
        self.mixture = batches.Mixture(self.tokenizer, options.seed + self.step)
        self.optimisers = [
            Optimisers(self.target, options.rate, options.decay),
            Optimisers(self.draft, options.rate * 1.3, 0.01),
        ]
        self.slow = scorer(self.target), scorer(self.draft)
        self.fast = scorer(self.target, compiles=options.compile), scorer(self.draft, compiles=options.compile)
        self.log = Log(self.scratch / "train.jsonl")
        self.rows_BT = batches.heldout_rows(self.tokenizer, 48, LENGTH)
        self.own = self._own_rows()
        self.log.write(kind="start", step=self.step, minutes=self.spent / 60, own_rows=len(self.own))
        self.rng = random.Random(options.seed)
        self.samples = {
            "unseen": self.rng.sample(corpus.product_pairs(heldout=True), 192),
            "seen": self.rng.sample(corpus.product_pairs(heldout=False), 128),
        }
        self.rng.seed(options.seed + self.step)

    def _own_rows(self) -> list[list[int]]:
        return [row_T.tolist() for row_T in generate.load_rows(self.scratch)]

    def _resume(self) -> None:
        state = json.loads((self.scratch / "checkpoint.json").read_text(encoding="utf-8"))
        self.step, self.spent = state["step"], state["spent"]
        for name, model in (("target", self.target), ("draft", self.draft)):
            load_model(model, self.scratch / f"{name}.safetensors")

    def save(self) -> None:
        """Writes a checkpoint to resume from, and the pair so far in its final form."""
        for name, model in (("target", self.target), ("draft", self.draft)):
            export.save_checkpoint(model, self.scratch / f"{name}.safetensors")
        state = json.dumps({"step": self.step, "spent": self.spent})
        (self.scratch / "checkpoint.json").write_text(state, encoding="utf-8")
        export.save_model(self.target, self.tokenizer, self.options.out / "tiny")
        export.save_model(self.draft, self.tokenizer, self.options.out / "tiny-draft")

    def evaluate(self) -> None:
        """Logs the held-out scores."""
        scores = objectives.heldout_scores(*self.slow, self.rows_BT)
        for name, pairs in self.samples.items():
            scores[name] = objectives.product_rate(self.slow[0], self.tokenizer, pairs, precision=torch.bfloat16)
        self.own = self._own_rows()
        self.log.write(kind="heldout", step=self.step, minutes=self.spent / 60, **scores)

    def train_step(self, progress: float) -> dict[str, float]:
        """Takes one step of both models and returns what to log."""
        rows, length = ROWS, LENGTH
        models = self.fast
        stage = next(stage for stage in reversed(STAGES) if progress >= stage.begin)
        if stage.long and self.step % LONG_EVERY == 0:
            rows, length = LONG_SHAPES[self.step // LONG_EVERY % len(LONG_SHAPES)]
            models = self.slow
        target, draft = models
        arithmetic = stage.arithmetic * rows // ROWS
        own = self.rng.sample(self.own, stage.own) if self.own and length == LENGTH else []
        batch = self.mixture.take(rows, arithmetic, length, own)
        sources = rows - arithmetic
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = target(batch.ids_BT)
            draft_BTV = draft(batch.ids_BT[: sources + 1])
        loss = objectives.next_token_loss(logits_BTV, batch)
        target_NV = logits_BTV[: sources + 1].flatten(0, 1)
        draft_NV = draft_BTV.flatten(0, 1)
        gradients = objectives.agreement_gradients(target_NV.detach(), draft_NV.detach(), VARIATION)
        pull_NV = gradients.target_NV * stage.agreement
        pull_NV[sources * length :] = 0.0
        torch.autograd.backward((loss, target_NV, draft_NV), (None, pull_NV, gradients.draft_NV))
        for optimiser in self.optimisers:
            optimiser.step(rate_factor(self.step - self.first_step, progress))
        self.step += 1
        return {"loss": loss.item(), "acceptance": gradients.acceptance}

    def run(self) -> None:
        """Trains until the minutes are spent."""
        budget = self.options.minutes * 60
        end = budget * self.options.until
        evaluated = saved = self.spent
        last = time.monotonic()
        while self.spent < end:
            values = self.train_step(self.spent / budget)
            now = time.monotonic()
            self.spent += now - last
            last = now
            if self.step % 10 == 0:
                self.log.write(kind="train", step=self.step, minutes=self.spent / 60, **values)
            if self.spent - evaluated > self.options.evaluate_every * 60:
                self.evaluate()
                evaluated = self.spent
            if self.spent - saved > self.options.save_every * 60 or self.step == FIRST_SAVE:
                self.save()
                saved = self.spent
        self.evaluate()
        self.save()


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True, help="the pair so far, as shipped")
    parser.add_argument("--minutes", type=float, default=73.0)
    parser.add_argument("--rate", type=float, default=6e-3, help="peak rate of Muon")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    parser.add_argument("--until", type=float, default=1.0, help="part of the minutes to stop after")
    parser.add_argument("--evaluate-every", type=float, default=4.0, help="minutes")
    parser.add_argument("--save-every", type=float, default=8.0, help="minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Trainer(options).run()


if __name__ == "__main__":
    main()
