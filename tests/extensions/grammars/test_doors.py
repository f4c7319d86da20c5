"""What asks for structured text: settings, the library, fields of requests; and what each of them refuses."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from transformers import AutoTokenizer

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.grammars.records import MOST_BYTES, GrammarSampling, grammar_of, refusal_of
from llama_ssp.extensions.grammars.text import prepare
from llama_ssp.extensions.serve.inbox import RequestError, ServedRequest
from llama_ssp.extensions.serve.protocol import BodyReader
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import Vocabulary
from tests.helpers.repository import ROOT

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with load("tiny", "tiny-draft") as pair:
        yield pair


@pytest.mark.seconds
def test_the_library_takes_all_four_kinds(pair: Pair) -> None:
    [done] = pair.generate("x = ", json_schema=SCHEMA, max_new_tokens=96, seed=3)
    if done.finish_reason == "eos":
        jsonschema.validate(json.loads(done.text), SCHEMA)
    found = pair.generate(["x = ", "y"], choice=("yes", "no (a/b)\n"), num_samples=3)
    assert {done.text for done in found} <= {"yes", "no (a/b)\n"}
    [done] = pair.generate("x = ", regex="[0-9]{2}(a|b)/", temperature=0.0)
    [plain] = pair.generate("x = ", regex="[0-9]{2}(a|b)/", temperature=0.0, plain=True)
    assert done.text == plain.text
    assert (len(done.text), done.text[2] in "ab", done.text[3]) == (4, True, "/")
    assert pair.generate("x = ", grammar='start: "é" b\nb: "!" | "(" b ")"')[0].text.startswith("é")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json_schema": {"not": {}}}, 'json_schema is refused: .*Unimplemented keys: \\["not"\\]'),
        ({"json_schema": '{"type": "things"}'}, "json_schema is refused: .*Invalid type: things"),
        ({"json_schema": '{"a"'}, "json_schema is no JSON: "),
        ({"json_schema": "no/such.json"}, "json_schema=no/such.json cannot be read"),
        ({"json_schema": 3}, "json_schema=3 must be a schema"),
        ({"json_schema": False}, "json_schema is refused: .*Unsatisfiable"),
        ({"json_schema": {"enum": ["x" * 2**20]}}, f"json_schema has 10485\\d\\d bytes: at most {MOST_BYTES} are read"),
        ({"regex": "(?=a)b"}, "regex is refused: .*look-around"),
        ({"regex": "["}, "regex is refused: .*unclosed character class"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice exclude each other"),
        ({"choice": [1]}, "choice=\\[1\\] must be a list of texts"),
        ({"grammar": "start: other"}, 'grammar is refused: unknown name: "other"'),
        ({"grammar": "x"}, "grammar is refused: "),
        ({"regex": "[^\\s\\S]"}, "regex is refused: "),
        ({"regex": "a", "logprobs": 1}, "regex makes a law that logprobs=1 does not know"),
        ({"guided_json": {}}, "unknown argument 'guided_json' of generate: did you mean json_schema"),
    ],
    ids=str,
)
def test_the_library_says_what_it_refuses(pair: Pair, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pair.generate("x", **given)


@pytest.mark.parametrize("regex", ["(x+x+)+y", "((a{0,100}){0,100}){0,100}b", "(a|aa)+$", "a{1000}{1000}"])
def test_an_expression_of_exponential_size_ends_within_its_limits(pair: Pair, regex: str) -> None:
    try:
        [done] = pair.generate("x", regex=regex, max_new_tokens=24)
    except Exception as error:  # noqa: BLE001 - a sentence of ours
        assert "constraint" in str(error) or "refused" in str(error)  # noqa: PT017
    else:
        assert done.token_ids


def test_an_overlap_and_a_task_without_texts_are_refused(pair: Pair) -> None:
    sampling = whole(SamplingConfig)(regex="a")
    with pytest.raises(ConfigError, match="waits for the drafted tokens in each round"):
        check_values(
            replace(pair.config, sampling=sampling, speculation=replace(pair.config.speculation, overlap=True))
        )


BODIES = {
    "response_format": ({"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}, "json_schema"),
    "structured_outputs": ({"regex": "ab"}, "regex"),
    "guided_json": (SCHEMA, "json_schema"),
    "guided_regex": ("ab", "regex"),
    "guided_choice": (["a", "b"], "choice"),
    "guided_grammar": ('start: "a"', "grammar"),
}


@pytest.mark.parametrize("field", list(BODIES))
def test_a_field_of_a_request_reaches_all_ranks(pair: Pair, field: str) -> None:
    value, kind = BODIES[field]
    reader = BodyReader(pair.config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
    [request] = reader.read({"prompt": "x", field: value}, is_chat=False).completions
    found = ServedRequest.from_json(json.loads(json.dumps(request.as_json())), pair.tokenizer)
    value = "ab" if field == "structured_outputs" else value
    given: dict[str, Any] = {kind: json.dumps(SCHEMA) if kind == "json_schema" else value}
    wanted = grammar_of(GrammarSampling(**given))
    assert grammar_of(request.sampling) == grammar_of(found.sampling) == wanted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"response_format": {"type": ["text"]}}, "response_format must be"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format must be"),
        ({"response_format": {"type": "json_object", "schemas": {}}}, "has no 'schemas'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}}, "no 'strikt'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented keys"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs must have one of"),
        ({"guided_choice": "a"}, "guided_choice must be a list of texts"),
        ({"guided_regex": 3}, "guided_regex must be a text"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "give one"),
        ({"guided_grammar": "start: other"}, "unknown name"),
        ({"guided_json": "/etc/schema.json"}, "the text itself"),
        ({"guided_grammar": "/etc/grammar.lark"}, "the text itself"),
        ({"structured_outputs": {"json": "schema.json"}}, "the text itself"),
        ({"guided_json": {"enum": ["x" * 2**20]}}, "at most"),
    ],
    ids=str,
)
def test_a_field_that_is_refused_is_named(pair: Pair, body: dict[str, Any], said: str) -> None:
    reader = BodyReader(pair.config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
    with pytest.raises(RequestError, match=said) as error:
        reader.read({"prompt": "x", **body}, is_chat=False)
    assert error.value.param in body


def test_an_object_may_have_a_schema_as_other_servers_take_it(pair: Pair) -> None:
    reader = BodyReader(pair.config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
    asked = [{"type": "json_object", "schema": SCHEMA}, BODIES["response_format"][0]]
    found = [reader.read({"prompt": "x", "response_format": one}, is_chat=False).completions[0] for one in asked]
    assert grammar_of(found[0].sampling) == grammar_of(found[1].sampling)


def test_texts_without_a_structure_are_as_before(pair: Pair) -> None:
    for value in ({"type": "text"},):
        reader = BodyReader(pair.config, pair.models.request_maker, length=64, eos_ids=pair.models.eos_ids)
        [request] = reader.read({"prompt": "x", "response_format": value}, is_chat=False).completions
        assert request.sampling == whole(SamplingConfig)(**vars(request.sampling))
    assert refusal_of(GrammarSampling(choice=["a"])) is None


def test_the_examples_of_the_page_have_the_languages_that_it_says() -> None:
    """Its lexer is greedy, and a terminal as a whole is not."""
    page = (ROOT / "llama_ssp/extensions/grammars/page.md").read_text()
    greedy, whole_ones = re.findall(r"```lark\n(.*?)```", page, re.DOTALL)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "llama_ssp/shipped/tiny")
    ids: dict[str, int] = tokenizer.get_vocab()
    vocabulary = Vocabulary(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))

    def is_allowed(text: str, grammar: str) -> bool:
        found = prepare(GrammarSampling(grammar=grammar), vocabulary)()
        for letter in text:
            found.extend(ids[letter])
        return bool(found.may_end)

    for text in ("ac", "abc", "bbc", "ababc", "abbbc"):
        assert is_allowed(text, greedy)
        assert is_allowed(text, whole_ones), text
    assert [is_allowed("abbc", grammar) for grammar in (greedy, whole_ones)] == [False, True]
    assert not is_allowed("bc", whole_ones)
