"""Trains a draft head of any kind of `speculators`, by the classes and losses of that package, for a frozen target.

What it does: lets the target write text of its own unless the scratch folder has some, gives a class of the package
what the package's program would (ids, and hidden states of the target), and saves the head as that program does.
What it does not do: use several GPUs, or read states that vLLM has written, as that program does; or measure tokens per
round (see `measure.py`).

The package (0.9.0, tested) lies in a folder of PYTHONPATH, with `loguru` alone of what it needs; see `docs/guides`.

Shapes: R rows, T tokens of a row, N tokens of a packed batch, X taps, E width.
"""

import argparse
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from training import batches, corpus, generate
from training.export import WEIGHTS
from training.head_model import tapped_layers
from training.tokenizer import load_tokenizer
from training.train import Log, run_by_the_clock

OF_PAIRS = {"eagle3", "peagle"}
LOSSES = {"eagle3": "kl_div", "peagle": "kl_div", "dflash": "ce", "dflash2": "kl_div", "dspark": "kl_div"}
"""The losses by kind; all are the package's own defaults."""
HELD_ROWS = 16


def class_of(kind: str) -> Any:  # noqa: ANN401 - of another package
    """Returns the package's class of a kind of head.

    Its classes take from the package's reader of data sets the name of a type alone, so that is all of it that is made.
    """
    reader = ModuleType("speculators.train.data")
    reader.__dict__["BatchType"] = dict
    sys.modules.setdefault(reader.__name__, reader)
    return import_module("speculators").SpeculatorModel.registry[kind]


class Target:
    """A frozen target, and what a head of a kind reads of it."""

    def __init__(self, folder: Path, kind: str, device: str, pad_id: int) -> None:
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.folder, self.kind, self.device, self.pad_id = folder, kind, device, pad_id
        self.layers = tapped_layers(self.model.config.num_hidden_layers)

    def new_head(self, *, num_layers: int, block_size: int) -> Any:  # noqa: ANN401 - of another package
        """Returns a head with random weights, and the target's embedding and output, which are not trained."""
        of_target, is_llama = self.model.config, self.kind in OF_PAIRS
        same = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "rope_parameters",
            "max_position_embeddings",
        )
        sizes = {name: value for name in same if (value := getattr(of_target, name, None)) is not None}
        of_layers = LlamaConfig if is_llama else Qwen3Config
        head = class_of(self.kind).from_training_args(
            of_layers(**sizes, num_hidden_layers=num_layers, tie_word_embeddings=False),
            verifier_name_or_path=str(self.folder),
            draft_vocab_size=of_target.vocab_size,
            target_layer_ids=list(self.layers),
            mask_token_id=self.pad_id,
            draft_attn_impl="eager",
            norm_before_residual=True,
            norm_before_fc=True,
            ttt_steps=block_size,
            num_depths=block_size,
            block_size=block_size,
        )
        return head.to(self.device)

    @torch.no_grad()
    def read(self, ids_RT: Tensor) -> dict[str, Tensor]:
        """Runs over rows and returns the arguments of a class: (1, N) and (1, N, X E) or (1, N, E)."""
        decoder, last = self.model.get_decoder(), list[Tensor]()
        hook = decoder.norm.register_forward_pre_hook(lambda _norm, args: last.append(args[0]))
        states = decoder(ids_RT, output_hidden_states=True, use_cache=False).hidden_states
        hook.remove()
        parts = {
            "input_ids": ids_RT,
            "loss_mask": ids_RT != self.pad_id,
            "verifier_last_hidden_states": last[0],
            "hidden_states": torch.cat([states[layer] for layer in self.layers], dim=-1),
            "position_ids": torch.arange(ids_RT.shape[1], device=ids_RT.device).expand_as(ids_RT),
            "document_ids": torch.arange(len(ids_RT), device=ids_RT.device)[:, None].expand_as(ids_RT),
        }
        if self.kind in OF_PAIRS:  # of taps and the token after them
            parts = {name: part[:, :-1] if name == "hidden_states" else part[:, 1:] for name, part in parts.items()}
        return {name: part.flatten(0, 1)[None] for name, part in parts.items()}


class Trainer:
    """The state of one training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options, self.rng = options, random.Random(options.seed)
        tokenizer = load_tokenizer(options.target)
        files = corpus.text_files(options.text) if options.text else corpus.training_sources()
        self.sources = batches.SourceRows(tokenizer, files, options.seed)
        own = generate.own_rows(self.sources, options)
        self.held_RT, self.own = torch.stack(own[:HELD_ROWS]), own[HELD_ROWS:]
        self.target = Target(options.target, options.kind, options.device, self.sources.row_ends.pad)
        self.head = self.target.new_head(num_layers=options.layers, block_size=options.block)
        if options.start:
            saved = load_file(options.start / WEIGHTS)  # which lacks what is the target's
            self.head.load_state_dict(saved, strict=False)
        self.how, _ = self.head.get_trainer_kwargs(
            loss_fn=LOSSES[options.kind],
            loss_implementation="eager",
            max_anchors=options.anchors,
            ttt_steps=options.block,
            ttt_step_loss_decay=1.0,
            num_depths=options.block,
            per_position_loss_weight="dpace" if options.kind == "dflash" else "fixed-exp-decay",
        )
        trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(trained, options.rate, weight_decay=0.01)
        self.log = Log(options.scratch / f"{options.kind}.jsonl")
        self.log.write(kind="start", own_rows=len(own), parameters=sum(parameter.numel() for parameter in trained))

    def _loss(self, ids_RT: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of rows, and the package's figures."""
        read = self.target.read(ids_RT.to(self.options.device))
        with torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.device != "cpu"):
            _, loss, found = self.head(**read, **self.how)
        totals = {name.removesuffix("_sum"): value for name, value in found.items() if name.endswith("_sum")}
        return loss, {name: float(value / found[f"{name}_total"]) for name, value in totals.items()}

    def train_step(self, _step: int, _progress: float, factor: float) -> dict[str, float]:
        """Takes one step on text of the target's own and on sources."""
        own = [row_T.tolist() for row_T in self.rng.sample(self.own, self.options.own_rows)]
        others = self.sources.take(self.options.rows - len(own), generate.LENGTH - 1)
        loss, figures = self._loss(torch.tensor([*own, *others]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * factor
        self.optimiser.step()
        self.optimiser.zero_grad()
        return figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Saves the head, and returns the figures of the held rows."""
        self.head.save_pretrained(self.options.out)
        return self._loss(self.held_RT)[1]


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(LOSSES), help="the kind of head")
    parser.add_argument("--scratch", type=Path, required=True, help="the target's own text, and the log")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--target", type=Path, default=Path("llama_ssp/shipped/tiny"), help="folder of the target")
    parser.add_argument("--text", type=Path, help="folder of text files to train on; default: Python's own sources")
    parser.add_argument("--start", type=Path, help="folder of a head to go on from, of the same sizes")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    parser.add_argument("--own-minutes", type=float, default=10.0, help="of writing own text, where there is none")
    parser.add_argument("--rows", type=int, default=6, help="rows of a step")
    parser.add_argument("--own-rows", type=int, default=4, help="rows of own text among them")
    parser.add_argument("--layers", type=int, default=1, help="layers of the head")
    parser.add_argument("--block", type=int, default=5, help="positions of a block, or drafted tokens of the others")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak rate of AdamW")
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = Trainer(options)
    run_by_the_clock(options.minutes, take_step=made.train_step, evaluate=made.evaluate, log=made.log, kind="held")


if __name__ == "__main__":
    main()
