"""Prompts that leave no room for their new tokens: refused by their lines, left out, or cut. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama_ssp.architectures.model_files import TOKENIZER_FILE
from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import ModelConfig, read_path
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.run.prompts import Prompt, read_prompts
from llama_ssp.settings.schema import RunConfig, TooLong

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 3
_MOST_COUNTED = 2**24  # Characters of all prompts, seconds of a tokenizer.
_MOST_NAMED = 5
_SPECIAL_TOKENS = 8


def problem_of_length(
    prompt: Prompt, num_tokens: int, *, max_new_tokens: int, context: int, num_answers: int = 0
) -> str | None:
    """Return why a prompt does not fit into the target's context; None if it does.

    `num_answers` answers to earlier turns will be put before it, each of up to `max_new_tokens` tokens.
    """
    num_texts = num_answers + 1
    if num_tokens + num_texts * max_new_tokens <= context:
        return None
    room = (context - num_tokens) // num_texts
    remedy = f"max_new_tokens={room} would fit"
    if room <= 0:
        new = max_new_tokens if num_texts * max_new_tokens < context else 1
        remedy = f"with max_new_tokens={new} a prompt has room for {context - num_texts * new} at most"
    if prompt.place:
        remedy += ", too_long=skip leaves it out, and too_long=truncate keeps its end"
    counted = f" for each of {num_texts} answers" if num_answers else ""
    return (
        f"{prompt.called} has {num_tokens} tokens, and with max_new_tokens={max_new_tokens}{counted} that is more than "
        f"the context of {context}; {remedy}"
    )


def refuse(problems: Sequence[tuple[Prompt, str]]) -> None:
    """Raise ConfigError for the first of some prompts that do not fit, with the places of the others."""
    if problems:
        others = f"; too long as well: {named([prompt for prompt, _ in problems[1:]])}" if problems[1:] else ""
        raise ConfigError(f"{problems[0][1]}{others}")


def named(prompts: Sequence[Prompt]) -> str:
    """Name the first few prompts, and say how many more there are."""
    more = f" and {len(prompts) - _MOST_NAMED} more" if len(prompts) > _MOST_NAMED else ""
    return ", ".join(prompt.called for prompt in prompts[:_MOST_NAMED]) + more


def count_tokens(config: RunConfig, prompts: Sequence[Prompt]) -> list[int] | None:
    """The tokens of each prompt, by the target's tokenizer; None without it, and where templates add to the texts."""
    has_templates = config.chat or not config.reads_files or any(prompt.messages is not None for prompt in prompts)
    is_long = sum(prompt.num_characters for prompt in prompts) > _MOST_COUNTED
    tokenizer = None if has_templates or is_long else _tokenizer(config.model)
    if tokenizer is None:
        return None
    return [len(tokenizer.encode("".join((*prompt.earlier, prompt.text)))) for prompt in prompts]


def check_lengths(config: RunConfig) -> str | None:
    """Refuse prompts whose own text is too long for the target before a rank starts, where its files are here.

    `requests` counts the tokens that templates and answers add. Returns a sentence where prompts may be too long and
    nothing here counts their tokens. Raises ConfigError, and as `read_prompts`.
    """
    # A pipe can be read once only.
    is_known = config.prompt is not None or (config.prompts is not None and Path(config.prompts).is_file())
    if not is_known or config.too_long is not TooLong.refuse or not config.reads_files:
        return None
    prompts = read_prompts(config)
    try:
        shape = config.model.shape or (
            read_config(read_path(config.model.path), describes=False)[0] if config.model.path else None
        )
    except CheckpointError:  # found again, with its remedy, where the model is read
        return None
    context = shape.max_position_embeddings if shape else 0
    room = context - config.max_new_tokens - _SPECIAL_TOKENS
    # A token has at least a byte.
    long = [prompt for prompt in prompts if len(prompt.text.encode(errors="replace")) > room]
    if not long or not shape:
        return None
    tokenizer = _tokenizer(config.model)
    if tokenizer is None:
        return (
            f"the run refuses prompts of more than {context - config.max_new_tokens} tokens, and without a tokenizer "
            f"here {named(long)} may have more"
        )
    problems = []
    for prompt in long:
        num_tokens = len(tokenizer.encode(prompt.text, add_special_tokens=False))
        if problem := problem_of_length(
            prompt, num_tokens, max_new_tokens=config.max_new_tokens, context=context, num_answers=len(prompt.earlier)
        ):
            problems.append((prompt, problem))
    refuse(problems)
    return None


def _tokenizer(model: ModelConfig) -> "Tokenizer | None":
    from tokenizers import Tokenizer

    from llama_ssp.weights import hub

    try:
        folder = hub.folder_here(model)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE)) if folder else None
    except Exception:  # noqa: BLE001 - of any kind: a faulty file is refused where it is read
        return None
    if tokenizer:
        tokenizer.no_truncation()
    return tokenizer
