"""Chooses the completions that a report shows, and splits their text by who chose each token."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from llama_ssp.engine.stream import IncrementalText
from llama_ssp.reports.records import SPECULATIVE, CompletionLine, Excerpt, Span

NUM_EXCERPTS = 3
"""Completions that a run keeps for its report."""
_MOST_PROMPT_CHARS, _MOST_TOKENS = 400, 512


def excerpts(
    lines: Sequence[CompletionLine],
    tokenizer: PreTrainedTokenizerBase,
    *,
    gains_of: Callable[[Sequence[int]], list[int]] | None = None,
) -> list[Excerpt]:
    """Return the first completions of the run, one a prompt; the speculative ones if there are any.

    `gains_of` makes the new tokens of each round from the accepted ones; without it a round adds one of the target's.
    """
    best = [line for line in lines if line.mode == SPECULATIVE] or lines
    chosen = sorted((line for line in best if not line.sample), key=lambda line: line.index)[:NUM_EXCERPTS]
    found = []
    for line in chosen:
        prompt = line.prompt[-_MOST_PROMPT_CHARS:]
        spans = list(_spans(line, tokenizer, prompt=prompt, gains_of=gains_of))
        found.append(Excerpt(index=line.index, sample=line.sample, mode=line.mode, prompt=prompt, spans=spans))
    return found


def _spans(
    line: CompletionLine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    gains_of: Callable[[Sequence[int]], list[int]] | None,
) -> Iterator[Span]:
    """Yield the text of a completion, at most its first tokens, with the tokens of each round told apart."""
    text = IncrementalText(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
    token_ids = line.token_ids[:_MOST_TOKENS]
    pieces = text.push(token_ids[:1])  # the prefill chose it
    begin = 1
    accepted_lengths = line.accepted_lengths or [0] * len(token_ids)
    gains = [num_accepted + 1 for num_accepted in accepted_lengths]
    if gains_of and line.accepted_lengths:
        gains = gains_of(accepted_lengths)
    for num_accepted, gain in zip(accepted_lengths, gains, strict=True):
        pieces += text.push(token_ids[begin : begin + gain], num_accepted=num_accepted)
        begin += gain
    for drafted, group in groupby([*pieces, *text.flush()], key=lambda piece: piece.accepted):
        yield Span(text="".join(piece.text for piece in group), drafted=drafted)
