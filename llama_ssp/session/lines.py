"""Converts a finished completion to a line of `run.jsonl`."""

from transformers import PreTrainedTokenizerBase

from llama_ssp.continuation import decode_after
from llama_ssp.engine.completion import RowCompletion
from llama_ssp.reports.records import CompletionLine
from llama_ssp.session.prompt_records import Prompt


def to_line(
    prompt: Prompt,
    completion: RowCompletion,
    mode: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_copies: int,
    adapts: bool = False,
) -> CompletionLine:
    """Convert a finished completion to a line of `run.jsonl`.

    `num_copies` replicas share the wall time; if the run `adapts`, each round has a K of its own.
    """
    parts_s = completion.part_s
    return CompletionLine(
        index=completion.request.index, sample=completion.request.sample, mode=mode, prompt=prompt.text,
        text=decode_after(tokenizer, completion.request.prompt_ids, completion.token_ids),
        token_ids=completion.token_ids, num_new_tokens=len(completion.token_ids),
        finish_reason=str(completion.finish_reason),
        num_rounds=len(completion.accepted_lengths), num_target_forwards=completion.num_target_forwards,
        accepted_lengths=completion.accepted_lengths, examined_lengths=completion.examined_lengths,
        ms=completion.busy_s * 1e3, share_s=completion.share_s / num_copies,
        draft_s=parts_s["draft"], verify_s=parts_s["verify"], other_s=parts_s["other"],
        draft_lengths=completion.draft_lengths if adapts else None,
        turn=len(prompt.earlier), question_id=prompt.question_id, category=prompt.category,
        messages=None if prompt.messages is None else [*prompt.messages], fields=dict(prompt.fields),
        first_token_ms=completion.first_token_s * 1e3,
    )  # fmt: skip
