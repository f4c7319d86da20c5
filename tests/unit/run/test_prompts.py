"""Prompts are read, and become the ids that the model expects and the requests of a run, or are refused."""

import json
import re
import sys
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import ConfigError
from llama_ssp.run.lengths import problem_of_length
from llama_ssp.run.prompts import Prompt, read_prompts
from llama_ssp.run.requests import PromptRequest, RequestMaker, check_vocabulary, encode, ids_of, in_turns
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.schema import DrafterConfig, RunConfig
from tests.helpers.tokenizers import byte_level

WORDS = ["<s>", "</s>", "<user>", "<assistant>", "a", "b"]
CHAT = (
    "<s> {% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROLES = CHAT.replace("<user>", "{{ '<user>' if m.role == 'user' else '<assistant>' }}")


def tokenizer(*, begins: bool = True, **options: str) -> PreTrainedTokenizerFast:
    """Words apart by blanks; `begins` puts the begin-of-sequence token before each text."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="</s>"))
    words.pre_tokenizer = WhitespaceSplit()
    if begins:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, **options)


def prompts_of(file: Path, text: str, *, column: str | None = None) -> list[Prompt]:
    file.write_text(text, encoding="utf-8")
    run = RunConfig(task=GenerateConfig(), model=ModelConfig(name="tiny"), draft=DrafterConfig(), prompts=str(file))
    run.prompts_column = column
    return read_prompts(run)


def texts_of(file: Path, text: str, *, column: str | None = None) -> list[str]:
    return [prompt.text for prompt in prompts_of(file, text, column=column)]


@pytest.mark.parametrize(("begin", "end"), [("", "\n"), ("\ufeff", "\r\n")])
def test_a_line_ends_where_files_end_them_and_empty_ones_are_no_prompts(end: str, begin: str, tmp_path: Path) -> None:
    text = f"{begin}a\x0cb{end}{end}   {end}  c\u2028d{end}"
    assert texts_of(tmp_path / "p.txt", text) == ["a\x0cb", "  c\u2028d"]
    lines = [f'{{"prompt": "{text}"}}' for text in ("a\u2028b", "c\u0085d", "")]
    assert texts_of(tmp_path / "p.jsonl", begin + f"{end}{end}".join(lines)) == ["a\u2028b", "c\u0085d", ""]


QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite.", "Stop."]}


def test_each_turn_of_a_question_is_a_prompt_with_those_before_it(tmp_path: Path) -> None:
    """As in Spec-Bench's question.jsonl, which has ids as numbers."""
    lines = [json.dumps(QUESTION), '{"prompt": "alone", "category": "x"}', '{"turns": ["one"], "question_id": "a1"}']
    found = prompts_of(tmp_path / "p.jsonl", "\n".join(lines))
    named: dict[str, Any] = {"question_id": "81", "category": "writing"}
    assert found == [
        Prompt(text="Write.", **named),
        Prompt(text="Rewrite.", earlier=["Write."], **named),
        Prompt(text="Stop.", earlier=["Write.", "Rewrite."], **named),
        Prompt(text="alone", category="x"),
        Prompt(text="one", question_id="a1"),
    ]


SYSTEM, ASK, MORE = ({"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "b")))
SAID = {"role": "assistant", "content": "b b"}
TURNS = "must be an entry with a list of one or more texts as `turns`"
MESSAGES = "must be an entry with a list as `messages` that ends with a user's or an assistant's"
TABLES = {
    ".csv": 'id,question,prompt\n7,"one, two","def f(x):\n    return"\n8,three,import\n',
    ".tsv": 'id\tquestion\tprompt\n7\tone, two\t"def f(x):\n    return"\n8\tthree\timport\n',
    ".json": '[{"id": "7", "question": "one, two", "prompt": "def f(x):\\n    return"},\n'
    ' {"id": "8", "question": "three", "prompt": "import"}]',
    ".jsonl": '{"id": "7", "question": "one, two", "prompt": "def f(x):\\n    return"}\n'
    '{"id": "8", "question": "three", "prompt": "import"}\n',
}


@pytest.mark.parametrize("ending", TABLES)
def test_a_table_is_read_by_its_columns_and_keeps_the_others(ending: str, tmp_path: Path) -> None:
    file, begin = tmp_path / f"p{ending.upper() if ending == '.csv' else ending}", "\ufeff" * (ending == ".tsv")
    assert prompts_of(file, begin + TABLES[ending]) == [
        Prompt(text="def f(x):\n    return", fields={"id": "7", "question": "one, two"}),
        Prompt(text="import", fields={"id": "8", "question": "three"}),
    ]
    assert texts_of(file, begin + TABLES[ending], column="question") == ["one, two", "three"]
    if ending == ".json":
        assert texts_of(file, '["a", "b\\nc"]') == ["a", "b\nc"]
    if ending == ".csv":
        assert texts_of(file, f"prompt\n{'a ' * 10**5}\n") == ["a " * 10**5], "as long as a context"


def test_some_records_are_taken_by_their_number_and_their_category(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    records = [("math", ["a", "b"]), ("math", ["c"]), (None, ["d"]), ("code", ["e"]), ("math", ["f"])]
    file.write_text("".join(json.dumps({"category": name, "turns": turns}) + "\n" for name, turns in records))

    def taken(**settings: Any) -> str:
        run = RunConfig(task=GenerateConfig(), model=ModelConfig(name="tiny"), draft=DrafterConfig(), prompts=str(file))
        return "".join(prompt.text for prompt in read_prompts(replace(run, **settings)))

    assert (taken(num_prompts=2), taken(category="math")) == ("abc", "abcf")
    assert (taken(category="math", num_prompts=2), taken(num_prompts=9)) == ("abc", "abcdef")
    with pytest.raises(ConfigError, match=r"has no category=maths: it has code, math$"):
        taken(category="maths")


@pytest.mark.parametrize(
    ("name", "text", "column", "sentence"),
    [
        ("p.csv", "id,question\n1,a b\n", None, r"has id, question: prompts_column=question takes"),
        ("p.csv", "id,question\n1,a\n", "quest", r"has no prompts_column=quest: it has id, question"),
        ("p.csv", "id,prompt\n1,a,b\n", None, r"line 2 of .* number of cells .* columns id, prompt: quote cells"),
        ("p.csv", 'id,prompt\n1,"a\n', None, r"line 2 of .* is not CSV"),
        ("p.csv", "", None, "holds no prompt$"),
        ("p.json", '["a", "b"]', "question", r"entry 1 of .* is a text, which has no prompts_column=question: leave"),
        ("p.jsonl", '{"prompt": "a", "messages": []}', None, "both `prompt` and `messages`: .* prompts_column=prompt"),
        ("p.json", '{"prompt": "a"}', None, r"holds an object: it must be a list such as"),
        ("p.json", '{"prompt": "a"}\n{"prompt": "b"}\n', None, r"is not JSON .* one object per line is a .jsonl file"),
        ("p.json", '[{"prompt": "a"}, 3]', None, r"entry 2 of .* must be an object or a text, and not a number"),
        ("p.jsonl", '{"prompt": "a", "x": 1e999}', None, r"line 1 of .* has a field `x` that is infinite"),
        ("p.jsonl", '{"prompt": "a", "x": ' + "[" * 40 + "]" * 40 + "}", None, "has a field `x` .* nested too deep"),
        ("p.txt", "\n  \n", None, "holds no prompt"),
        *(
            ("p.jsonl", f'\n{{"prompt": "a"}}\n\n{line}\n', None, rf"line 4 of prompts=.*p\.jsonl {reason}")
            for line, reason in (
                ("no JSON", "must be a JSON object: it cannot"),
                ('"text"', "must be a JSON object, and not a text"),
                ('{"text": "a"}', "must be an entry with `prompt`"),
                ('{"prompt": 1}', "must be an entry with a text as `prompt`"),
                ('{"turns": []}', TURNS),
                ('{"turns": ["a", 1]}', TURNS),
                ('{"turns": ["a"], "prompt": "a"}', "has both `prompt` and `turns`: give one of them"),
                ('{"messages": ["a"]}', MESSAGES),
                ('{"messages": [{"role": "user"}]}', MESSAGES),
                ('{"messages": [{"role": "user", "content": ["a"]}]}', MESSAGES),
                (json.dumps({"messages": [ASK, SYSTEM]}), MESSAGES),
            )
        ),
        ("p.docx", "PK", None, r"\.docx is none of \.txt \(a prompt per line\), \.jsonl, .*convert it"),
        ("p.xlsx", "PK", None, r"\.xlsx is none of \.txt \(a prompt per line\), \.jsonl, .*convert it"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place_and_never_taken_for_lines(
    name: str, text: str, column: str | None, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        prompts_of(tmp_path / name, text, column=column)
    assert "\n" not in str(caught.value)


def test_parquet_is_read_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a", "score": float("nan"), "at": date(2026, 1, 2)}, {"prompt": "b", "score": 0.5, "at": None}]
    module = SimpleNamespace(read_table=lambda _file: SimpleNamespace(to_pylist=lambda: rows))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=module))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    assert prompts_of(tmp_path / "p.parquet", "") == [
        Prompt(text="a", fields={"score": None, "at": "2026-01-02"}),
        Prompt(text="b", fields={"score": 0.5, "at": None}),
    ]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"p\.parquet needs pyarrow: pip install pyarrow, or save the table as"):
        prompts_of(tmp_path / "p.parquet", "")


def test_a_list_of_messages_is_a_prompt_for_every_message_without_an_answer(tmp_path: Path) -> None:
    lists = ([SYSTEM, ASK], [SYSTEM, ASK, MORE], [ASK, SAID, MORE], [ASK, SAID])
    text = "".join(json.dumps({"id": number, "messages": each}) + "\n" for number, each in enumerate(lists))
    assert prompts_of(tmp_path / "p.jsonl", text) == [
        Prompt(text="a", messages=[SYSTEM], fields={"id": 0}),
        Prompt(text="a", messages=[SYSTEM], fields={"id": 1}),
        Prompt(text="b", messages=[SYSTEM, ASK], earlier=["a"], fields={"id": 1}),
        Prompt(text="b", messages=[ASK, SAID], fields={"id": 2}),
        Prompt(text="b b", role="assistant", messages=[ASK], fields={"id": 3}),
    ]


def test_messages_are_put_in_the_template_with_the_answers_between_them_and_the_assistants_is_continued() -> None:
    roles = CHAT.replace("<user>", "{{ {'user': '<user>', 'system': 'a a'}.get(m.role, '<assistant>') }}")
    prompt = Prompt(text="b", messages=[SYSTEM, ASK], earlier=["a"])
    words = tokenizer(chat_template=roles)
    answered = ids_of(prompt, words, CONFIG, answers=["b b"])
    assert words.decode([*answered]) == "<s> a a </s> <user> a <assistant> b b <user> b <assistant>"
    assert Prompt(**json.loads(json.dumps(asdict(prompt)))) == prompt
    prompt = Prompt(text="b b", role="assistant", messages=[ASK])
    words = tokenizer(chat_template=ROLES)
    assert words.decode([*ids_of(prompt, words, CONFIG, answers=[])]) == "<s> <user> a <assistant> b b"
    with pytest.raises(ConfigError, match="messages, such as 'b b', need a tokenizer with a chat template: use a chat"):
        ids_of(prompt, tokenizer(), CONFIG)


def test_a_later_turn_follows_the_answers_to_earlier_ones() -> None:
    """In the template as messages in turn, whose roles alternate; else as the text was written, line by line."""
    assert ids_of(Prompt(text="a b"), tokenizer(chat_template=CHAT), IN_CHAT) == (0, 2, 4, 5, 3)
    assert ids_of(Prompt(text="a b"), tokenizer(chat_template=CHAT), CONFIG) == (0, 4, 5)
    turns = Prompt(text="a a", earlier=["a", "b"])
    assert ids_of(turns, tokenizer(chat_template=ROLES), IN_CHAT, answers=["b b", "a"]) == (
        0,
        2,
        4,
        3,
        5,
        5,
        2,
        5,
        3,
        4,
        2,
        4,
        4,
        3,
    )
    lines = ids_of(Prompt(text="a a", earlier=["a ", "b "]), tokenizer(), CONFIG, answers=["b b", "a"])
    assert tokenizer().decode([*lines]) == "<s> a b b b a a a"


def test_an_empty_prompt_is_the_begin_of_a_sequence_where_there_is_one() -> None:
    assert encode("", tokenizer(begins=False, bos_token="<s>")) == (0,)
    with pytest.raises(ConfigError, match="which this tokenizer lacks"):
        encode("", tokenizer(begins=False))
    silent = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ids_of(Prompt(text=""), tokenizer(bos_token="<s>", chat_template=silent), IN_CHAT) == (0,)
    with pytest.raises(ConfigError, match="leave chat out"):
        ids_of(Prompt(text="a"), tokenizer(), IN_CHAT)


@pytest.mark.parametrize(
    ("num_tokens", "max_new_tokens", "num_answers", "sentence"),
    [
        (6, 4, 0, None),
        (4, 2, 2, None),
        (9, 4, 0, "has 9 tokens.*max_new_tokens=1 would fit"),
        (10, 4, 0, "has 10 tokens.*with max_new_tokens=4 a prompt has room for 6 at most"),
        (4, 3, 2, r"max_new_tokens=3 for each of 3 answers that is more.*=2 would fit"),
        (8, 3, 2, "with max_new_tokens=3 a prompt has room for 1 at most"),
        (12, 12, 0, "with max_new_tokens=1 a prompt has room for 9 at most"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_told_with_what_would_fit(
    num_tokens: int, max_new_tokens: int, num_answers: int, sentence: str | None
) -> None:
    found = problem_of_length(
        Prompt(text="a"), num_tokens, max_new_tokens=max_new_tokens, context=10, num_answers=num_answers
    )
    assert re.search(sentence, found or "") if sentence else found is None


def test_an_id_that_the_model_lacks_is_refused() -> None:
    """As where a tokenizer was given a token for padding, and the model was not."""
    check_vocabulary(Prompt(text="a"), [1, 19], vocab_size=20)
    with pytest.raises(ConfigError, match="has token id 20, and the model knows 20 ids"):
        check_vocabulary(Prompt(text="a"), [1, 20, 3], vocab_size=20)


MAKER = RequestMaker(tokenizer=byte_level(), context=60, vocab_size=300)
PROMPTS = (
    Prompt(text="a"),
    Prompt(text="b"),
    Prompt(text="c", earlier=["b"]),
    Prompt(text="d", earlier=["b", "c"]),
    Prompt(text="e"),
    Prompt(text="f", earlier=["e"]),
)
CONFIG = RunConfig(task=GenerateConfig(), model=ModelConfig(name="tiny"), draft=DrafterConfig(), max_new_tokens=4)
IN_CHAT = replace(CONFIG, chat=True)


def requests_of(*prompts: Prompt, num_samples: int = 1, max_new_tokens: int = 4) -> list[PromptRequest]:
    return MAKER.requests(prompts, replace(CONFIG, num_samples=num_samples, max_new_tokens=max_new_tokens))


def texts(requests: list[PromptRequest], *, keeps_order: bool) -> list[str]:
    return ["".join(request.prompt for request in group) for group in in_turns(requests, keeps_order=keeps_order)]


def test_groups_are_as_few_as_the_turns_or_keep_the_order_of_the_file() -> None:
    requests = requests_of(*PROMPTS)
    assert texts(requests, keeps_order=False) == ["abe", "cf", "d"]
    assert texts(requests, keeps_order=True) == ["ab", "c", "de", "f"]
    assert texts(requests[3:], keeps_order=True) == ["de", "f"], "what is finished needs no group"
    assert texts([], keeps_order=True) == texts([], keeps_order=False) == []
    assert texts(requests_of(*PROMPTS, num_samples=2), keeps_order=True) == ["aabb", "cc", "ddee", "ff"]


def test_a_later_turn_knows_where_the_answers_are_and_takes_them_in() -> None:
    request = requests_of(*PROMPTS)[3]
    assert [*request.earlier_indices] == [1, 2]
    whole = MAKER.with_answers(request, ["one", "two"], CONFIG)
    assert whole.prompt_ids == encode("bone\nctwo\nd", MAKER.tokenizer)
    assert replace(whole, prompt_ids=request.prompt_ids) == request


def test_equal_prompts_are_counted_turn_by_turn() -> None:
    talk = Prompt(text="b"), Prompt(text="c", earlier=["b"])
    requests = requests_of(Prompt(text="b"), *talk, Prompt(text="e"), *talk, num_samples=2)
    assert [request.num_equal_before for request in requests] == [0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 1, 1]
    answered = [MAKER.with_answers(request, ["x"], CONFIG) for request in (requests[4], requests[10])]
    assert answered[0].prompt_ids == answered[1].prompt_ids
    assert len({request.key(7) for request in answered}) == 2
    alone = MAKER.with_answers(requests_of(*talk)[1], ["x"], CONFIG)
    assert answered[0].key(7) == alone.key(7)
    assert answered[0].key(7) != MAKER.with_answers(requests[4], ["y"], CONFIG).key(7)


def test_a_later_turn_counts_as_long_as_it_can_become() -> None:
    first, last = requests_of(PROMPTS[1], PROMPTS[2])
    assert len(first.prompt_ids) == 1
    assert len(last.prompt_ids) == len("b\nc") + 4
    with pytest.raises(ConfigError, match="max_new_tokens=29 for each of 2 answers"):
        requests_of(PROMPTS[2], max_new_tokens=29)
    with pytest.raises(ConfigError, match="more than the context of 60"):
        MAKER.with_answers(last, ["x" * 60], CONFIG)
