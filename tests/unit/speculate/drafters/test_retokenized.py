"""A draft by text drafts what its model takes to be most probable after the whole text, wherever tokens merge."""

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoTokenizer

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.drafters.retokenized import RetokenizedDrafter
from llama_ssp.speculate.drafters.tokenizers import TokenizerPair
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import Draft
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.lanes import grid, heavy
from tests.helpers.prefix_runner import PrefixRunner
from tests.helpers.text_laws import counted
from tests.helpers.tokenizers import byte_level, save_tokenizer, sentencepiece_like

SAMPLING = SamplingConfig(temperature=0.9)
TARGET, DRAFT = byte_level(), sentencepiece_like()
TEXTS = ["def return (n):", "Hello world", "the other\n world", "n", "return " * 6]


def prompts() -> list[tuple[int, ...]]:
    return [tuple(TARGET(text).input_ids) for text in TEXTS]


def requests(num_tokens: int = 24) -> list[Request]:
    return [Request(index=i, prompt_ids=ids, max_new_tokens=num_tokens - 3 * i) for i, ids in enumerate(prompts())]


class Checked(RetokenizedDrafter):
    """Compares the model's tokens after each text, and what its cache is said to hold, with the definition."""

    num_checked = num_rolled_back = 0

    def propose(self, rows: Rows, *, num_tokens: int, uniforms_BKP: Tensor, bucket: int, num_unread: int = 2) -> Draft:
        """Draft, and compare."""
        before = [[*ids] for ids in self._cached]
        draft = super().propose(
            rows, num_tokens=num_tokens, uniforms_BKP=uniforms_BKP, bucket=bucket, num_unread=num_unread
        )
        for row, length in enumerate(rows.lengths_B.tolist()):
            own = self._own_ids(row, rows.tokens_BS[row, :length].tolist())
            assert self._cached[row][: len(own)] == own
            assert len(own) + self.num_draft_tokens < self._num_slots
            taken = self._cached[row][len(own) :]
            assert isinstance(self.runner, PrefixRunner)
            assert taken == self.runner.greedy(tuple(own), len(taken))
            self.num_checked += len(taken)
            self.num_rolled_back += before[row][: len(own)] != own[: len(before[row])]
        return draft


def decoder(
    *,
    num_draft_tokens: int = 3,
    kind: type[RetokenizedDrafter] = RetokenizedDrafter,
    seed: int = 1,
    **options: Any,  # noqa: ANN401
) -> Decoder:
    draft = PrefixRunner(len(DRAFT), seed=seed, sharpness=1.0)
    drafter = kind(draft, num_draft_tokens=num_draft_tokens, tokenizers=TokenizerPair(TARGET, DRAFT))
    return make_decoder(PrefixRunner(len(TARGET), sharpness=1.0), None, make_drafter=lambda _: drafter, **options)


