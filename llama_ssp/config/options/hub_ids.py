"""Ids of the Hugging Face hub, which name options of `model` and `draft` as files do."""

import re

GROUPS = ("model", "draft")
_PART = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}", flags=re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name`; whether the hub has it shows when its files are read."""
    return _ID.fullmatch(name) is not None
