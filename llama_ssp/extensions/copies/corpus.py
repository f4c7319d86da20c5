"""Reads the corpus that longer matches are copied from."""

import json

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from llama_ssp.catalogue import read_path
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.copies.records import NgramConfig


def read_corpus(draft: NgramConfig, tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """Encode the texts of `draft.corpus`, each with a token that ends it; returns the last tokens that have room.

    Raises ConfigError if the file is neither text in UTF-8 nor a run.jsonl.
    """
    most = draft.num_corpus_tokens
    if draft.corpus is None:
        return None
    file, ids = read_path(draft.corpus), list[int]()
    try:
        texts = [file.read_text(encoding="utf-8")]
        if file.suffix == ".jsonl":
            records = [json.loads(line) for line in texts[0].split("\n") if line.strip()]
            texts = [record["prompt"] + record["text"] for record in records]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"draft.corpus={draft.corpus} cannot be read ({type(error).__name__}: {error}): give the run.jsonl of a "
            "run, or a text in UTF-8"
        ) from None
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, tokenizer.eos_token_id or 0]
    return torch.tensor(ids[-most:])
