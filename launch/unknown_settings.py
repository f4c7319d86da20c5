"""Sentences about settings that do not exist: similar ones, or what to use instead."""

from collections.abc import Collection

from llama_ssp.errors import similar_name

_FOREIGN = {
    "no_repeat_ngram_size": "it forbids every n-gram that the whole text has at each drafted position, which is not "
    "supported; sampling.repetition_penalty=1.1 or sampling.frequency_penalty=0.5 also make repetition rarer",
}
"""Settings of transformers that have no counterpart, and what to use instead."""


def unknown_setting(key: str, keys: Collection[str], *, otherwise: str) -> str:
    """Report an unknown setting with similar keys; without any, `otherwise` says where all keys are listed."""
    if reason := _FOREIGN.get(key.rpartition(".")[2]):
        return f"unknown setting {key!r}: {reason}"
    last_words = {name.rpartition(".")[2]: name for name in sorted(keys, key=len, reverse=True)}
    last_word = similar_name(key.rpartition(".")[2], last_words)
    close = dict.fromkeys(filter(None, [similar_name(key, keys), last_word and last_words[last_word]]))
    hint = f"did you mean {' or '.join(close)}?" if close else otherwise
    return f"unknown setting {key!r}: {hint}"
