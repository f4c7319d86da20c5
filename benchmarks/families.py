"""Kinds of checkpoints against transformers: texts on 1, 2 and 3 ranks with and without a draft, and flags.

    .venv/bin/python -m benchmarks.families          prints the table
    .venv/bin/python -m benchmarks.families --write  writes docs/benchmarks/families.md

Checkpoints are tiny and random, those of the tests and some more. Ranks are threads. Texts are longer than windows.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.utils import logging as library_logging

from benchmarks.measured import markdown, page_of, show
from llama_ssp.architectures.family import record_of
from llama_ssp.errors import SspError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import check_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.flags import APART, EQUAL, NO_EFFECT, NOT_BUILT, NUM_POSITIONS, ON_ONE, REFUSED, flags_of, outcome
from tests.helpers.models import FAMILIES, build_checkpoint, load_ranks
from tests.helpers.texts import library_greedy, part_at_a_near_tie

_GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {name: size for name, size in FAMILIES["deepseek_v3"].items() if name.endswith(("_rank", "_dim", "_heads"))}
MORE: dict[str, dict[str, Any]] = {
    "bloom": {}, "codegen": {"rotary_dim": 4}, "diffllama": _GROUPED, "doge": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"num_key_value_heads": 4, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "falcon": {}, "flex_olmo": {"num_key_value_heads": 4, **_EXPERTS}, "gpt2": {}, "gpt_bigcode": {"n_head": 8},
    "gptj": {"rotary_dim": 4}, "granitemoeshared": _LOCAL | {"num_key_value_heads": 4, "shared_intermediate_size": 64},
    "hyperclovax": _GROUPED, "internlm3": _GROUPED, "iquestcoder": _GROUPED, "jais2": _GROUPED,
    "llama4_text": {"num_key_value_heads": 4, "num_local_experts": 4, "intermediate_size_mlp": 160},
    "mamba": {}, "mpt": {}, "opt": {"ffn_dim": 160}, "openai-gpt": {}, "persimmon": {},
    "phimoe": {"num_key_value_heads": 4} | _LOCAL, "biogpt": {},
    "vaultgemma": _GROUPED, "granite_swa": _GROUPED,
    "afmoe": _GROUPED | _EXPERTS, "exaone_moe": _GROUPED | _EXPERTS, "minimax_m2": _GROUPED | _LOCAL,
    "hunyuan_v1_moe": _GROUPED | {"num_experts": 4, "moe_topk": 2}, "glm4_moe_lite": FAMILIES["deepseek_v3"],
    "minicpm3": _LATENT, "granitemoe_swa": _GROUPED | _LOCAL,
    "mimo_v2_flash": _GROUPED | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1,
        "v_head_dim": 8, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"],
    },
    "laguna": _GROUPED | _EXPERTS | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "minimax_m3_vl_text": _GROUPED | _LOCAL,
    "gemma3n_text": FAMILIES["gemma4_text"] | {"intermediate_size": 160, "num_hidden_layers": 4},
    "solar_open": FAMILIES["glm4_moe"],
    "gemma4_unified_text": FAMILIES["gemma4_text"],
    "beam": _GROUPED | _EXPERTS | _SLIDING | {
        "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
    },
    "aria_text": _GROUPED | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": FAMILIES["deepseek_v3"],
    "cohere2_moe": _GROUPED | _EXPERTS | _SLIDING | {"moe_intermediate_size": 48},
    **dict.fromkeys(
        ("flint", "hy_v3", "kolibri1", "mellum"), _GROUPED | _EXPERTS | {"moe_intermediate_size": 48}
    ),
}  # fmt: skip
LENGTHS, BATCHES, NUM_NEW_TOKENS = (3, 14, 21, 9), (1, 4), 20


def texts_are_equal(model: PreTrainedModel, folder: Path, draft: Path, num_ranks: int) -> bool:
    """Whether all texts on so many ranks are transformers'; raises what loading raises."""
    origin = inspect(folder)
    check_model(origin, num_ranks=num_ranks)
    comms = thread_comms(num_ranks)
    targets, drafts = load_ranks(folder, comms), [load_ranks(draft, thread_comms(1))[0] for _ in comms]
    requests = [
        Request(index=index, prompt_ids=tuple(range(5, 5 + 3 * length, 3)), max_new_tokens=NUM_NEW_TOKENS)
        for index, length in enumerate(LENGTHS)
    ]

    def found(comm: Comm) -> list[list[int]]:
        decoders = [
            make_decoder(targets[comm.rank], each, batch_size=batch_size, comm=comm)
            for batch_size in BATCHES
            for each in (None, drafts[comm.rank])
        ]
        return [done.token_ids for decoder in decoders for done in complete(decoder, requests)]

    wanted = {
        request.index: library_greedy(model, request.prompt_ids, num_tokens=NUM_NEW_TOKENS) for request in requests
    }
    for texts in on_ranks(comms, found):
        for request, ids in zip(2 * len(BATCHES) * requests, texts, strict=True):
            own = wanted[request.index]
            try:
                part_at_a_near_tie(model, request.prompt_ids, own, ids[: len(own)])
            except AssertionError:
                return False
    return True


