"""Trains an EAGLE-3 draft head for a frozen target: the shipped one, or any Llama of transformers.

What it does: lets the target write text of its own unless the scratch folder has some, takes its most frequent
tokens as the drafted vocabulary, and trains the head on that text and on the sources. In every step the head
drafts several tokens from its own states, as it will in use, and its loss counts each by the chance that the
tokens before it were accepted.
What it does not do: change the target, or measure tokens per round (see `measure.py`).

Source: Li et al. 2025, arXiv:2503.01840.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from training import batches, corpus, generate
from training.head_model import Head, load_head, save_head, tapped_layers
from training.model import llama_config
from training.objectives import CHUNK, TEMPERATURE
from training.tokenizer import load_tokenizer
from training.train import Log, Optimisers, run_by_the_clock

STEPS = 4
ROWS = 6
# The least weight of a drafted token, so that later steps learn before earlier ones are good.
LEAST_WEIGHT = 0.1
# Rows of the target's own text that are kept for the log.
HELD_ROWS = 32
ARITHMETIC_ROWS = 1
LONG_EVERY, LONG_ROWS, LONG_LENGTH = 20, 2, 1024


@dataclass(frozen=True)
class Reading:
    """What the frozen target says about a batch, without gradients.

    Attributes:
        taps_BPC: Inputs of the three tapped layers.
        embeddings_BPE: Embeddings of the tokens one position later.
        target_BPW: Probabilities of the token after each pair at the drafting temperature, of the drafted
            vocabulary only; they add up to less than one.
        places_BP: Where in that vocabulary the token after each pair is, or -1.
        real_BP: Whether the pair is text rather than filling.
    """

    taps_BPC: Tensor
    embeddings_BPE: Tensor
    target_BPW: Tensor
    places_BP: Tensor
    real_BP: Tensor


class Target:
    """The frozen target in bf16."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
        self.model.requires_grad_(False)
        self.embed = self.model.get_input_embeddings()

    def head_config(self, intermediate: int) -> LlamaConfig:
        """Returns the sizes of a head for this target."""
        of_target = self.model.config
        same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
        sizes = {name: getattr(of_target, name) for name in same}
        rotary = {"rope_type": "default", "rope_theta": of_target.rope_parameters["rope_theta"]}
        return llama_config(num_hidden_layers=1, intermediate_size=intermediate, rope_parameters=rotary, **sizes)

    @torch.no_grad()
    def taps(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Runs over rows and returns the taps, one after the other in the last dimension, and the logits."""
        out = self.model(ids_BT, output_hidden_states=True, use_cache=False)
        layers = tapped_layers(self.model.config.num_hidden_layers)
        return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1), out.logits

    @torch.no_grad()
    def read(self, ids_BT: Tensor, head: Head, pad_id: int) -> Reading:
        """Runs over rows and returns what a head needs of it."""
        taps_BTC, logits_BTV = self.taps(ids_BT)
        drafted_W = head.drafted_ids()
        places_V = torch.full((len(head.get_buffer("t2d")),), -1, device=ids_BT.device)
        places_V[drafted_W] = torch.arange(len(drafted_W), device=ids_BT.device)
        rows = [(logits_PV.float() / TEMPERATURE).softmax(-1)[:, drafted_W] for logits_PV in logits_BTV[:, 1:]]
        return Reading(
            taps_BPC=taps_BTC[:, :-1],
            embeddings_BPE=self.embed(ids_BT)[:, 1:],
            target_BPW=torch.stack(rows),
            places_BP=functional.pad(places_V[ids_BT[:, 2:]], (0, 1), value=-1),
            real_BP=ids_BT[:, 1:] != pad_id,
        )


@dataclass(frozen=True)
class StepGradient:
    """The gradient of one drafting step and how its tokens fare: see `step_gradient`."""

    logits_NW: Tensor
    acceptance_N: Tensor
    survival_N: Tensor


@torch.no_grad()
def step_gradient(
    target_NW: Tensor, logits_NW: Tensor, places_N: Tensor, weights_N: Tensor, mix: float
) -> StepGradient:
    """Differentiates what keeps drafted tokens from being accepted at the drafting temperature.

    Args:
        target_NW: The target's probabilities of the drafted vocabulary.
        logits_NW: The head's.
        places_N: Where the next token of the text is, or -1.
        weights_N: Weight of each position.
        mix: Share of the total variation in the loss, the rest being the Kullback-Leibler divergence.

    Returns:
        The gradient with respect to the logits; the chance that a drafted token is accepted; and the chance that
        the chain goes on to the next token of the text, were that token one of the target's.
    """
    gradient_NW = torch.empty_like(logits_NW)
    acceptance_N, survival_N = torch.empty_like(weights_N), torch.empty_like(weights_N)
    for start in range(0, len(logits_NW), CHUNK):
        part = slice(start, start + CHUNK)
        p_NW, q_NW = target_NW[part], (logits_NW[part].float() / TEMPERATURE).softmax(-1)
        places_N1 = places_N[part, None].clamp(min=0)
        survival_N1 = (q_NW.gather(1, places_N1) / p_NW.gather(1, places_N1).clamp(min=1e-9)).clamp(max=1.0)
        survival_N[part] = survival_N1[:, 0] * (places_N[part] >= 0)
        acceptance_N[part] = torch.minimum(p_NW, q_NW).sum(-1)
        q_is_lower_NW = (q_NW < p_NW).float()
        q_low_N1 = (q_NW * q_is_lower_NW).sum(-1, keepdim=True)
        divergence_NW = (q_NW * p_NW.sum(-1, keepdim=True)).sub_(p_NW).mul_(1.0 - mix)
        q_NW *= (q_low_N1 - q_is_lower_NW).mul_(mix)
        gradient_NW[part] = q_NW.add_(divergence_NW).mul_(weights_N[part, None] / TEMPERATURE)
    return StepGradient(gradient_NW, acceptance_N, survival_N)


@dataclass(frozen=True)
class ChainGradients:
    """The gradients of all drafting steps, the mean acceptance of each, and the tokens per round they amount to."""

    logits: list[Tensor]
    acceptance: list[float]
    tokens_per_round: float

    @property
    def figures(self) -> dict[str, float]:
        """What the log has of them."""
        steps = {f"acceptance_{step}": value for step, value in enumerate(self.acceptance, start=1)}
        return {"tokens_per_round": self.tokens_per_round} | steps


@torch.no_grad()
def chain_gradients(reading: Reading, logits: list[Tensor], mix: float) -> ChainGradients:
    """Differentiates an unrolled draft; `mix` is the share of the total variation in the loss.

    A chain that follows text of the target's reaches its next step with the chance min(1, q / p) of the token
    there, since drafting it and accepting it has the chance min(p, q) and the target writes it with p. So each step
    weighs as much as it counts for the length of a round, but not less than `LEAST_WEIGHT`.
    """
    num_real = reading.real_BP.sum()
    reach_BP, started_BP = reading.real_BP.float(), reading.real_BP.float()
    gradients, acceptance, tokens_per_round = [], [], 1.0
    for logits_BPW in logits:
        weights_BP = reach_BP.clamp(min=LEAST_WEIGHT) * started_BP / num_real
        step = step_gradient(
            reading.target_BPW.flatten(0, 1),
            logits_BPW.detach().flatten(0, 1),
            reading.places_BP.flatten(),
            weights_BP.flatten(),
            mix,
        )
        accepted_BP = step.acceptance_N.view_as(reach_BP)
        gradients.append(step.logits_NW.view_as(logits_BPW))
        acceptance.append(float((accepted_BP * reach_BP).sum() / reach_BP.sum()))
        tokens_per_round += float((accepted_BP * reach_BP).sum() / started_BP.sum())
        reach_BP = functional.pad(reach_BP * step.survival_N.view_as(reach_BP), (1, -1)) * reading.real_BP
        started_BP = functional.pad(started_BP, (1, -1)) * reading.real_BP
    return ChainGradients(gradients, acceptance, tokens_per_round)


def most_frequent(texts: list[list[list[int]]], count: int, vocabulary: int) -> Tensor:
    """Returns the ids of the most frequent tokens, rising; each list of texts counts alike."""
    shares_V = torch.zeros(vocabulary, dtype=torch.float64)
    for rows in texts:
        counts_V = torch.bincount(torch.tensor([i for row in rows for i in row]), minlength=vocabulary)
        shares_V += counts_V / counts_V.sum()
    return shares_V.topk(count).indices.sort().values


class Trainer:
    """The state of one training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.rng = random.Random(options.seed)
        self.tokenizer = load_tokenizer(options.target)
        files = corpus.text_files(options.text) if options.text else corpus.training_sources()
        self.sources = batches.SourceRows(self.tokenizer, files, options.seed)
        self.arithmetic = None if options.text else batches.ArithmeticRows(self.tokenizer, options.seed)
        self.ends = self.sources.row_ends
        own = generate.own_rows(self.sources, options)
        self.held_BT, self.own = torch.stack(own[:HELD_ROWS]).to(options.device), own[HELD_ROWS:]
        self.target = Target(options.target, options.device)
        tap_rms_C = self.target.taps(self.held_BT)[0].float().square().mean((0, 1)).sqrt()
        self.head = (load_head(options.start) if options.start else self._new_head()).to(options.device)
        self.head.scale_taps(tap_rms_C.clamp(min=0.01 * float(tap_rms_C.mean())))
        if not options.start:
            model = self.target.model
            self.head.start_from(model.model.norm.weight, model.get_output_embeddings().weight)
        self.optimiser = Optimisers(self.head, options.rate, 0.01)
        self.log = Log(options.scratch / "head.jsonl")
        parameters = sum(parameter.numel() for parameter in self.head.parameters())
        self.log.write(kind="start", own_rows=len(own), parameters=parameters)

    def _new_head(self) -> Head:
        written = [row[generate.PROMPT :].tolist() for row in self.own]
        drafted_W = most_frequent(
            [written, self.sources.files], self.options.vocabulary, self.target.model.config.vocab_size
        )
        return Head(self.target.head_config(self.options.intermediate), drafted_W)

    def rows(self, step: int) -> Tensor:
        """Returns the ids of one step: own text and sources, or a few long rows of sources."""
        if step % LONG_EVERY == LONG_EVERY - 1:
            return torch.tensor(self.sources.take(LONG_ROWS, LONG_LENGTH - 1))
        length, own = generate.LENGTH, self.rng.sample(self.own, self.options.own_rows)
        sums = self.arithmetic.take(ARITHMETIC_ROWS, length - 1)[0] if self.arithmetic else []
        rest = self.sources.take(ROWS - len(own) - len(sums), length - 1)
        return torch.cat((torch.stack(own), torch.tensor(rest + sums)))

    def _draft(self, ids_BT: Tensor, num_steps: int) -> tuple[Reading, list[Tensor]]:
        reading = self.target.read(ids_BT, self.head, self.ends.pad)
        with torch.autocast(self.options.device, torch.bfloat16):
            return reading, self.head.unroll(reading.taps_BPC, reading.embeddings_BPE, num_steps)

    def train_step(self, step: int, progress: float, factor: float) -> dict[str, float]:
        """Takes one step, over more drafted tokens and with more total variation as the run proceeds."""
        num_steps, mix = min(STEPS, 2 + int(6 * progress)), min(0.95, 0.3 + 0.8 * progress)
        reading, logits = self._draft(self.rows(step).to(self.options.device), num_steps)
        chains = chain_gradients(reading, logits, mix)
        torch.autograd.backward(logits, chains.logits)
        self.optimiser.step(factor)
        return chains.figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Saves the head, and drafts over the held rows."""
        save_head(self.head, self.options.out)
        return chain_gradients(*self._draft(self.held_BT, STEPS), 0.0).figures


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="the target's own text, and the log")
    parser.add_argument(
        "--out", type=Path, default=Path("llama_ssp/extensions/heads/shipped/tiny-eagle"), help="folder of the head"
    )
    parser.add_argument("--target", type=Path, default=Path("llama_ssp/shipped/tiny"), help="folder of the target")
    parser.add_argument("--text", type=Path, help="folder of text files to train on; default: Python's own sources")
    parser.add_argument("--start", type=Path, help="folder of a head to go on from")
    parser.add_argument("--minutes", type=float, default=26.0, help="of training")
    parser.add_argument("--own-minutes", type=float, default=12.0, help="of writing own text, where there is none")
    parser.add_argument("--own-rows", type=int, default=4, help="rows of own text among the 6 of a step")
    parser.add_argument("--vocabulary", type=int, default=2048, help="number of tokens that the head can draft")
    parser.add_argument("--intermediate", type=int, default=512, help="inner width of its feed-forward part")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak rate of Muon")
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = Trainer(options)
    run_by_the_clock(options.minutes, take_step=made.train_step, evaluate=made.evaluate, log=made.log, kind="held")


if __name__ == "__main__":
    main()
