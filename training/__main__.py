"""Makes the shipped pair from nothing: tokenizer, target, draft, measurement.

What it does: runs the phases one after the other, each in a process of its own.
What it does not do: hold any recipe; each phase has its own options and defaults.
"""

import argparse
import subprocess
import sys
from pathlib import Path

# From here on training needs text of the target's own.
AGREEMENT_FROM = "0.57"
MINUTES = {"train": 73.0, "generate": 3.0, "distill": 12.0}


def phase(module: str, *arguments: str) -> None:
    """Runs one phase and stops everything when it fails."""
    subprocess.run([sys.executable, "-m", f"training.{module}", *arguments], check=True)


def main() -> None:
    """Runs all phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="checkpoints and logs, outside the repository")
    parser.add_argument("--out", type=Path, default=Path("llama_ssp/shipped"), help="where the pair goes")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--compile", action="store_true", help="a fifth faster; needs a C++ compiler")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the minutes of every phase")
    options = parser.parse_args()
    places = ["--scratch", str(options.scratch), "--out", str(options.out)]
    threads = ["--threads", options.threads]
    speed = threads + ["--compile"] * options.compile
    minutes = {name: ["--minutes", str(value * options.scale)] for name, value in MINUTES.items()}
    phase("train", *places, *speed, *minutes["train"], "--until", AGREEMENT_FROM)
    phase("generate", *places, *threads, *minutes["generate"])
    phase("train", *places, *speed, *minutes["train"], "--resume")
    phase("generate", *places, *threads, *minutes["generate"], "--seed", "201")
    phase("distill", *places, *speed, *minutes["distill"])
    phase("agreement", "--pair", str(options.out), *threads)
    models = ["--target", str(options.out / "tiny"), "--draft", str(options.out / "tiny-draft")]
    phase("measure", *models, "--temperatures", "0", "0.5", "0.8", "1", "--scores", *threads)


if __name__ == "__main__":
    main()
