"""Prompts are read line by line, become the ids that the model expects, and are refused where they leave no room."""

import json
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
    TaskConfig,
    VerificationConfig,
)
from llama_ssp.config.tasks.benchmark import BenchmarkConfig
from llama_ssp.config.tasks.generate import GenerateConfig
from llama_ssp.errors import ConfigError
from llama_ssp.session.prompt_records import Prompt
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


def prompts_of(file: Path, text: str, task: TaskConfig | None = None) -> list[Prompt]:
    file.write_text(text, encoding="utf-8")
    config: dict[str, Any] = {"draft": DrafterConfig(), "placement": PlacementConfig(), "sampling": SamplingConfig()}
    model, rule = ModelConfig(name="tiny"), VerificationConfig()
    run = RunConfig(task=task or GenerateConfig(), model=model, verification=rule, prompts=str(file), **config)
    return read_prompts(run)


def texts_of(file: Path, text: str) -> list[str]:
    return [prompt.text for prompt in prompts_of(file, text)]


def test_empty_lines_are_no_prompts_and_blanks_of_others_stay(tmp_path: Path) -> None:
    assert texts_of(tmp_path / "p.txt", "def f(x):\n\n   \n    return\n") == ["def f(x):", "    return"]
    assert texts_of(tmp_path / "p.jsonl", '{"prompt": "a\\nb"}\n\n{"prompt": "", "id": 1}\n') == ["a\nb", ""]


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_files_end_them_and_nowhere_else(end: str, begin: str, tmp_path: Path) -> None:
    assert texts_of(tmp_path / "p.txt", f"{begin}a\x0cb{end}c\u2028d{end}") == ["a\x0cb", "c\u2028d"]
    lines = [f'{{"prompt": "{text}"}}' for text in ("a\u2028b", "c\u0085d")]
    assert texts_of(tmp_path / "p.jsonl", begin + end.join(lines)) == ["a\u2028b", "c\u0085d"]


QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite.", "Stop."]}


def test_each_turn_of_a_question_is_a_prompt_with_those_before_it(tmp_path: Path) -> None:
    """As in Spec-Bench's question.jsonl, which has ids as numbers."""
    lines = [json.dumps(QUESTION), '{"prompt": "alone", "category": "x"}', '{"turns": ["one"], "question_id": "a1"}']
    found = prompts_of(tmp_path / "p.jsonl", "\n".join(lines))
    named: dict[str, Any] = {"question_id": "81", "category": "writing"}
    assert found == [
        Prompt(text="Write.", **named),
        Prompt(text="Rewrite.", earlier=("Write.",), **named),
        Prompt(text="Stop.", earlier=("Write.", "Rewrite."), **named),
        Prompt(text="alone", category="x"),
        Prompt(text="one", question_id="a1"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"turns": "a"}', "with a list of one or more texts as `turns`"),
        ('{"turns": []}', "with a list of one or more texts as `turns`"),
        ('{"turns": ["a", 1]}', "with a list of one or more texts as `turns`"),
        ('{"turns": ["a"], "prompt": "a"}', "has both `prompt` and `turns`: give one of them"),
    ],
)
def test_a_conversation_that_is_none_is_named_by_its_line(line: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts_of(tmp_path / "p.jsonl", f'{{"prompt": "a"}}\n{line}\n')
    assert f"line 2 of prompts={tmp_path / 'p.jsonl'}" in str(caught.value)
    assert reason in str(caught.value)


def test_a_task_that_cuts_its_prompts_takes_no_conversations(tmp_path: Path) -> None:
    task = BenchmarkConfig()
    assert prompts_of(tmp_path / "p.jsonl", '{"turns": ["a"]}', task) == [Prompt(text="a")]
    with pytest.raises(ConfigError, match="task=benchmark takes prompts of one turn"):
        prompts_of(tmp_path / "p.jsonl", '{"turns": ["a", "b"]}', task)


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


def test_a_later_turn_follows_the_answers_to_earlier_ones() -> None:
    """In the template as messages in turn, whose roles alternate; else as the text was written, line by line."""
    roles = CHAT.replace("<user>", "{{ '<user>' if m.role == 'user' else '<assistant>' }}")
    earlier = [("a", "b b"), ("b", "a")]
    assert encode("a a", tokenizer(chat_template=roles), chat=True, earlier=earlier) == (
        0, 2, 4, 3, 5, 5, 2, 5, 3, 4, 2, 4, 4, 3,
    )  # fmt: skip
    lines = tokenizer().decode([*encode("a a", tokenizer(), chat=False, earlier=[("a ", "b b"), ("b ", "a")])])
    assert lines == "<s> a b b b a a a"


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


def test_a_later_turn_leaves_room_for_the_answers_before_it() -> None:
    check_ids(range(4), max_new_tokens=2, context=10, vocab_size=20, prompt="a", num_answers=2)
    with pytest.raises(ConfigError, match=r"max_new_tokens=3 for each of 3 answers that is more.*=2 would fit"):
        check_ids(range(4), max_new_tokens=3, context=10, vocab_size=20, prompt="a", num_answers=2)
    with pytest.raises(ConfigError, match="has room for 7 at most"):
        check_ids(range(8), max_new_tokens=3, context=10, vocab_size=20, prompt="a", num_answers=2)
