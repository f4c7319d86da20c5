"""A GPT-NeoX and a GPT-Neo that know one text by heart, each in tokens of its own."""

from pathlib import Path

import torch

from tests.helpers.models import tiny_model
from tests.helpers.tokenizers import byte_level

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


def save_pair(folder: Path, *, num_steps: int = _STEPS) -> None:
    for part, family in (("target", "gpt_neox"), ("draft", "gpt_neo")):
        tokenizer = byte_level(_LEARNED[part], vocab_size=_VOCAB_SIZE, special=("<|endoftext|>",))
        model = tiny_model(
            family, vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=0, eos_token_id=0
        )
        ids_1T = torch.tensor([tokenizer(TEXT).input_ids])
        model.requires_grad_(requires_grad=True).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(ids_1T, labels=ids_1T).loss.backward()
                optimizer.step()
        model.eval().requires_grad_(requires_grad=False)
        model.save_pretrained(folder / part)
        tokenizer.save_pretrained(folder / part)
