"""The memory of four ranks while each loads its part of 1 GB: both decoders, all precisions, a cast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llama_ssp.storage.formats import formats
from llama_ssp.weights.checkpoint import INDEX_FILE, Checkpoint, shape_of
from tests.helpers.extensions import module_of
from tests.helpers.models import tiny_config
from tests.helpers.repository import ROOT

NUM_RANKS = 4
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 8192}
FAMILIES: dict[str, tuple[dict[str, int], list[tuple[str, str]]]] = {
    "llama": (
        {"num_hidden_layers": 38, "num_key_value_heads": 16},
        [*((name, "bf16") for name, form in formats().items() if not form.is_stored_alone), ("none", "fp32")],
    ),
    "gpt_neox": ({"num_hidden_layers": 50}, [("none", "bf16"), ("none", "fp32")]),
}
"""The lean decoder and the library's modules: their layers, and the precisions to load."""
# One fork per rank, all at the same time. Imports, checks and compiled products, which do not grow with a model, come
# before that.
MEASURE = """
import json, os, sys, threading, traceback
from pathlib import Path
import torch
from llama_ssp.registry import operators
from llama_ssp.kernels.linear import can_halve
from llama_ssp.catalogue import Dtype
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.models.loading import check_model, load_model
from llama_ssp.models.weights import Loading
from llama_ssp.storage.formats import formats
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.manifest import present
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.weights import model_bytes, shares

folder, num_ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
if "bitsandbytes" in present():
    from llama_ssp.extensions.bitsandbytes.linear import bitsandbytes
    bitsandbytes()
for form in formats().values():
    operators.made("packed_block", "cpu", form)
check_model(inspect(folder), num_ranks=num_ranks)

def measure(rank, form, name):
    torch.set_num_threads(1)  # after a fork torch makes its pool again, which two threads must not do at once
    dtype = Dtype[name]
    stored = Dtype.bf16 if name == "fp32" and can_halve() else Dtype.auto
    done, peaks, before = threading.Event(), [0], anonymous_bytes()
    def watch():
        while not done.wait(0.0005):
            peaks.append(anonymous_bytes())
    watcher = threading.Thread(target=watch)
    watcher.start()
    comm = Comm(rank=rank, size=num_ranks)
    loading = {"dtype": getattr(torch, dtype.value), "precision": Precision(quantization=form)}
    runner = load_model(Loading(inspect(folder), comm=comm, **loading))
    done.set()
    watcher.join()
    model = PlannedModel(name=form, shape=inspect(folder).shape, dtype=dtype, quantization=form, stored=stored)
    share = shares(model.shape, num_ranks=num_ranks, quantization=form)[rank]
    planned = model_bytes(share, model, device="cpu").total_bytes
    line = json.dumps([form, name, rank, max(peaks) - before, planned])
    os.write(1, f"{line}\\n".encode())  # at once, since four ranks share the pipe

for form, name in cases:
    children = []
    for rank in range(num_ranks):
        if child := os.fork():
            children.append(child)
            continue
        try:
            measure(rank, form, name)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    for child in children:
        if status := os.waitpid(child, 0)[1]:
            print(form, "ended with", status, file=sys.stderr)
"""


def write_checkpoint(folder: Path, family: str) -> None:
    """A file per layer, as large models have; the values do not matter."""
    config = tiny_config(family, **SIZES, **FAMILIES[family][0])
    config.architectures = [{"llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM"}[family]]
    config.save_pretrained(folder)
    empty = module_of("modules.building").build_empty(
        Checkpoint(folder=folder, config=config, shape=shape_of(config), tensors={})
    )
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in empty.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"{part}.safetensors", {})[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.slow
@pytest.mark.distributed(NUM_RANKS)
@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_rank_takes_15_percent_more_than_its_shard_while_it_loads(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 1e9
    _, cases = FAMILIES[family]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(NUM_RANKS), json.dumps(cases)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == NUM_RANKS * len(cases), done.stderr
    for form, dtype, rank, peak_bytes, planned_bytes in measured:
        assert 0.9 < peak_bytes / planned_bytes <= 1.15, (form, dtype, rank)
