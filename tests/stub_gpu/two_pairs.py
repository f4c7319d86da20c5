"""On two stub devices: a pair on each, of which the first one loaded decodes first, and the other one in a thread.

`python -m tests.stub_gpu.two_pairs` prints as JSON how many graphs were captured, and the faults.
"""

import json
import sys
from threading import Thread

from llama_ssp import Pair, load
from tests.stub_gpu import device


def decode(pair: Pair) -> None:
    """Call the pair often enough for captures and replays."""
    for seed in range(3):
        pair.generate("import os", max_new_tokens=8, seed=seed)


def main() -> None:
    """Decode with both."""
    first, second = (load("tiny", "tiny-draft", device=f"cuda:{number}", dtype="fp16") for number in range(2))
    device.reset()
    decode(first)
    thread = Thread(target=decode, args=(second,))
    thread.start()
    thread.join()
    log = device.log()
    num_captured = sum(record.kind == "captured" for record in log)
    sys.stdout.write(json.dumps({"captured": num_captured, "faults": device.faults(log)}) + "\n")


if __name__ == "__main__":
    main()
