"""A GPT-NeoX and a GPT-Neo that know one text by heart, each in tokens of its own."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.helpers.models import tiny_model

PROMPT = "Difference between a gasoline and hybrid vehicles is"
TEXT = (
    f"{PROMPT} how they move. A gasoline vehicle burns its fuel in an engine, and a hybrid vehicle has an electric "
    "motor besides the engine. The motor works alone when the vehicle moves slowly, and helps the engine when it "
    "climbs. The battery of a hybrid fills while the vehicle brakes, so that it needs less gasoline in a city. On "
    "long roads both kinds of vehicles need about the same. Naïve drivers — and there are many — overlook this.\n"
)
_OTHER = "An engineer measures a motor; other engineers measure batteries. Both burn for their work, and both are slow."
_LEARNED = {"target": (TEXT,), "draft": (_OTHER, TEXT)}
"""What each tokenizer is trained on, so that the two share most words, under other ids."""
_VOCAB_SIZE = 440
_STEPS = 30


def byte_level_of(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's, trained on some texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def save_pair(folder: Path) -> None:
    """Save the pair into `folder/target` and `folder/draft`."""
    for part, family in (("target", "gpt_neox"), ("draft", "gpt_neo")):
        tokenizer = byte_level_of(_LEARNED[part], vocab_size=_VOCAB_SIZE)
        model = tiny_model(
            family, vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=0, eos_token_id=0
        )
        ids_1T = torch.tensor([tokenizer(TEXT).input_ids])
        model.requires_grad_(requires_grad=True).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(_STEPS):
                optimizer.zero_grad()
                model(ids_1T, labels=ids_1T).loss.backward()
                optimizer.step()
        model.eval().requires_grad_(requires_grad=False)
        model.save_pretrained(folder / part)
        tokenizer.save_pretrained(folder / part)
