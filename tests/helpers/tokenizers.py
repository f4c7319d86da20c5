"""Tokenizers: of words for random models, where token i is written "ti", and of the two kinds that real models have."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer whose token 0 begins and token 1 ends a sequence."""
    words = {"<s>": 0, "</s>": 1} | {f"t{token}": token for token in range(2, vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def byte_level() -> PreTrainedTokenizerFast:
    """Like Llama 3's: a token is some bytes, and a space is one of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def return (n): the other world"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like Llama's first tokenizer: a space is a letter, unknown characters are bytes, the first space is dropped."""
    words = ["▁Hello", "▁world", "▁", "re", "turn", "n", "\n", "▁▁"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
