"""On the stub device: decodes batches whose rows have settings of their own, and says what this took of the memory.

`python -m tests.stub_gpu.mixtures OUT` writes it to OUT, as JSON. The environment's STUB_GPU_CONTROL names a folder.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.decoding import load_pair, run_config
from llama_ssp.api.arguments import draft_model, vocabulary_of
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import make_spec
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.schema import DeviceKind, RunConfig, SamplingConfig, SpeculationConfig
from llama_ssp.speculate.engine.executors import GraphExecutor, Recorder
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.helpers.models import build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_ssp import Pair

NUM_ROWS, NUM_DRAFTED, VOCABULARY, NUM_MIXTURES, NEW_TOKENS = 32, 4, 100_000, 40, 12


class Mixture(NamedTuple):
    """Rows of a batch that are greedy, have top-p, have a penalty; and whether one takes fewer drafted tokens."""

    num_greedy: int
    num_cut: int
    num_penalized: int
    limits: bool

    def requests(self) -> list[Request]:
        made = []
        for row in range(NUM_ROWS):
            sampling = SamplingConfig(
                temperature=0.0 if row < self.num_greedy else 1.0,
                top_p=0.9 if row < self.num_cut else None,
                frequency_penalty=0.5 if row < self.num_penalized else 0.0,
            )
            most = 2 if self.limits and row == NUM_ROWS - 1 else None
            made.append(
                Request(
                    index=row,
                    prompt_ids=tuple(range(5, 25 + row)),
                    max_new_tokens=NEW_TOKENS,
                    sampling=sampling,
                    num_draft_tokens=most,
                    ignores_eos=True,
                )
            )
        return made


PLAIN, FULL = Mixture(0, 0, 0, False), Mixture(0, 17, 17, False)
"""Without steps, and with all of them for all rows."""


def mixtures() -> list[Mixture]:
    counts = 0, 1, 3, 17
    every = [Mixture(*each) for each in product(counts[:2], counts, counts, (False, True))]
    return [PLAIN, FULL, *[each for each in every if each not in {PLAIN, FULL}]][:NUM_MIXTURES]


def load(folder: Path) -> "tuple[Pair, RunConfig]":
    for part in ("target", "draft"):
        build_checkpoint(folder / part, "llama", vocab_size=VOCABULARY, max_position_embeddings=256)
        save_tokenizer(folder / part, VOCABULARY)
    target, draft = (
        ModelConfig(name="local", path=str(folder / part), dtype=Dtype.fp16) for part in ("target", "draft")
    )
    config = run_config(target, draft, device=DeviceKind.cuda)
    pair = load_pair(replace(config, draft=draft_model(draft, vocabulary_of("same"))))
    return pair, replace(
        pair.config,
        sampling=SamplingConfig(temperature=1.0, by_row=True),
        batch_size=NUM_ROWS,
        speculation=SpeculationConfig(num_draft_tokens=NUM_DRAFTED),
        max_new_tokens=NEW_TOKENS,
    )


def graph_bytes() -> int:
    """Bytes of the pools of graphs."""
    return sum(part["total_size"] for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0))


def finish(decoder: Decoder, mixture: Mixture) -> int:
    """Decode a mixture; returns how many rows got all of their tokens."""
    done = {
        update.completion.request.index
        for updates in decoder.run(mixture.requests())
        for update in updates
        if len(update.completion.token_ids) == NEW_TOKENS
    }
    return len(done)


def measured(pair: "Pair", config: RunConfig) -> dict[str, Any]:
    decoder = build_decoder(pair.models, config, speculative=True)
    decoder.make_room(PLAIN.requests())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    pools, finished = [], []
    for mixture in mixtures():
        finished.append(finish(decoder, mixture))
        pools.append(graph_bytes())
    executor: Any = decoder.executor
    spec = make_spec(config, world_size=1, device="cuda", prompt_tokens=20 + NUM_ROWS)
    (without,), (planned,) = (memory(replace(spec, by_row=by_row), hardware.load("h200")) for by_row in (False, True))
    return {
        "pools": pools,
        "finished": finished,
        "failed": len(executor.failed),
        "graphs": len(executor.captured),
        "most_bytes": torch.cuda.max_memory_reserved() - before,
        "planned_bytes": planned.logits_bytes,
        "planned_plain_bytes": without.logits_bytes,
    }


@contextmanager
def full_captures(full: Path, refused: Callable[[], bool]) -> "Iterator[None]":
    """Let the device have no memory left while some stages are captured."""
    record = Recorder.record

    def recording(recorder: Recorder, *how: Any) -> Any:
        if refused():
            full.touch()
        try:
            return record(recorder, *how)
        finally:
            full.unlink(missing_ok=True)

    Recorder.record = recording  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Recorder.record = record  # type: ignore[method-assign]


def without_memory(pair: "Pair", config: RunConfig) -> dict[str, Any]:
    """What six batches left: the captures of the second and third mixture find no memory, and the fourth's do."""
    decoder = build_decoder(pair.models, config, speculative=True)
    executor = decoder.executor
    assert isinstance(executor, GraphExecutor)
    third, fourth = Mixture(0, 1, 0, False), Mixture(0, 17, 0, False)
    now, finished, graphs = PLAIN, [], []
    with full_captures(Path(os.environ["STUB_GPU_CONTROL"]) / "full", lambda: now in {FULL, third}):
        for now in (PLAIN, third, FULL, fourth, third, PLAIN):
            finished.append(finish(decoder, now))
            graphs.append(len(executor.captured))
    return {"finished": finished, "graphs": graphs, "failed": sorted(name for name, _ in executor.failed)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        pair, config = load(Path(folder))
        left = {"measured": measured(pair, config), "without memory": without_memory(pair, config)}
    Path(sys.argv[1]).write_text(json.dumps(left))


if __name__ == "__main__":
    main()
