"""The choice that a run folder keeps for when a run with overlapped rounds is resumed."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.session.draft_length import _waits


def test_the_kept_choice_is_read_back() -> None:
    assert _waits('{"waits": true, "draft_s": 0.1, "forward_s": 0.2}')
    assert not _waits('{"waits": false}')


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"waits": 1}'])
def test_a_damaged_choice_is_an_error_that_says_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"overlap\.json of run_dir is damaged: delete it to measure again"):
        _waits(text)
