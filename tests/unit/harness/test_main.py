"""The command without its optional package."""

import pytest

from llama_ssp.harness import __main__ as harness


def test_without_the_harness_a_sentence_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _name: None)
    assert harness.main() == 2
    assert capsys.readouterr().err == f"lm-evaluation-harness is not installed: {harness.INSTALL}\n"
