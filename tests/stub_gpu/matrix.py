"""On the stub device: decodes with every setting of some groups, and says what was captured and what was at fault.

`python -m tests.stub_gpu.matrix OUT GROUP...` writes what each setting left to OUT, as JSON.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding import load_pair, run_config
from llama_ssp import Pair, catalogue
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.run.decoders import build_decoder
from llama_ssp.run.tuning import tune
from llama_ssp.settings.drafters import NGRAM_DRAFT, DraftTokenizer, ModelDraftConfig, NgramConfig
from llama_ssp.settings.schema import MODEL_DRAFT, DeviceKind, SpeculationConfig, VerificationConfig
from tests.helpers import other_tokenizer
from tests.helpers.models import VOCAB_SIZE, build_checkpoint
from tests.helpers.tokenizers import save_tokenizer
from tests.stub_gpu import device
from tests.stub_gpu.decoded import Left, decode_twice, requests_for
from tests.stub_gpu.settings import ANOTHER_TOKENIZER, GROUPS, HEAD, NGRAM, PLAIN, Group, Setting

CONTEXT = 1024


def load_group(group: Group, folder: Path) -> Pair:
    """Load the pair of a group onto the stub device."""
    entries = [catalogue.load("tiny"), catalogue.load("tiny-eagle" if group.family == HEAD else "tiny-draft")]
    if group.family not in {None, HEAD}:
        _save(group.family, folder)
        entries = [ModelConfig(name="local", path=str(folder / part)) for part in ("target", "draft")]
    target, draft = (replace(entry, dtype=Dtype[group.dtype], quantization="none") for entry in entries)
    tokenizer = DraftTokenizer.own if group.family == ANOTHER_TOKENIZER else DraftTokenizer.same
    drafter = ModelDraftConfig(kind=MODEL_DRAFT, model=draft, tokenizer=tokenizer)
    config = run_config(replace(target, quantization=group.quantization), draft, device=DeviceKind.cuda)
    return load_pair(replace(config, draft=drafter))


def _save(family: str, folder: Path) -> None:
    if family == ANOTHER_TOKENIZER:
        other_tokenizer.save_pair(folder)
        return
    for part in ("target", "draft"):
        build_checkpoint(folder / part, family, max_position_embeddings=CONTEXT)
        save_tokenizer(folder / part, VOCAB_SIZE)


def decode(pair: Pair, setting: Setting) -> Left:
    """Decode twice with a setting."""
    config = replace(
        pair.config,
        sampling=setting.sampling,
        verification=VerificationConfig(rule=setting.rule),
        speculation=SpeculationConfig(num_draft_tokens=setting.num_draft_tokens, tree=setting.tree),
        batch_size=setting.batch_size,
        draft=NgramConfig(kind=NGRAM_DRAFT) if setting.drafter == NGRAM else pair.config.draft,
    )
    decoder = build_decoder(pair.models, config, speculative=setting.drafter != PLAIN)
    if setting.breaks:
        verifier = decoder.round.verifier
        verifier.verify = _reading(verifier.verify)  # type: ignore[method-assign]
    requests = requests_for(setting.batch_size)
    with torch.inference_mode():
        decoder.make_room(requests)
        tune(decoder, config, comm=pair.models.mesh.world, num_slots=256)
    device.reset()
    return decode_twice(decoder, requests, num_pieces=1 if setting.drafter == PLAIN else 2)


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that then reads a value of its result on the host."""

    def reading(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - those of the function
        result = function(*arguments, **named)
        float(result[0].sum())
        return result

    return reading


def main() -> None:
    """Decode with all settings of the named groups."""
    out, names = Path(sys.argv[1]), sys.argv[2:]
    logging.basicConfig(level=logging.WARNING)
    left = {}
    for group in GROUPS:
        if group.name in names:
            with tempfile.TemporaryDirectory() as folder:
                pair = load_group(group, Path(folder))
                left[group.name] = {setting.name: asdict(decode(pair, setting)) for setting in group.settings}
    out.write_text(json.dumps(left))


if __name__ == "__main__":
    main()
