"""The peers that live in this interpreter: `python -m benchmarks.gpu_peers.workers NAME SETTINGS`.

SETTINGS is JSON: `folders` of the target's and the draft's checkpoint, `num_draft_tokens`, `num_slots`, and
`gpt_fast`, the folder of its model.py and generate.py.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import transformers

from benchmarks.decoding import peers_of
from benchmarks.peer_process import Complete, serve
from llama_ssp import load
from llama_ssp.architectures.model_files import read_json
from llama_ssp.catalogue import CONFIG_FILE
from llama_ssp.reports.provenance import git_commit, versions
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.weights.hub import WEIGHTS

PLAIN, SPECULATIVE, DYNAMIC, STATIC, ASSISTED = "plain", "speculative", "dynamic cache", "static cache", "assisted"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Settings = dict[str, Any]
Prompts = Sequence[tuple[int, ...]]
_SIZES = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_local_heads": "num_key_value_heads",
    "dim": "hidden_size",
    "intermediate_size": "intermediate_size",
}


def written(settings: Settings) -> list[Path]:
    """The folders, once their weights are there."""
    folders = [Path(folder) for folder in settings["folders"]]
    while not all(any(folder.glob(WEIGHTS)) for folder in folders):
        time.sleep(0.1)
    return folders


def ours(settings: Settings) -> tuple[str, Complete]:
    """This program, through its library."""
    pair = load(*written(settings), dtype="bf16", device=DEVICE)
    pair.config.ignore_eos = True

    def complete(mode: str, prompts: Prompts, **more: Any) -> int | None:
        is_plain, num_draft_tokens = mode == PLAIN, settings["num_draft_tokens"]
        [done] = pair.generate(prompts, plain=is_plain, num_draft_tokens=num_draft_tokens, **more)
        return None if is_plain else len(done.accepted_lengths)

    return versions()["llama_ssp"] or "that is not installed", complete


def of_transformers(settings: Settings) -> tuple[str, Complete]:
    """Its `generate`; with a static cache it compiles a forward by itself."""
    transformers.utils.logging.set_verbosity_error()
    peers, num_draft_tokens = peers_of(written(settings), torch.bfloat16, DEVICE), settings["num_draft_tokens"]
    target = peers.target

    def complete(mode: str, prompts: Prompts, max_new_tokens: int, temperature: float, **_: object) -> int | None:
        forwards: list[None] = []
        hook = target.register_forward_hook(lambda *_: forwards.append(None)) if mode == ASSISTED else nullcontext()
        target.generation_config.cache_implementation = "static" if mode == STATIC else None
        drafted, sampling = num_draft_tokens if mode == ASSISTED else None, SamplingConfig(temperature=temperature)
        with hook:
            peers.ms_per_token(prompts, num_new_tokens=max_new_tokens, sampling=sampling, num_draft_tokens=drafted)
        return len(forwards) if mode == ASSISTED else None

    return transformers.__version__, complete


def gpt_fast(settings: Settings) -> tuple[str, Complete]:
    """Its `generate` with random weights, compiled as its `main` does.

    It has no drafted mode: in commit 32971d3 the shapes of `speculative_decode` do not fit.
    """
    sys.path.insert(0, settings["gpt_fast"])
    sys.modules["tokenizer"] = cast("ModuleType", SimpleNamespace(get_tokenizer=None))  # its own needs packages
    if not hasattr(torch.backends.cuda, "sdp_kernel"):  # newer torch has lost it
        vars(torch.backends.cuda)["sdp_kernel"] = lambda **_: nullcontext()
    code, models = map(import_module, ("generate", "model"))
    sizes = read_json(Path(settings["folders"][0]) / CONFIG_FILE)
    with torch.device("meta"):
        model = models.Transformer(models.ModelArgs(**{name: sizes[key] for name, key in _SIZES.items()}))
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    with DEVICE:
        model.setup_caches(max_batch_size=1, max_seq_length=settings["num_slots"])
    vars(code)["decode_one_token"] = torch.compile(code.decode_one_token, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def complete(prompts: Prompts, max_new_tokens: int, temperature: float, **_: object) -> None:
        [ids] = torch.tensor(prompts, dtype=torch.int, device=DEVICE)
        if max_new_tokens == 1:
            code.prefill(model, ids.view(1, -1), torch.arange(len(ids), device=DEVICE), temperature=temperature)
        else:
            more = {"interactive": False, "draft_model": None, "temperature": temperature}
            code.generate(model, ids, max_new_tokens, 1, **more)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return git_commit(Path(settings["gpt_fast"])) or "of an unknown commit", complete


PEERS = {"llama-ssp": ours, "transformers": of_transformers, "gpt-fast": gpt_fast}

if __name__ == "__main__":
    serve(lambda: PEERS[sys.argv[1]](json.loads(sys.argv[2])))
