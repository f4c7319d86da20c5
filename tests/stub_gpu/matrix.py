"""On the stub device: decodes with every setting, and says what was captured and what was at fault.

`python -m tests.stub_gpu.matrix OUT` writes what each setting of each group left to OUT, as JSON.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding import load_pair, run_config
from llama_ssp import Pair, catalogue
from llama_ssp.api.arguments import draft_model, vocabulary_of
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.schema import DeviceKind, SpeculationConfig, VerificationConfig
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers import other_tokenizer
from tests.helpers.extensions import copies
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer
from tests.stub_gpu import device
from tests.stub_gpu.device import Record
from tests.stub_gpu.settings import ANOTHER_TOKENIZER, GROUPS, HEAD, NGRAM, PLAIN, Group, Setting

CONTEXT = 1024
NEW_TOKENS = 16


def requests_for(num_rows: int) -> list[Request]:
    return [
        Request(index=row, prompt_ids=tuple(range(5, 25 + row)), max_new_tokens=NEW_TOKENS) for row in range(num_rows)
    ]


@torch.inference_mode()
def decode_twice(decoder: Decoder, requests: Sequence[Request], *, num_pieces: int) -> dict[str, Any]:
    """Decode twice, with rounds of so many graphs; returns what this left.

    Whether rounds run as graphs and no capture failed; the faults of both runs and of the warm-up; how many rows got
    all of their tokens; what the host did from a round in the middle of the second run to the next one, without looks
    at events; and the kinds of the nodes of each graph of that round, in the order of their launches.
    """
    logs, finished = [device.log()], set[int]()
    for _ in range(2):
        device.reset()
        finished = {
            update.completion.request.index
            for updates in decoder.run(requests)
            for update in updates
            if len(update.completion.token_ids) == NEW_TOKENS
        }
        logs.append(device.log())
    device.reset()
    inside = _round_in_the_middle(logs[-1], num_pieces)
    graphs = [device.graph(int(record.text)) for record in inside if record.kind == "replay"]
    executor = decoder.executor
    return {
        "is_captured": isinstance(executor, GraphExecutor) and not executor.failed,
        "faults": [record.text for log in logs for record in log if record.kind == "fault"],
        "finished": len(finished),
        "between": [f"{record.kind} {record.text}" for record in inside if record.kind != "poll"],
        "nodes": [[node.kind for node in graph] for graph in graphs],
    }


def _round_in_the_middle(records: Sequence[Record], num_pieces: int) -> Sequence[Record]:
    """From its first replay to that of the next round; empty if too little was replayed."""
    places = [place for place, record in enumerate(records) if record.kind == "replay"]
    if len(places) < 4 * num_pieces:
        return []
    first = len(places) // 2 // num_pieces * num_pieces
    return records[places[first] : places[first + num_pieces]]


def load_group(group: Group, folder: Path) -> Pair:
    entries = [catalogue.load("tiny"), catalogue.load("tiny-eagle" if group.family == HEAD else "tiny-draft")]
    if group.family not in {None, HEAD}:
        _save(group.family, folder)
        entries = [ModelConfig(name="local", path=str(folder / part)) for part in ("target", "draft")]
    target, draft = (replace(entry, dtype=Dtype[group.dtype], quantization="none") for entry in entries)
    drafter = draft_model(draft, vocabulary_of("own" if group.family == ANOTHER_TOKENIZER else "same"))
    config = run_config(replace(target, quantization=group.quantization), draft, device=DeviceKind.cuda)
    return load_pair(replace(config, draft=drafter))


def _save(family: str, folder: Path) -> None:
    if family == ANOTHER_TOKENIZER:
        other_tokenizer.save_pair(folder)
        return
    for part in ("target", "draft"):
        build_checkpoint(folder / part, family, max_position_embeddings=CONTEXT)
        save_tokenizer(folder / part, VOCAB_SIZE)


def decode(pair: Pair, setting: Setting) -> dict[str, Any]:
    config = replace(
        pair.config,
        sampling=setting.sampling,
        verification=VerificationConfig(rule=setting.rule),
        speculation=SpeculationConfig(num_draft_tokens=setting.num_draft_tokens, tree=setting.tree),
        batch_size=setting.batch_size,
        draft=copies() if setting.drafter == NGRAM else pair.config.draft,
    )
    decoder = build_decoder(pair.models, config, speculative=setting.drafter != PLAIN)
    if setting.breaks:
        verifier = decoder.round.verifier
        verifier.verify = _reading(verifier.verify)  # type: ignore[method-assign]
    requests = requests_for(setting.batch_size)
    with torch.inference_mode():
        make_ready(decoder, requests, config, comm=pair.models.mesh.world)
    device.reset()
    return decode_twice(decoder, requests, num_pieces=1 if setting.drafter == PLAIN else 2)


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that then reads a value of its result on the host."""

    def reading(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        float(result[0].sum())
        return result

    return reading


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    left = {}
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            pair = load_group(group, Path(folder))
            left[group.name] = {setting.name: decode(pair, setting) for setting in group.settings}
    Path(sys.argv[1]).write_text(json.dumps(left))


if __name__ == "__main__":
    main()