def row_of(kind: str, sizes: dict[str, Any]) -> list[object]:
    """One line of the table."""
    is_written = record_of(kind.partition(",")[0]).is_written
    with tempfile.TemporaryDirectory() as place:
        folder, draft = Path(place) / "target", Path(place) / "draft"
        model = build_checkpoint(folder, kind, **sizes)
        build_checkpoint(draft, kind, **sizes | {"num_hidden_layers": 1})
        cells: list[object] = [kind, "yes" if is_written else "no", ""]
        for num_ranks in (1, 2, 3):
            try:
                cells.append("equal" if texts_are_equal(model, folder, draft, num_ranks) else "**other**")
                is_lean = isinstance(load_ranks(folder, thread_comms(1))[0], LeanRunner)
                cells[2] = "lean decoder" if is_lean else "library modules"
            except SspError as error:
                cells.append(str(error).replace(place, "DIR").partition(" (")[0].partition(": ")[0])
    return cells


def flags_row(kind: str, sizes: dict[str, Any]) -> list[object]:
    """One line of the table of flags: their names by how ranks run them."""
    found: dict[str, list[str]] = {EQUAL: [], ON_ONE: [], REFUSED: [], NO_EFFECT: [], NOT_BUILT: []}
    for flag, changes in flags_of(kind, sizes).items():
        with tempfile.TemporaryDirectory() as place:
            found[outcome(kind, sizes, changes, Path(place))].append(flag or "as it is")
    return [kind, *(", ".join(flags) for flags in found.values())]


def main() -> None:
    """Check all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/families.md")
    parser.add_argument("kinds", nargs="*", help="only these")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    known = {kind: MORE.get(kind, {}) for kind in (*FAMILIES, *MORE) if kind in FAMILIES or kind in CONFIG_MAPPING}
    kinds = {kind: known[kind] for kind in arguments.kinds or known}
    rows = [row_of(kind, sizes) for kind, sizes in kinds.items()]
    num_equal = sum("equal" in row for row in rows)
    heads = ["kind", "record", "computed by", "1 rank", "2 ranks", "3 ranks"]
    of_flags = [flags_row(kind, sizes) for kind, sizes in kinds.items()]
    outcomes = ["kind", "equal on 1, 2 and 3 ranks", "equal on one, refused on more", REFUSED, NO_EFFECT, NOT_BUILT]
    text = page_of(
        "families", tokens=NUM_NEW_TOKENS, num_equal=num_equal, num_kinds=len(rows), table=markdown(heads, rows),
        flags=markdown(outcomes, of_flags), positions=NUM_POSITIONS, apart=APART,
    )  # fmt: skip
    show(text, page="families.md", is_written=arguments.write)


if __name__ == "__main__":
    main()
