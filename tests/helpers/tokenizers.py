"""Tokenizers: of words for random models, where token i is written "ti", and of the layouts that real models have."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

_SOME_TEXTS = ("def return (n): the other world",) * 3
_SPECIAL_AND_BYTES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def save_tokenizer(folder: Path, vocab_size: int, *, first: int = 2) -> None:
    """Save a tokenizer whose token 0 begins and token 1 ends a sequence, and whose token 2 is the word `t{first}`."""
    words = {"<s>": 0, "</s>": 1} | {f"t{token + first - 2}": token for token in range(2, vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"t{first}"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def byte_level(
    texts: Iterable[str] = _SOME_TEXTS, *, vocab_size: int = 300, special: tuple[str, ...] = ("<s>", "</s>")
) -> PreTrainedTokenizerFast:
    """Like those of Llama 3 and GPT-2: a token is some bytes, and a space is one of them.

    The first and the last of the special tokens begin and end a sequence.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[-1])


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like Llama's first tokenizer: a space is a letter, unknown characters are bytes, the first space is dropped."""
    words = ["▁Hello", "▁world", "▁", "re", "turn", "n", "\n", "▁▁"]
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL_AND_BYTES, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = _stripping()
    return _beginning(tokenizer)


def _stripping() -> decoders.Decoder:
    """A decoder that drops one space at the beginning."""
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _beginning(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With a token that begins a sequence."""
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def layout(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with words and merges, laid out as the real ones: a name of `LAYOUTS`."""
    if name == "bytes":
        return byte_level()
    vocabulary, merges = _pieces()
    of_gemma: Any = GemmaTokenizer  # its own types call merges texts
    if name == "llama":
        return LlamaTokenizer(vocabulary, merges)
    if name == "gemma":
        return cast("PreTrainedTokenizerFast", of_gemma(vocabulary, merges))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if name == "llama_files":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = _stripping()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    return _beginning(tokenizer)


LAYOUTS = {
    "llama": "the class of transformers for Llama 1 and 2: Metaspace, a decoder that strips one space",
    "llama_files": "tokenizer.json of Llama 1 and 2: a normalizer that prepends a space, the same decoder",
    "metaspace": "Metaspace on both sides, without bytes",
    "gemma": "SentencePiece without the space at the beginning",
    "bytes": "Llama 3, GPT-2: bytes",
}


@cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of the SentencePiece layouts, with a token for each byte."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # no merge joins two words
    trained.train_from_iterator(["if x is not None : return the world"] * 3, BpeTrainer(show_progress=False))
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    words = sorted(model["vocab"], key=model["vocab"].get)
    return {token: number for number, token in enumerate([*_SPECIAL_AND_BYTES, *words])}, merges
