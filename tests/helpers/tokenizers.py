"""A word tokenizer for random models: token i is written "ti"."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer whose token 0 begins and token 1 ends a sequence."""
    words = {"<s>": 0, "</s>": 1} | {f"t{token}": token for token in range(2, vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
