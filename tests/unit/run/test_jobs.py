"""The turns of a conversation come after one another, and those of different conversations together."""

from dataclasses import replace

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.run.jobs import JobMaker, PromptTask, encode, in_turns
from llama_ssp.run.prompts import Prompt
from llama_ssp.settings.schema import DrafterConfig, ModelConfig, RunConfig
from llama_ssp.settings.tasks import GenerateConfig
from tests.helpers.tokenizers import byte_level

MAKER = JobMaker(tokenizer=byte_level(), context=60, vocab_size=300)
PROMPTS = (
    Prompt(text="a"),
    Prompt(text="b"),
    Prompt(text="c", earlier=["b"]),
    Prompt(text="d", earlier=["b", "c"]),
    Prompt(text="e"),
    Prompt(text="f", earlier=["e"]),
)


def jobs_of(*prompts: Prompt, num_samples: int = 1, max_new_tokens: int = 4) -> list[PromptTask]:
    config = RunConfig(
        task=GenerateConfig(), model=ModelConfig(name="tiny"), draft=DrafterConfig(), num_samples=num_samples,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    return MAKER.jobs(prompts, config)


def texts(jobs: list[PromptTask], *, keeps_order: bool) -> list[str]:
    return ["".join(job.prompt for job in group) for group in in_turns(jobs, keeps_order=keeps_order)]


def test_groups_are_as_few_as_the_turns_or_keep_the_order_of_the_file() -> None:
    jobs = jobs_of(*PROMPTS)
    assert texts(jobs, keeps_order=False) == ["abe", "cf", "d"]
    assert texts(jobs, keeps_order=True) == ["ab", "c", "de", "f"]
    assert texts(jobs[3:], keeps_order=True) == ["de", "f"], "what is finished needs no group"
    assert texts([], keeps_order=True) == texts([], keeps_order=False) == []
    assert texts(jobs_of(*PROMPTS, num_samples=2), keeps_order=True) == ["aabb", "cc", "ddee", "ff"]


def test_a_later_turn_knows_where_the_answers_are_and_takes_them_in() -> None:
    job = jobs_of(*PROMPTS)[3]
    assert [*job.earlier_indices] == [1, 2]
    whole = MAKER.with_answers(job, ["one", "two"], chat=False)
    assert whole.request.prompt_ids == encode("bone\nctwo\nd", MAKER.tokenizer, chat=False)
    assert replace(whole, request=job.request) == job


def test_equal_prompts_are_counted_turn_by_turn() -> None:
    talk = Prompt(text="b"), Prompt(text="c", earlier=["b"])
    jobs = jobs_of(Prompt(text="b"), *talk, Prompt(text="e"), *talk, num_samples=2)
    assert [job.request.num_equal_before for job in jobs] == [0, 0, 1, 1, 0, 0, 0, 0, 2, 2, 1, 1]
    answered = [MAKER.with_answers(job, ["x"], chat=False).request for job in (jobs[4], jobs[10])]
    assert answered[0].prompt_ids == answered[1].prompt_ids
    assert len({request.key(7) for request in answered}) == 2
    alone = MAKER.with_answers(jobs_of(*talk)[1], ["x"], chat=False)
    assert answered[0].key(7) == alone.request.key(7)
    assert answered[0].key(7) != MAKER.with_answers(jobs[4], ["y"], chat=False).request.key(7)


def test_a_later_turn_counts_as_long_as_it_can_become() -> None:
    first, last = jobs_of(PROMPTS[1], PROMPTS[2])
    assert len(first.request.prompt_ids) == 1
    assert len(last.request.prompt_ids) == len("b\nc") + 4
    with pytest.raises(ConfigError, match="max_new_tokens=29 for each of 2 answers"):
        jobs_of(PROMPTS[2], max_new_tokens=29)
    with pytest.raises(ConfigError, match="more than the context of 60"):
        MAKER.with_answers(last, ["x" * 60], chat=False)
