"""What `Pair.generate` takes, gives and keeps."""

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TextStreamer

import llama_ssp
from llama_ssp import Completion, Pair, load
from llama_ssp.errors import ConfigError, NumericError
from llama_ssp.run import decoders
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.round import Round
from tests.helpers.extensions import module_of, need
from tests.helpers.hub import shipped
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy
from tests.helpers.models import build_checkpoint, tiny_model
from tests.helpers.recorded import FakeRecorder
from tests.helpers.tokenizers import layout

TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPTS = ["import os\n", "def main():\n", "class Stack:\n"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    tokenizer = AutoTokenizer.from_pretrained(shipped("tiny"))
    tokenizer.chat_template = TEMPLATE
    return load("tiny", "tiny-draft", tokenizer=tokenizer)


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.seconds
def test_ten_calls_are_traced_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    traced_of_cpus = module_of("cpu.tracing").Traced
    trace = traced_of_cpus._trace

    def counted(self: Any, *arguments: Any) -> Any:
        traced.append(self)
        return trace(self, *arguments)

    monkeypatch.setattr(traced_of_cpus, "_trace", counted)
    fresh = replace(pair)
    for seed in range(10):
        fresh.generate(PROMPTS[seed % 3], max_new_tokens=8, seed=seed, stop_strings="never found" if seed % 2 else ())
    assert len(traced) == 2, "the draft and the verification, each once"


@pytest.mark.seconds
def test_ten_calls_of_growing_prompts_are_captured_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where another address or size of the cache would drop all graphs."""
    recorder = FakeRecorder()

    def make_executor(round_: Round, *, cuda_graphs: bool) -> GraphExecutor:
        assert cuda_graphs
        return GraphExecutor(round_, recorder=recorder)

    monkeypatch.setattr(decoders, "make_executor", make_executor)
    fresh = replace(pair)
    for number in range(10):
        fresh.generate("import os\n" * (1 + number // 4), max_new_tokens=6 + number // 2)
    assert recorder.num_recorded == 2, "the draft and the verification, each once"
    assert recorder.num_replayed >= 18


def functions_of_ours(call: Callable[[], list[Completion]]) -> tuple[int, int]:
    """How many functions the third of three calls runs in our files, and its rounds."""
    ours, called = str(Path(llama_ssp.__file__).parent), list[str]()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            called.append(frame.f_code.co_name)

    for _ in range(3):
        called.clear()
        sys.setprofile(count)
        try:
            [completion] = call()
        finally:
            sys.setprofile(None)
    return len(called), len(completion.accepted_lengths)


def test_a_short_call_runs_few_functions(pair: Pair) -> None:
    """The host delays the first token: a prompt of 6 tokens and 4 new ones run 563 functions of ours."""
    need("cpu")
    assert functions_of_ours(lambda: pair.generate([5, 6, 7, 8, 9, 10], max_new_tokens=4, plain=True))[0] < 566


@pytest.mark.seconds
def test_a_round_runs_few_functions(pair: Pair) -> None:
    """Behind a forward, a function of Python takes more than a microsecond."""
    need("cpu")
    calls = [partial(pair.generate, [5, 6, 7, 8, 9, 10], max_new_tokens=number) for number in (16, 48)]
    (few, num_few), (more, num_more) = map(functions_of_ours, calls)
    assert (more - few) / (num_more - num_few) < 78


def test_a_pair_is_gone_with_its_last_reference() -> None:
    """Its models would else take memory until Python looks for objects that refer to each other."""
    made = llama_ssp.load("tiny", "tiny-draft")
    made.generate([5, 6, 7], max_new_tokens=4)
    target = weakref.ref(made.models.target)
    gc.collect()
    gc.disable()
    try:
        del made
        assert target() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("temperature", [heavy(0.0), 0.8])
def test_the_text_of_a_prompt_does_not_depend_on_its_place(pair: Pair, temperature: float) -> None:
    first, second, third = ids(pair.generate(PROMPTS, max_new_tokens=12, temperature=temperature))
    assert ids(pair.generate([PROMPTS[2], PROMPTS[0]], max_new_tokens=12, temperature=temperature)) == [third, first]
    assert ids(pair.generate(PROMPTS[1], max_new_tokens=12, temperature=temperature)) == [second]


@pytest.mark.seconds
def test_the_texts_are_those_of_a_run(pair: Pair, tmp_path: Path) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    ended = launch(
        "task=generate",
        "draft=tiny-draft",
        "max_new_tokens=12",
        "num_samples=2",
        "seed=3",
        "batch_size=3",
        f"prompts={tmp_path}/p.jsonl",
        f"run_dir={tmp_path}/run",
    )
    assert ended.code == 0, ended.err
    texts = {(line["index"], line["sample"]): line["token_ids"] for line in ended.lines}
    found = pair.generate(prompts, max_new_tokens=12, num_samples=2, seed=3)
    assert {(each.index, each.sample): each.token_ids for each in found} == texts
    assert texts[0, 0] != texts[3, 0], "the second of two equal prompts"


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["llama", "gemma", "bytes"])
def test_a_text_continues_its_prompt_exactly_also_where_the_tokenizer_drops_the_first_space_of_a_text(
    kind: str, tmp_path: Path
) -> None:
    """Of a random model, which is its own draft."""
    tokenizer, prompt = layout(kind), "if x is"
    build_checkpoint(tmp_path, "llama", vocab_size=len(tokenizer), eos_token_id=None)
    tokenizer.save_pretrained(tmp_path)
    found = load(tmp_path, tmp_path).generate(prompt, num_samples=200, max_new_tokens=4, temperature=1.5)
    for each in found:
        assert prompt + each.text == tokenizer.decode(each.prompt_ids + each.token_ids, skip_special_tokens=True)
    assert any(each.text.startswith(" ") for each in found), "no text begins with a space: the test shows nothing"


@pytest.mark.heavy
def test_a_conversation_goes_on_from_what_the_cache_holds(pair: Pair) -> None:
    """Also where the cache has grown, and with the texts of calls that read everything."""
    talking, prompt, found = replace(pair), list(range(300, 330)), list[Completion]()
    for turn in range(5):
        found += talking.generate(prompt, max_new_tokens=60, seed=turn)
        # All but the last token of the answer, and what is new.
        assert found[-1].num_reused_tokens == (len(prompt) - 4 if turn else 0)
        prompt = [*prompt, *found[-1].token_ids, 7, 8, 9]
    assert len(prompt) > 256
    for turn, each in enumerate(found):
        fresh = replace(pair)
        (alone,) = fresh.generate(each.prompt_ids, max_new_tokens=60, seed=turn)
        assert (alone.token_ids, alone.num_reused_tokens) == (each.token_ids, 0)
    (plain,) = fresh.generate(found[-1].prompt_ids, max_new_tokens=1, plain=True)
    assert plain.num_reused_tokens == 0, "what is compared is read by both"


@pytest.mark.seconds
def test_texts_chats_and_token_ids_are_prompts(pair: Pair) -> None:
    text = "system: Be short.\nuser: Hi\nassistant: "
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    tokens = pair.tokenizer(text).input_ids
    (wanted,) = ids(pair.generate(text, max_new_tokens=8))
    for same in (chat, tokens, tuple(tokens), torch.tensor(tokens), torch.tensor([tokens]), [chat], [tokens], [text]):
        assert ids(pair.generate(same, max_new_tokens=8)) == [wanted]
    mixed = pair.generate([chat, "a", tokens], max_new_tokens=8)
    assert ids(mixed)[0] == wanted
    assert [each.prompt_ids for each in mixed][::2] == [tokens, tokens]
    (message,) = pair.generate("Hi", chat=True, max_new_tokens=1)
    assert pair.tokenizer.decode(message.prompt_ids) == "<bos>user: Hi\nassistant: "


def test_an_assistants_last_message_is_continued(pair: Pair) -> None:
    chat = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]
    (found,) = pair.generate(chat, max_new_tokens=1)
    assert str(pair.tokenizer.decode(found.prompt_ids)).endswith("assistant: 1, 2,")


@pytest.mark.seconds
def test_a_completion_says_what_was_drafted_and_how_long_it_took(pair: Pair) -> None:
    found = pair.generate(PROMPTS, max_new_tokens=24)
    plain = pair.generate(PROMPTS, max_new_tokens=24, plain=True)
    assert sum(sum(each.accepted_lengths) for each in found) > 0
    for each, alone in zip(found, plain, strict=True):
        assert len(each.accepted_ids) == sum(each.is_drafted) == sum(each.accepted_lengths)
        assert not each.is_drafted[0], "the prefill's token"
        assert each.acceptance is not None
        assert 0 <= each.acceptance <= 1
        assert len(each.draft_lengths) == len(each.accepted_lengths)
        times = each.times
        assert 0 < times.first_token_s < times.total_s
        assert times.first_token_s + times.draft_s + times.verify_s <= times.total_s * 1.01
        assert each.ms_per_token == pytest.approx(1e3 * times.total_s / 24)
        assert (alone.accepted_ids, alone.acceptance, alone.draft_lengths) == ([], None, [])
        assert alone.num_target_forwards == 24


def test_a_repr_is_a_line(pair: Pair) -> None:
    assert repr(pair) == "Pair(tiny, draft tiny-draft, on cpu, context 2048)"
    (found,) = pair.generate("import os\n", max_new_tokens=40, temperature=0)
    assert "\n" not in repr(found)
    assert len(repr(found)) < 160
    assert repr(found).startswith("Completion(")


class Interrupting(TextStreamer):
    """Is interrupted at the third group of tokens, as by Ctrl-C in a notebook."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.num_put = 0

    def put(self, value: torch.Tensor) -> None:
        self.num_put += 1
        if self.num_put == 3:
            raise KeyboardInterrupt
        super().put(value)  # type: ignore[no-untyped-call]


def test_an_interrupted_call_does_not_change_the_next_one(pair: Pair) -> None:
    wanted = ids(pair.generate("import os\n", max_new_tokens=30, seed=2))
    with pytest.raises(KeyboardInterrupt):
        pair.generate("import os\n", max_new_tokens=30, streamer=Interrupting(pair.tokenizer))
    assert ids(pair.generate("import os\n", max_new_tokens=30, seed=2)) == wanted


def test_calls_of_several_threads_wait_for_each_other_and_a_call_inside_a_call_is_refused(pair: Pair) -> None:
    fresh, refused = replace(pair), list[ConfigError]()
    complete = partial(fresh.generate, max_new_tokens=12, temperature=0.0)
    alone = [ids(complete(prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(lambda prompt: ids(complete(prompt)), PROMPTS)] == alone

    class Calling(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            del value
            with pytest.raises(ConfigError, match="a call of this pair goes on in this thread") as raised:
                complete("x")
            refused.append(raised.value)

    assert ids(complete(PROMPTS[0], streamer=Calling(pair.tokenizer))) == alone[0]
    assert refused


def test_a_pair_belongs_to_the_process_that_loaded_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a child that has forked; its parent goes on."""
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(ConfigError, match=f"this pair belongs to process {here}, which loaded it"):
            pair.generate("x", max_new_tokens=1)
    assert pair.generate("x", max_new_tokens=1)


def test_a_closed_pair_takes_no_call(pair: Pair) -> None:
    with replace(pair) as fresh:
        fresh.generate("x", max_new_tokens=1)
    for call in (partial(fresh.generate, "x"), fresh.update):
        with pytest.raises(ConfigError, match="this pair was closed: load it again"):
            call()


def test_a_streamer_shows_prompt_and_completion(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(pair.tokenizer, skip_special_tokens=True)
    (found,) = pair.generate("import os\n", max_new_tokens=12, streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n") == ("import os\n" + found.text).rstrip("\n")


def test_trees_are_drafted_on_request(pair: Pair) -> None:
    (found,) = pair.generate("def area(", max_new_tokens=24, tree="3x2x1", temperature=0)
    (chain,) = pair.generate("def area(", max_new_tokens=24, num_draft_tokens=3, temperature=0)
    assert found.token_ids == chain.token_ids
    assert len(found.accepted_ids) > len(chain.accepted_ids)
    with pytest.raises(ConfigError, match="tree=wide: 'wide' is not the shape of a tree"):
        pair.generate("import os\n", tree="wide")


@pytest.mark.heavy
def test_k_is_chosen_for_each_round_on_request(pair: Pair) -> None:
    (found,) = pair.generate("import os\n", max_new_tokens=24, num_draft_tokens="auto", temperature=0)
    (wanted,) = pair.generate("import os\n", max_new_tokens=24, temperature=0)
    assert found.token_ids == wanted.token_ids


@pytest.mark.seconds
@pytest.mark.parametrize("family", ["gpt_neox", heavy("falcon_h1"), heavy("mistral")])
@pytest.mark.parametrize("plain", [True, False])
def test_nan_of_one_call_does_not_reach_the_next(family: str, plain: bool) -> None:
    """Attention over masks multiplies by 0 what a row of the cache held before."""
    tokenizer, model = AutoTokenizer.from_pretrained(shipped("tiny")), tiny_model(family)
    same: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "plain": plain, "batch_size": 2}
    [wanted] = load(model, model, dtype="fp32", tokenizer=tokenizer).generate([2, 3], **same)
    compared = {step * place % model.config.vocab_size for step in (5, 7) for place in range(24)}  # while it is loaded
    bad = next(token for token in range(10, 200) if token not in {*wanted.token_ids, *compared})
    model.get_input_embeddings().weight.data[bad] = torch.nan  # type: ignore[operator]
    pair = load(model, model, dtype="fp32", tokenizer=tokenizer)
    assert pair.generate([2, 3], **same)[0].token_ids == wanted.token_ids
    for _ in range(2):
        with pytest.raises(NumericError, match="prompt 2, token 1: logits became NaN"):
            pair.generate([[4, 5], [bad] * 40], **same)
        assert [found.token_ids for found in pair.generate([[2, 3]] * 2, **same)] == [wanted.token_ids] * 2
