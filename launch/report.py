"""`llama-ssp report` as a file, for a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llama_ssp.run.commands.program import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
