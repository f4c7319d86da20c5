"""On the stub device: reads prompts of several lengths, packed and padded, and says what was launched.

`python -m tests.stub_gpu.prefills` prints as JSON, for both ways, how many operations the device was given, how many
tokens the rotary kernel turned in all layers, and the faults.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from llama_ssp.run.decoders import build_decoder
from llama_ssp.speculate.engine.state import Request
from tests.stub_gpu import device
from tests.stub_gpu.matrix import load_group
from tests.stub_gpu.settings import Group

LENGTHS = (600, 20, 20, 20)


def read(*, is_packed: bool) -> dict[str, object]:
    """Admit all prompts at once into a decoder that has done so before, and reads them again."""
    with tempfile.TemporaryDirectory() as folder:
        pair = load_group(Group(name="fp16", settings=()), Path(folder))
    pair.models.target.packs_prompts = is_packed
    decoder = build_decoder(pair.models, pair.config, speculative=False)
    decoder.batch_size, decoder.reuses = len(LENGTHS), False
    requests = [
        Request(index=row, prompt_ids=tuple(range(5 + row, 5 + row + length)), max_new_tokens=1)
        for row, length in enumerate(LENGTHS)
    ]
    records = []
    with torch.inference_mode():
        for _ in range(2):
            device.reset()
            for _ in decoder.run(requests):
                pass
            records = device.log()
    launches = [record for record in records if record.kind in {"kernel", "triton", "gemm"}]
    turned = [record for record in launches if "rotate_write" in record.text]
    return {
        "launches": len(launches),
        "turned": [int(record.text.partition(" ")[0].split(",")[0]) for record in turned],
        "faults": device.faults(records),
    }


def main() -> None:
    """Print both."""
    found = {name: read(is_packed=name == "packed") for name in ("packed", "padded")}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
