"""Tests of what the formats of several extensions have in common, which need all of these extensions."""

import pytest

from llama_ssp.manifest import present

MISSING = sorted({"bitsandbytes", "eight_bits", "four_bits"} - {*present()})
of_all_formats = pytest.mark.skipif(bool(MISSING), reason=f"needs llama_ssp/extensions/{', '.join(MISSING)}")
