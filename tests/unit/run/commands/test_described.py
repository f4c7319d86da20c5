"""What help says of settings stands in the fields of their dataclasses."""

from dataclasses import dataclass

from llama_ssp.catalogue import ModelConfig
from llama_ssp.fields import made, required, setting
from llama_ssp.run.commands.help import settings_of


@dataclass(kw_only=True)
class Words:
    """Settings of a plugin."""

    least: int = required("how many.")
    most: int = setting(2, "or at most.")
    names: list[str] = made(list, "which.")
    other: int = 3


def test_fields_have_their_default_and_their_help() -> None:
    assert Words(least=1) == Words(least=1, most=2, names=[], other=3)
    found = {one.key: (one.default, one.meaning) for one in settings_of(Words, "words.")}
    assert found == {
        "words.least": ("", "how many."), "words.most": ("2", "or at most."), "words.names": ("[]", "which."),
        "words.other": ("3", ""),
    }  # fmt: skip


def test_what_only_files_say_is_no_setting() -> None:
    keys = [one.key for one in settings_of(ModelConfig, "model.")]
    assert "model.quantization" in keys
    assert not any("stored_format" in key for key in keys)
