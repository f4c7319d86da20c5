"""Tests of what the formats of several rooms have in common, which need all of these rooms."""

import pytest

from llama_ssp.manifest import present

ROOMS = {"bitsandbytes", "eight_bits", "four_bits"}
of_all_formats = pytest.mark.skipif(not {*present()} >= ROOMS, reason="needs the rooms of all storage formats")
