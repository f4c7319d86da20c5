"""`speculation.overlap`: what it needs, said in one sentence each."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings import checks
from tests.unit.settings.conftest import Compose

OVERLAP = "speculation.overlap=true"
APART = [OVERLAP, "placement=own_gpu"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([OVERLAP], "needs a draft on ranks of its own, and placement.draft.kind=one_rank was given: use placement="),
        ([OVERLAP, "placement=auto"], "needs a draft on ranks of its own, and placement=auto was given"),
        ([OVERLAP, "draft=ngram"], "needs a draft model, and draft=ngram has none: give one with draft=NAME"),
        ([*APART, "speculation.num_draft_tokens=auto"], "needs one K for all rounds, and speculation.num_draft_tokens"),
        (
            [*APART, "speculation.num_draft_tokens=auto", "draft.fallback=ngram"],
            "drafts with the model alone: leave draft.fallback=ngram out",
        ),
        ([*APART, "draft=llama3_1B", "draft.tokenizer=own"], "needs a draft with the target's tokenizer"),
        (
            [OVERLAP, "task=generate", "draft=none"],
            "speculation.overlap has no effect without a draft: give one with draft=NAME",
        ),
    ],
)
def test_what_cannot_overlap_is_an_error_that_says_what_would(
    compose_run: Compose, overrides: list[str], sentence: str
) -> None:
    config, explicit = compose_run(*overrides)
    with pytest.raises(ConfigError) as raised:
        checks.check(config, explicit, world_size=2)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draft_on_its_own_ranks_may_overlap(compose_run: Compose, device: str) -> None:
    config, explicit = compose_run(*APART, f"device={device}")
    checks.check(config, explicit, world_size=2)
    assert config.speculation.overlap
