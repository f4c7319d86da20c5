"""Measures a draft head: tokens per round on held-out text, next to those of a draft model.

What it does: runs the plain speculative sampler of `measure.py` with the head in the place of the draft, on prompts
cut from held-out sources, for several numbers of drafted tokens, and prints JSON. With `--draft` a draft model
for the same target goes over the same prompts.
What it does not do: train, time anything, or use the runner of this repository.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training import batches, corpus, measure
from training.head_model import Cache, Head, load_head, tapped_layers
from training.tokenizer import load_tokenizer


class Tapped(measure.Cached):
    """A target that keeps what the head reads of it."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__(model, temperature)
        self.taps_TC = torch.empty(0)
        self.layers = tapped_layers(model.config.num_hidden_layers)

    def probabilities(self, ids: list[int]) -> Tensor:
        """Feeds what the cache lacks and returns the distributions after each fed token."""
        inputs: dict[int, Tensor] = {}
        hooks = [
            self.model.model.layers[layer].register_forward_pre_hook(
                lambda _, args, layer=layer: inputs.update({layer: args[0][0]})
            )
            for layer in self.layers
        ]
        probabilities_TV = super().probabilities(ids)
        for hook in hooks:
            hook.remove()
        new_TC = torch.cat([inputs[layer] for layer in self.layers], dim=-1)
        self.taps_TC = torch.cat((self.taps_TC, new_TC)) if len(self.taps_TC) else new_TC
        return probabilities_TV

    def keep(self, length: int) -> None:
        """Forgets everything after the first `length` tokens."""
        super().keep(length)
        self.taps_TC = self.taps_TC[:length]


class HeadDrafter:
    """The head as a drafter: pairs with taps where the target has been, then its own states."""

    def __init__(self, head: Head, target: Tapped) -> None:
        self.head, self.target = head, target
        self.cache, self.num_pairs, self.num_tapped = Cache(), 0, 0
        self.last_BPE = torch.empty(0)

    def probabilities(self, ids: list[int]) -> Tensor:
        """Returns the distribution after these tokens, over the target's vocabulary."""
        if not len(self.target.taps_TC):
            self.target.probabilities(ids[:-1])
        known = min(len(self.target.taps_TC), len(ids) - 1)
        if self.num_pairs < known:
            self._extend(self.head.features(self.target.taps_TC[None, self.num_pairs : known]), ids)
            self.num_tapped = known
        while self.num_pairs < len(ids) - 1:
            self._extend(self.last_BPE, ids)
        logits_W = self.head.logits(self.last_BPE)[0, 0]
        q_V = torch.zeros(len(self.head.get_buffer("t2d")))
        if self.target.temperature == 0.0:
            q_V[self.head.drafted_ids()[logits_W.argmax()]] = 1.0
        else:
            q_V[self.head.drafted_ids()] = (logits_W / self.target.temperature).softmax(-1)
        return q_V[None]

    def _extend(self, f_BPE: Tensor, ids: list[int]) -> None:
        """Adds the next pairs and keeps the last one's state."""
        last = self.num_pairs + f_BPE.shape[1]
        embed = self.target.model.get_input_embeddings()
        embeddings_BPE = embed(torch.tensor([ids[self.num_pairs + 1 : last + 1]]))
        self.last_BPE = self.head.states(f_BPE, embeddings_BPE, self.num_pairs, self.cache)[:, -1:]
        self.num_pairs = last

    def keep(self, length: int) -> None:
        """Forgets the pairs whose states were its own, accepted or not: the target has their taps now."""
        self.num_pairs = min(self.num_tapped, length)
        self.cache.keep(self.num_pairs)


class HeadPair:
    """A target and its head."""

    def __init__(self, target: PreTrainedModel, head: Head) -> None:
        self.target, self.head = target, head

    def begin(self, temperature: float) -> tuple[measure.Cached, measure.Drafter]:
        """Returns both without a token in their caches."""
        target = Tapped(self.target, temperature)
        return target, HeadDrafter(self.head, target)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, default=Path("llama_ssp/shipped/tiny-eagle"), help="folder of the head")
    parser.add_argument("--target", type=Path, default=Path("llama_ssp/shipped/tiny"), help="folder of the target")
    parser.add_argument("--draft", type=Path, help="folder of a draft model to compare it with")
    parser.add_argument("--text", type=Path, help="folder of held-out text files; default: Python's held-out sources")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--drafted", type=int, nargs="+", default=[4], help="drafted tokens per round")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    files = corpus.text_files(options.text) if options.text else corpus.heldout_sources()
    rows = batches.SourceRows(load_tokenizer(options.target), files, seed=3)
    prompts = rows.take(options.prompts, measure.PROMPT - 1)
    target = measure.load(options.target)
    drafting: dict[str, measure.Drafting] = {"head": HeadPair(target, load_head(options.head))}
    if options.draft:
        drafting["draft"] = measure.Pair(target, measure.load(options.draft))
    for num_drafted in options.drafted:
        for name, pair in drafting.items():
            torch.manual_seed(0)
            scores = measure.tokens_per_round(
                pair,
                prompts,
                options.temperature,
                options.length,
                num_drafted=num_drafted,
                eos_id=rows.row_ends.eos,
            )
            print(json.dumps({"drafter": name, "drafted_per_round": num_drafted, **scores}), flush=True)


if __name__ == "__main__":
    main()
