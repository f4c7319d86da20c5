"""Prompts are read line by line, become the ids that the model expects, and are refused where they leave no room."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llama_ssp.config.schema import (
    DrafterConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    VerificationConfig,
)
from llama_ssp.config.tasks.generate import GenerateConfig
from llama_ssp.errors import ConfigError
from llama_ssp.session.prompts import check_ids, encode, read_prompts

WORDS = ["<s>", "</s>", "<user>", "<assistant>", "a", "b"]
CHAT = (
    "<s> {% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, begins: bool = True, **options: str) -> PreTrainedTokenizerFast:
    """Words apart by blanks; `begins` puts the begin-of-sequence token before each text."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="</s>"))
    words.pre_tokenizer = WhitespaceSplit()
    if begins:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, **options)


def prompts_of(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    config: dict[str, Any] = {"draft": DrafterConfig(), "placement": PlacementConfig(), "sampling": SamplingConfig()}
    model, rule = ModelConfig(name="tiny"), VerificationConfig()
    return read_prompts(RunConfig(task=GenerateConfig(), model=model, verification=rule, prompts=str(file), **config))


def test_empty_lines_are_no_prompts_and_blanks_of_others_stay(tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", "def f(x):\n\n   \n    return\n") == ["def f(x):", "    return"]
    assert prompts_of(tmp_path / "p.jsonl", '{"prompt": "a\\nb"}\n\n{"prompt": "", "id": 1}\n') == ["a\nb", ""]


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_files_end_them_and_nowhere_else(end: str, begin: str, tmp_path: Path) -> None:
    assert prompts_of(tmp_path / "p.txt", f"{begin}a\x0cb{end}c\u2028d{end}") == ["a\x0cb", "c\u2028d"]
    lines = [f'{{"prompt": "{text}"}}' for text in ("a\u2028b", "c\u0085d")]
    assert prompts_of(tmp_path / "p.jsonl", begin + end.join(lines)) == ["a\u2028b", "c\u0085d"]


@pytest.mark.parametrize("line", ["no JSON", '"text"', '{"text": "a"}', '{"prompt": 1}'])
def test_a_line_that_is_no_record_is_named_by_its_number(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 4 of prompts=.*p\.jsonl must be a JSON object"):
        prompts_of(tmp_path / "p.jsonl", f'\n{{"prompt": "a"}}\n\n{line}\n')


def test_a_file_of_blanks_holds_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompt"):
        prompts_of(tmp_path / "p.txt", "\n  \n")


def test_what_a_user_says_begins_once_and_ends_where_the_assistant_speaks() -> None:
    assert encode("a b", tokenizer(chat_template=CHAT), chat=True) == (0, 2, 4, 5, 3)
    assert encode("a b", tokenizer(chat_template=CHAT), chat=False) == (0, 4, 5)


def test_chat_needs_a_template() -> None:
    with pytest.raises(ConfigError, match="leave chat out"):
        encode("a", tokenizer(), chat=True)


def test_an_empty_prompt_is_the_begin_of_a_sequence_where_there_is_one() -> None:
    assert encode("", tokenizer(begins=False, bos_token="<s>"), chat=False) == (0,)
    with pytest.raises(ConfigError, match="which this tokenizer lacks"):
        encode("", tokenizer(begins=False), chat=False)


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused() -> None:
    """As where a tokenizer was given a token for padding, and the model was not."""
    check_ids([1, 19], max_new_tokens=4, context=10, vocab_size=20, prompt="a")
    with pytest.raises(ConfigError, match="has token id 20, and the model knows 20 ids"):
        check_ids([1, 20, 3], max_new_tokens=4, context=10, vocab_size=20, prompt="a")


@pytest.mark.parametrize(
    ("num_tokens", "remedy"), [(7, "max_new_tokens=3 would fit"), (9, "=1 would fit"), (10, "has room for 9 at most")]
)
def test_a_prompt_that_leaves_no_room_is_told_with_what_would_fit(num_tokens: int, remedy: str) -> None:
    check_ids(range(6), max_new_tokens=4, context=10, vocab_size=20, prompt="a")
    with pytest.raises(ConfigError, match=f"has {num_tokens} tokens.*{remedy}"):
        check_ids(range(num_tokens), max_new_tokens=4, context=10, vocab_size=20, prompt="a")
