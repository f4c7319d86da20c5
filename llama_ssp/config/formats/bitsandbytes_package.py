"""The package that two formats need."""

from llama_ssp.config.formats.format import Package

BITSANDBYTES = Package(
    name="bitsandbytes", install=".venv/bin/python -m pip install -e '.[bitsandbytes]' -c .venv/constraints.txt"
)
SCALE_BYTES = 4  # fp32