@grid(batch_size=[1, 3], num_draft_tokens=[2, 4], lag=[0, 1])
def test_every_draft_is_the_models_own_after_the_whole_text(batch_size: int, num_draft_tokens: int, lag: int) -> None:
    made = decoder(num_draft_tokens=num_draft_tokens, kind=Checked, batch_size=batch_size, sampling=SAMPLING)
    made._lag = lag
    complete(made, requests())
    drafter = made.round.drafters[0]
    assert isinstance(drafter, Checked)
    assert drafter.num_checked > 50
    assert drafter.num_rolled_back > 5, "no token of the draft ever changed"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_round_encodes_a_bounded_part_of_the_text(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    window, most = 6, [0]
    monkeypatch.setattr("llama_ssp.speculate.drafters.retokenized._WINDOW", window)

    class Bounded(Checked):
        def _own_ids_from(self, ids: list[int], start: int) -> list[int]:
            if start:
                most[0] = max(most[0], len(ids) - start)
            return super()._own_ids_from(ids, start)

    made = decoder(kind=Bounded, sampling=SAMPLING, batch_size=batch_size)
    done = complete(made, requests(60))
    assert max(len(each.token_ids) for each in done) == 60
    assert 0 < most[0] < 2 * window + 3 + 1, "the last round added up to K + 1 tokens"


def test_a_text_longer_than_the_cache_loses_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_ssp.speculate.drafters.retokenized.PREFILL_CHUNK", 5)
    made = decoder(kind=Checked, sampling=SAMPLING)
    drafter = made.round.drafters[0]
    assert isinstance(drafter, Checked)
    drafter.runner.max_position_embeddings = 40
    (done,) = complete(made, [Request(index=0, prompt_ids=prompts()[-1][:10], max_new_tokens=24)])
    assert len(done.token_ids) == 24
    assert drafter._num_slots == 40
    assert len(drafter._own_ids_from([*prompts()[-1][:10], *done.token_ids], 0)) > 40, "the text fits"


def test_a_cache_of_accepted_drafts_is_right_too(tmp_path: Path) -> None:
    """The draft is the target, and its words are the target's: all that it drafts before an end is accepted."""
    save_tokenizer(tmp_path, 20)
    words = AutoTokenizer.from_pretrained(tmp_path)
    runner = PrefixRunner(20)
    drafter = Checked(PrefixRunner(20), num_draft_tokens=3, tokenizers=TokenizerPair(words, words))
    made = make_decoder(runner, None, make_drafter=lambda _: drafter)
    wanted = [Request(index=n, prompt_ids=(5 + n, 7, 9), max_new_tokens=30) for n in range(3)]
    accepted = [length for done in complete(made, wanted) for length in done.accepted_lengths]
    assert accepted.count(3) > 10


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_text_is_the_targets_own(batch_size: int) -> None:
    target = PrefixRunner(len(TARGET), sharpness=1.0)
    for done in complete(decoder(batch_size=batch_size), requests()):
        assert done.token_ids == target.greedy(done.request.prompt_ids, done.request.max_new_tokens)


def test_rounds_can_be_warmed_up_before_any_prompt_is_read() -> None:
    made = decoder()
    made.make_room(requests())
    made.warm_up(requests())
    assert [done.token_ids for done in complete(made, requests())] == [
        done.token_ids for done in complete(decoder(), requests())
    ]


def test_under_coupled_a_seed_has_one_text_over_it_too() -> None:
    target = PrefixRunner(len(TARGET), sharpness=1.0)
    plain = complete(make_decoder(target, None, sampling=SAMPLING, rule_name="coupled"), requests())
    many: list[dict[str, Any]] = [{}, {"num_draft_tokens": 5, "batch_size": 3}, {"seed": 2}]
    for options in many:
        drafted = complete(decoder(sampling=SAMPLING, rule_name="coupled", **options), requests())
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


@pytest.mark.parametrize("rule_name", ["speculative", heavy("block")])
def test_sampled_texts_have_the_targets_law(rule_name: str) -> None:
    """A false alarm has a chance of 1 in 10 000; tokens whose share is off by 20 % of it are found in most runs."""
    prompt, num_texts, sampling = prompts()[1], 1500, SamplingConfig(temperature=0.2)
    made = decoder(sampling=sampling, rule_name=rule_name, batch_size=250, num_draft_tokens=2)
    wanted = [Request(index=0, sample=sample, prompt_ids=prompt, max_new_tokens=2) for sample in range(num_texts)]
    texts = [tuple(done.token_ids) for done in complete(made, wanted)]
    target = PrefixRunner(len(TARGET), sharpness=1.0)
    for length in (1, 2):
        counts, expected = counted(target, prompt, [text[:length] for text in texts], sampling=sampling)
        assert len(counts) > 3
        assert chisquare(counts, expected).pvalue > 1e-4 / 4


def test_the_step_on_the_host_is_shown_as_other_once_the_device_has_passed_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = decoder()
    drafter = made.round.drafters[0]
    assert isinstance(drafter, RetokenizedDrafter)
    drafter._host_s = 5.0
    monkeypatch.setattr(made.clock, "take", lambda: (2.0, 1.0))
    (done,) = complete(made, requests()[:1])
    num_rounds = len(done.accepted_lengths)
    assert done.part_s["draft"] == pytest.approx(2.0 * num_rounds - 5.0, abs=1.0)
    assert done.part_s["verify"] == num_rounds
    assert sum(done.part_s.values()) == pytest.approx(made.rounds_s)
