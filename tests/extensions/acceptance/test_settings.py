"""What the settings of `task=acceptance` must be."""

import pytest

from llama_ssp.extensions.acceptance.records import drafts_of
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.extensions import need

BAD = {
    "task=acceptance task.store=true weights=synthetic": "task.store has no effect with weights=synthetic",
    "task=acceptance task.store=true model=local model.path=DIR draft=tiny-draft": "local names any folder: write an",
    "task=acceptance task.longest=0": "task.longest=0 must be 1 to 64",
    "task=acceptance task.drafts=[tiny-drafts]": "unknown name in task.drafts 'tiny-drafts'",
    "task=acceptance draft=none": "task=acceptance needs a draft: give draft=NAME, or drafts=[NAME,...]",
    "task=acceptance task.temperatures=[0.5,-1]": "-1.0 must be 0 or more",
    "task=acceptance task.temperatures=[0.5,0.5]": "has one twice",
    "task=acceptance task.temperatures=[0.5] sampling.temperature=1": "sampling.temperature has no effect with",
    "task=acceptance speculation.overlap=true placement=own_gpu": "one after the other: leave speculation.overlap out",
    "task=acceptance draft.window=9": "reads drafts that see the whole text: leave draft.window out",
    "task=acceptance task.trees=[2x2,2x]": "task.trees=['2x2', '2x']: '2x' is not the shape of a tree",
    "task=acceptance task.drafts=[tiny-draft,ngram] task.trees=[dynamic]": "and draft=ngram has none: give",
    "task=acceptance task.trees=[2x1] sampling.repetition_penalty=1.2": "task.trees=2x1 needs sampling without penalt",
    "task=acceptance speculation.forced_lengths=[1]": "texts of task=acceptance must be the target's",
    "task=acceptance logprobs=1": "logprobs has no effect on task=acceptance",
    "task=acceptance task.texts=. num_samples=9": "num_samples has no effect with task.texts=., whose texts",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    if "ngram" in words:
        need("copies")
    check_refused(words, sentence)


def test_the_first_of_the_drafts_is_that_of_the_run_unless_one_is_given() -> None:
    for extension in ("copies", "heads"):
        need(extension)
    config, _ = compose_run("task=acceptance", "task.drafts=[ngram,tiny-draft]")
    assert [*drafts_of(config)] == ["ngram", "tiny-draft"]
    config, _ = compose_run("task=acceptance", "draft=tiny-eagle", "task.drafts=[tiny-draft,tiny-eagle]")
    assert [*drafts_of(config)] == ["tiny-eagle", "tiny-draft"]
    config, _ = compose_run("task=acceptance", "task.temperatures=[0.5,1.0]", "num_samples=3")
    assert config.num_samples == 6
