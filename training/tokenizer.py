"""The tokenizer that both shipped models share: byte-level BPE of 4096 tokens.

What it does: trains it on the training sources and the seen multiplication lines, and saves it
so that `AutoTokenizer.from_pretrained(folder)` loads it. Every digit is a token of its own.
What it does not do: see a held-out source, or touch a model.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training import corpus

VOCABULARY = 4096
CONTEXT = 2048
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer on everything the models may see."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    texts = [source.text for source in corpus.training_sources()]
    core.train_from_iterator(texts + corpus.seen_product_lines(), trainer)
    begin = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads a saved tokenizer the way a user of the shipped models does."""
    loaded = AutoTokenizer.from_pretrained(folder)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise TypeError(f"{folder} does not hold a fast tokenizer")
    return loaded


def load_or_train(folder: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in the folder, training and saving it there when it is missing."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer().save_pretrained(folder)
    return load_tokenizer(folder)


@dataclass(frozen=True)
class Ends:
    """The ids that begin, end and fill up a row."""

    bos: int
    eos: int
    pad: int


def row_ends(tokenizer: PreTrainedTokenizerFast) -> Ends:
    """Returns them; a tokenizer that lacks one uses its end of sequence instead."""
    eos = tokenizer.eos_token_id
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    return Ends(eos if bos is None else bos, eos, eos if pad is None else pad)


def encode_plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encodes text without the beginning-of-sequence token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
