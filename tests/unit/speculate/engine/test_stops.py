"""A completion ends with the token that completes a stop, wherever its characters come from."""

from itertools import combinations, islice, pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llama_ssp import catalogue, load
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder, Decoding
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.weights import hub
from tests.helpers.decoders import change_runs, complete, ids_of, make_decoder, requests_of
from tests.helpers.fake_comm import ThreadComm, on_ranks, thread_comms
from tests.helpers.lanes import grid
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.tokenizers import byte_level, save_tokenizer, sentencepiece_like

TEXT = "def tête(n):\n\treturn '🙂🙂'\n\n# end"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Token i is written "ti", with a blank before it."""
    folder = tmp_path_factory.mktemp("words")
    save_tokenizer(folder, 11)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def until_stop(tokenizer: PreTrainedTokenizerFast, stops: list[str], *, group: int) -> str:
    """The text of the ids up to the one that completes a stop, taken in groups; all of it without one."""
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    watch, taken, left = StopStrings(tokenizer, stops).watch([]), list[int](), iter(ids)
    while new_ids := list(islice(left, group)):
        number = watch.num_until_stop(new_ids)
        taken += new_ids[:number]
        if number:
            break
    return str(tokenizer.decode(taken, skip_special_tokens=True))


@pytest.mark.seconds
@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_like()], ids=["bytes", "pieces"])
def test_every_part_of_a_text_is_found_where_it_is_first_complete(
    tokenizer: PreTrainedTokenizerFast, group: int
) -> None:
    assert until_stop(tokenizer, ["absent"], group=group) == TEXT
    assert until_stop(tokenizer, ["absent", "'\n"], group=group) == "def tête(n):\n\treturn '🙂🙂'\n"
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    beginnings = [str(tokenizer.decode(ids[:number], skip_special_tokens=True)) for number in range(len(ids) + 1)]
    for stop in {TEXT[i:j] for i, j in combinations(range(len(TEXT) + 1), 2)}:
        wanted = next(text for text in beginnings if stop in text)
        assert until_stop(tokenizer, [stop], group=group) == wanted, stop


def test_a_stop_is_complete_also_where_its_last_token_begins_another_character() -> None:
    """As large vocabularies have them: a blank with the first bytes of an emoji."""
    begins_emoji = "Ġ" + pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")[0][0][0]
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, ":": 1, begins_emoji: 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    watch = StopStrings(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [": "]).watch([])
    assert watch.num_until_stop([0, 1, 2]) == 3


def test_a_special_token_is_a_stop_though_it_has_no_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    ids = tokenizer("hi <|im_end|> there", add_special_tokens=False).input_ids
    number = ids.index(tokenizer.convert_tokens_to_ids("<|im_end|>")) + 1
    assert StopStrings(tokenizer, ["<|im_end|>"]).watch([]).num_until_stop(ids) == number < len(ids)
    assert StopStrings(tokenizer, ["im_end"]).watch([]).num_until_stop(ids) is None


def stopping(words: PreTrainedTokenizerFast, stops: list[str], **options: Any) -> Decoder:
    """A decoder that looks for stops."""
    decoder = make_decoder(PrefixRunner(), PrefixRunner(seed=options.pop("draft_seed", 0)), **options)
    change_runs(decoder, stops=StopStrings(words, stops))
    return decoder


@pytest.mark.seconds
@grid(lag=[0, 1], batch_size=[1, 3], draft_seed=[0, 1])  # drafts that are always, and mostly not, accepted
def test_a_row_ends_at_its_stop_also_inside_a_draft(
    words: PreTrainedTokenizerFast, draft_seed: int, batch_size: int, lag: int
) -> None:
    target, ended_inside, num_stopped = PrefixRunner(), 0, 0
    wanted = requests_of([(2, 3), (4,), (5, 6, 7)], 30)
    for stop in range(2, target.vocab_size):
        # The blank before the first word is there as the continuation of a prompt alone.
        decoder = stopping(words, [f" t{stop}"], draft_seed=draft_seed, batch_size=batch_size, num_draft_tokens=4)
        decoder.lag = lag
        for completion in complete(decoder, wanted):
            ids = target.greedy(completion.request.prompt_ids, 30)
            expected = ids[: ids.index(stop) + 1] if stop in ids else ids
            assert completion.token_ids == expected
            assert completion.finish_reason == ("stop" if stop in ids else "length")
            num_stopped += completion.finish_reason == "stop"
            ended_inside += bool(completion.accepted_lengths) and completion.accepted_lengths[-1] not in (0, 4)
    assert num_stopped > 3
    assert draft_seed or ended_inside, "no row ended inside a draft: the test shows nothing"


def test_a_row_that_has_stopped_stays_as_long_as_it_is(words: PreTrainedTokenizerFast) -> None:
    target = PrefixRunner()
    others = set(pairwise(token for token in target.greedy((4,), 60) if token > 1))  # 0 and 1 have no text
    stop = next(pair for pair in pairwise(target.greedy((2, 3), 20)) if pair not in others and min(pair) > 1)
    requests = requests_of([(4,), (2, 3)], 60)
    decoder = stopping(words, [f"t{stop[0]} t{stop[1]}"], batch_size=2, num_draft_tokens=4)
    runs, done = list[Decoding](), dict[int, RowCompletion]()
    with torch.inference_mode():
        for updates in decoder.run(requests, more=lambda run, _num_free: runs.append(run)):
            done |= {update.completion.request.index: update.completion for update in updates}
    running, stopped = done[0], done[1]
    assert len(running.token_ids) == 60
    assert stopped.finish_reason == "stop"
    assert runs[0]._state
    assert runs[0]._state.lengths_B.tolist() == [2, 2], "vacant rows are as short as they can be"


def test_a_stop_in_the_prompt_ends_nothing(words: PreTrainedTokenizerFast) -> None:
    target = PrefixRunner()
    absent = next(token for token in range(2, target.vocab_size) if token not in target.greedy((token,), 12))
    request = Request(index=0, prompt_ids=(absent,), max_new_tokens=12)
    (completion,) = complete(stopping(words, [f"t{absent}"]), [request])
    assert completion.finish_reason == "length"


def test_ranks_leave_the_loop_together(words: PreTrainedTokenizerFast) -> None:
    def one_rank(comm: ThreadComm) -> list[list[int]]:
        decoder = stopping(words, ["t5", "t7 t2"], draft_seed=1, batch_size=2, comm=comm)
        return ids_of(complete(decoder, requests))

    requests = [Request(index=i, prompt_ids=(i + 2,), max_new_tokens=30) for i in range(5)]
    first, second = on_ranks(thread_comms(2), one_rank)
    assert first == second
    assert any(len(ids) < 30 for ids in first)


@pytest.mark.heavy
@torch.inference_mode()
def test_the_shipped_pair_stops_where_the_library_does() -> None:
    folder = hub.resolve(catalogue.load("tiny"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pair, stops = load("tiny", "tiny-draft"), ["\n\n", "self."]
    reasons = set()
    for prompt in ("import os", "class Stack:", "def main():", "for x in"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=40, do_sample=False, stop_strings=stops, tokenizer=tokenizer)
        (found,) = pair.generate(prompt, max_new_tokens=40, temperature=0, stop_strings=stops)
        assert found.token_ids == out[0, ids.shape[1] :].tolist()
        assert (found.finish_reason == "stop") == any(stop in found.text for stop in stops)
        reasons.add(found.finish_reason)
    assert "stop" in reasons


@pytest.mark.seconds
def test_one_stop_needs_no_list() -> None:
    (found,) = load("tiny", "tiny-draft").generate("import os", stop_strings="import")
    assert found.finish_reason == "stop"
    assert found.text.count("import") == 1
