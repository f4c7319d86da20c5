"""Heads that their trainers' classes have written draft here as in those classes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.rooms.heads.one_pass_drafter import OnePassDrafter
from llama_ssp.rooms.heads.sources import HeadSource
from tests.helpers import head_drafts
from tests.helpers.draft_heads import inspect_pair
from tests.helpers.head_drafts import NUM_DRAFTED, Seen
from tests.helpers.lanes import slow
from tests.helpers.models import build_checkpoint
from tests.helpers.one_pass_heads import DIM, LAYERS, VOCABULARY, WIDTH
from tests.rooms.heads.authors import NEEDED, SELECTING, flat_head, flat_logits

pytestmark = NEEDED
PROMPTS = ((5, 100, 17, 4, 56), (31,), tuple(range(40, 70)))
_BOTH = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, dict[str, Any]] = {
    "all": {},
    "in both directions": {"is_causal": False},
    "causal": {"is_causal": True},
    "window": {"layer_types": _BOTH, "sliding_window": 5, "use_sliding_window": True},
    "window of both": {"layer_types": _BOTH, "sliding_window": 3, "use_sliding_window": True, "is_causal": False},
    "switched off": {"layer_types": _BOTH, "sliding_window": 5},
}
FACTORS = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}


def target_in(folder: Path, family: str = "llama") -> Any:  # noqa: ANN401 - a model of transformers
    """Save a random target; returns it as the library has it."""
    build_checkpoint(folder / "target", family, hidden_size=WIDTH, head_dim=DIM, vocab_size=VOCABULARY,
                     num_hidden_layers=6)  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32")


def decode(folder: Path, seen: Seen | None = None, **how: Any) -> list[Any]:
    """Texts of the pair in a folder; see `head_drafts.decode`."""
    target, origin = inspect_pair(folder)
    assert isinstance(origin, HeadSource)
    runner = load_model(Loading(target, dtype=torch.float32))
    head = load_model(Loading(origin, dtype=torch.float32, target=runner))
    given: dict[str, Any] = {"width": WIDTH, "prompts": PROMPTS, "seen": seen} | how
    return head_drafts.decode(runner, OnePassDrafter, head, origin.layers, **given)


@pytest.mark.parametrize(
    ("version", "windows", "tree"),
    [
        *((2, windows, None) for windows in WINDOWS), (1, "window of both", None), (1, "in both directions", None),
        (2, "window of both", "2x2x1"), slow(1, "window", None),
    ],
)  # fmt: skip
def test_heads_of_dflash_draft_as_in_their_authors_classes(
    version: int, windows: str, tree: str | None, tmp_path: Path
) -> None:
    library, seen = target_in(tmp_path), Seen()
    more = SELECTING if version == 2 else {}
    more |= FACTORS if windows == "causal" else {}
    head = flat_head(tmp_path / "head", version, windows=WINDOWS[windows], **more)
    decode(tmp_path, seen, batch_size=2, tree=tree)
    wanted = partial(flat_logits, head, library, num=NUM_DRAFTED)
    assert head_drafts.check(seen, library, LAYERS, tree, wanted) > 40
