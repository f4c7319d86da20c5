"""Text of the target's own, for training the draft where it will be used.

What it does: lets the saved target continue prompts from the training sources at the drafting
temperature, and writes the rows as safetensors files until its minutes are spent.
What it does not do: train, or touch held-out text.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from training import batches, corpus, objectives
from training.tokenizer import PAD_ID, Ends, load_tokenizer

LENGTH = 257
PROMPT = 48
FOLDER = "own"


@torch.no_grad()
def continue_prompts(folder: Path, prompts_BT: Tensor, length: int, ends: Ends, device: str = "cpu") -> Tensor:
    """Samples the target's continuation of prompts at the drafting temperature.

    Args:
        folder: The saved target.
        prompts_BT: Prompts of one length.
        length: Length of the rows to return.
        ends: The ids that end a row and fill it up.
        device: Where the target runs.

    Returns:
        Rows of shape (B, length), padded after an end of sequence.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(device)
    prompts_BT = prompts_BT.to(device)
    rows_BT: Tensor = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=length - prompts_BT.shape[1],
        do_sample=True,
        temperature=objectives.TEMPERATURE,
        top_k=0,
        top_p=1.0,
        eos_token_id=ends.eos,
        pad_token_id=ends.pad,
    )
    missing = length - rows_BT.shape[1]
    return torch.nn.functional.pad(rows_BT, (0, missing), value=ends.pad).cpu()


def load_rows(scratch: Path, pad_id: int = PAD_ID) -> list[Tensor]:
    """Reads every row written so far, without the ones that ended early."""
    rows: list[Tensor] = []
    for file in sorted((scratch / FOLDER).glob("*.safetensors")):
        rows_BT = load_file(file)["rows_BT"].long()
        rows.extend(rows_BT[(rows_BT != pad_id).sum(1) > LENGTH // 4])
    return rows


def write_rows(target: Path, sources: batches.SourceRows, scratch: Path, options: argparse.Namespace) -> None:
    """Writes continuations of prompts from the sources until the minutes are spent.

    Args:
        target: The saved target.
        sources: Where the prompts come from.
        scratch: Where the rows go.
        options: `minutes`, `rows` at a time, `device`, and `seed`, which names the files.
    """
    folder = scratch / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    end, count = time.monotonic() + options.minutes * 60, 0
    while time.monotonic() < end:
        prompts_BT = torch.tensor(sources.take(options.rows, PROMPT - 1))
        rows_BT = continue_prompts(target, prompts_BT, LENGTH, sources.row_ends, options.device)
        save_file({"rows_BT": rows_BT.to(torch.int32)}, folder / f"{options.seed}-{count:04}.safetensors")
        count += 1


def main() -> None:
    """Generates until the minutes are spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="where the rows go")
    parser.add_argument("--out", type=Path, required=True, help="the pair, as shipped")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=96, help="prompts at a time")
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target: Path = options.out / "tiny"
    sources = batches.SourceRows(load_tokenizer(target), corpus.training_sources(), options.seed)
    write_rows(target, sources, options.scratch, options)


if __name__ == "__main__":
    main()
