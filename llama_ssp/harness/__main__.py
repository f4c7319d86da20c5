"""`python -m llama_ssp.harness`: the command line of lm-evaluation-harness, which then knows `--model llama_ssp`."""

import sys
from importlib import import_module
from importlib.util import find_spec

from llama_ssp.errors import ConfigError, SspError

INSTALL = ".venv/bin/python -m pip install -e '.[lm-eval]' -c .venv/constraints.txt"


def main() -> int:
    """Run the harness with the arguments of this process; returns the exit code, 2 after an error of the user."""
    try:
        if find_spec("lm_eval") is None:
            raise ConfigError(f"lm-evaluation-harness is not installed: {INSTALL}")
        from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415 - an optional package

        # Both register models; the harness does not register its own once there are others.
        for module in ("lm_eval.models", "llama_ssp.harness.model"):
            import_module(module)
        cli_evaluate()
    except SspError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
