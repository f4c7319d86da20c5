"""`llama-ssp run` as a file, for torchrun, srun and a checkout; without `ranks=`, plain python has one rank."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
if (_ROOT / "llama_ssp").is_dir():  # a checkout; a wheel has this file inside the package
    sys.path.insert(0, str(_ROOT))

from llama_ssp.run.commands.program import main  # noqa: E402 - found by the lines above

if __name__ == "__main__":
    main(["run", *sys.argv[1:]], num_ranks=1)
