"""Text of the target's own, for training the draft where it will be used.

What it does: lets the saved target continue prompts from the training sources at the drafting
temperature, and writes the rows as safetensors files until its minutes are spent.
What it does not do: train, or touch held-out text.
"""

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llama_ssp import load
from training import batches, corpus
from training.objectives import TEMPERATURE
from training.tokenizer import PAD_ID, load_tokenizer

LENGTH = 257
PROMPT = 48
FOLDER = "own"


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
    pair, pad_id = load(target, device=options.device), sources.row_ends.pad
    end, count = time.monotonic() + options.minutes * 60, 0
    while time.monotonic() < end:
        completions = pair.generate(
            sources.take(options.rows, PROMPT - 1),
            max_new_tokens=LENGTH - PROMPT,
            temperature=TEMPERATURE,
            seed=options.seed,
            batch_size=options.rows,
        )
        rows = [torch.tensor([*each.prompt_ids, *each.token_ids], dtype=torch.int32) for each in completions]
        filling = torch.full((LENGTH,), pad_id, dtype=torch.int32)  # so that a row is as long as can be
        rows_BT = pad_sequence([filling, *rows], batch_first=True, padding_value=pad_id)[1:]
        save_file({"rows_BT": rows_BT.contiguous()}, folder / f"{options.seed}-{count:04}.safetensors")
        count += 1


def own_rows(sources: batches.SourceRows, options: argparse.Namespace) -> list[Tensor]:
    """Reads the rows of the scratch folder, which the target writes first if there are none.

    Args:
        sources: Where the prompts come from.
        options: `target`, `scratch`, `own_minutes`, and what `write_rows` reads but `rows`.
    """
    if not load_rows(options.scratch, sources.row_ends.pad):
        writing = argparse.Namespace(**vars(options) | {"minutes": options.own_minutes, "rows": 96})
        write_rows(options.target, sources, options.scratch, writing)
    return load_rows(options.scratch, sources.row_ends.pad)


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
    target: Path = options.out / "tiny"
    sources = batches.SourceRows(load_tokenizer(target), corpus.training_sources(), options.seed)
    write_rows(target, sources, options.scratch, options)


if __name__ == "__main__":
    main()
