"""A process that forks after it has loaded a pair, on one rank or on several that it starts."""

import re
import subprocess
import sys
from pathlib import Path

from llama_ssp import load
from tests.helpers.starters import environment

# A child that forks gets an error and its end ends nothing; then its parent has its own answer.
_FORK = """
import os, sys
from llama_ssp import load
from llama_ssp.errors import ConfigError
ranks = int(sys.argv[1])
pair = load("tiny", "tiny-draft", **({"ranks": ranks} if ranks > 1 else {}))
def say(seed):
    print(pair.generate("import os\\n", max_new_tokens=12, seed=seed)[0].token_ids, flush=True)
say(1)
if child := os.fork():
    os.waitpid(child, 0)
    say(2)
else:
    try:
        say(3)
    except ConfigError as error:
        print(error, flush=True)
        pair.close()
"""


def check_forks(num_ranks: int, *, folder: Path) -> None:
    """Check that the pair belongs to the process that loaded it."""
    words = [sys.executable, "-W", "ignore", "-c", _FORK, f"{num_ranks}"]
    ended = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    first, refused, second = ended.stdout.splitlines()
    assert re.fullmatch(r"this pair belongs to process \d+, which loaded it: load one in this process", refused)
    wanted = load("tiny", "tiny-draft")
    for said, seed in ((first, 1), (second, 2)):
        assert said == str(wanted.generate("import os\n", max_new_tokens=12, seed=seed)[0].token_ids)
    assert ended.stderr == ""
