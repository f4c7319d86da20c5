"""Kinds of checkpoints against transformers: texts on 1, 2 and 3 ranks with and without a draft, and flags.

    .venv/bin/python -m benchmarks.families          prints the table
    .venv/bin/python -m benchmarks.families --write  writes docs/benchmarks/families.md; of some KINDS, their rows

Checkpoints are tiny and random, those of the tests and some more. Ranks are threads. Texts are longer than windows.
"""

import argparse
import logging
import tempfile
import warnings
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils import logging as library_logging

from benchmarks.measured import PAGES, markdown, page_of, show
from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.reading import check_readable
from llama_ssp.errors import SspError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import check_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.flags import (
    APART,
    EQUAL,
    NO_EFFECT,
    NOT_BUILT,
    NUM_POSITIONS,
    ON_ONE,
    REFUSED,
    compare,
    flags_of,
    outcome,
    uncut,
)
from tests.helpers.library_kinds import EQUAL as EQUAL_TEXTS
from tests.helpers.library_kinds import TINY, every_kind, fitting, text_kinds, tiny_sizes
from tests.helpers.models import FAMILIES, SIZES, build_checkpoint, load_ranks, refusal, tiny_config
from tests.helpers.text_parts import CHUNKS, compare_texts, save_kind
from tests.helpers.texts import library_greedy, part_at_a_near_tie

_GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {name: size for name, size in FAMILIES["deepseek_v3"].items() if name.endswith(("_rank", "_dim", "_heads"))}
MORE: dict[str, dict[str, Any]] = {
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "diffllama": _GROUPED,
    "doge": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"num_key_value_heads": 4, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "falcon": {},
    "flex_olmo": {"num_key_value_heads": 4, **_EXPERTS},
    "gpt2": {},
    "gpt_bigcode": {"n_head": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoeshared": _LOCAL | {"num_key_value_heads": 4, "shared_intermediate_size": 64},
    "hyperclovax": _GROUPED,
    "internlm3": _GROUPED,
    "iquestcoder": _GROUPED,
    "jais2": _GROUPED,
    "llama4_text": _GROUPED | {"num_local_experts": 4, **CHUNKS},
    "mamba": {},
    "mpt": {},
    "opt": {"ffn_dim": 160},
    "openai-gpt": {},
    "persimmon": {},
    "phimoe": {"num_key_value_heads": 4} | _LOCAL,
    "biogpt": {},
    "vaultgemma": _GROUPED,
    "granite_swa": _GROUPED,
    "afmoe": _GROUPED | _EXPERTS,
    "exaone_moe": _GROUPED | _EXPERTS,
    "minimax_m2": _GROUPED | _LOCAL,
    "hunyuan_v1_moe": _GROUPED | {"num_experts": 4, "moe_topk": 2},
    "glm4_moe_lite": FAMILIES["deepseek_v3"],
    "minicpm3": _LATENT,
    "granitemoe_swa": _GROUPED | _LOCAL,
    "mimo_v2_flash": _GROUPED
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "v_head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "laguna": _GROUPED | _EXPERTS | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "minimax_m3_vl_text": _GROUPED | _LOCAL,
    "gemma3n_text": FAMILIES["gemma4_text"] | {"intermediate_size": 160, "num_hidden_layers": 4},
    "solar_open": FAMILIES["glm4_moe"],
    "gemma4_unified_text": FAMILIES["gemma4_text"],
    "beam": _GROUPED
    | _EXPERTS
    | _SLIDING
    | {
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "aria_text": _GROUPED | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": FAMILIES["deepseek_v3"],
    "cohere2_moe": _GROUPED | _EXPERTS | _SLIDING | {"moe_intermediate_size": 48},
    **dict.fromkeys(("flint", "hy_v3", "kolibri1", "mellum"), _GROUPED | _EXPERTS | {"moe_intermediate_size": 48}),
}
LENGTHS, BATCHES, NUM_NEW_TOKENS = (3, 14, 21, 9), (1, 4), 20
RANKS = 1, 2, 3
PAGE = "families.md"
OTHER, LATER = "**other**", "**accepted, then refused**"
"""Verdicts that no kind may have."""


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
        for num_ranks in RANKS:
            try:
                cells.append(EQUAL if texts_are_equal(model, folder, draft, num_ranks) else OTHER)
                is_lean = isinstance(load_ranks(folder, thread_comms(1))[0], LeanRunner)
                cells[2] = "lean decoder" if is_lean else "library modules"
            except SspError as error:
                cells.append(_short(str(error), place))
    return cells


def sizes_of(kind: str) -> dict[str, Any]:
    """Sizes of a tiny checkpoint of any kind, and of its parts."""
    parts = {name: each for name, each in CONFIG_MAPPING[kind].sub_configs.items() if each is not AutoConfig}
    return {name: fitting(each, SIZES | TINY) for name, each in parts.items()} | tiny_sizes(kind)


def planned_refusal(kind: str, sizes: dict[str, Any], folder: Path, num_ranks: int) -> str:
    """The sentence with which a plan refuses a tiny checkpoint of a kind, by its config.json alone.

    Configurations that take no tiny sizes stand for themselves.
    """
    for make in CONFIG_MAPPING[kind.partition(",")[0]], partial(tiny_config, kind, **sizes):
        with suppress(Exception):
            make().save_pretrained(folder)
    return _short(refusal(partial(check_readable, folder, "none", num_ranks=num_ranks)), str(folder))


def other_row(kind: str) -> list[object]:
    """One line of the table of further kinds: logits on ranks against those of the uncut model."""
    sizes, cells = sizes_of(kind), [kind]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        said = [planned_refusal(kind, sizes, folder, num_ranks) for num_ranks in RANKS]
        try:
            compared = None if said[0] else partial(compare, folder, uncut(build_checkpoint(folder, kind, **sizes)))
        except Exception as error:  # noqa: BLE001 - of any family's code
            return [kind, *[f"{NOT_BUILT} ({type(error).__name__})"] * len(RANKS)]
        for num_ranks, refused in zip(RANKS, said, strict=True):
            try:
                later = refusal(partial(compared, num_ranks)) if compared and not refused else ""
            except AssertionError:
                cells.append(OTHER)
            else:
                cells.append(refused or (f"{LATER}: {_short(later, place)}" if later else EQUAL))
    return [*cells]


def whole_row(kind: str) -> list[object]:
    """One line of the table of models that also read images or audio: texts on ranks, or why they are refused."""
    cells: list[object] = [kind, text_kinds()[kind]]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if kind not in EQUAL_TEXTS:
            return cells + [planned_refusal(kind, {}, folder, num_ranks) for num_ranks in RANKS]
        model = save_kind(folder, kind)
        for num_ranks in RANKS:
            said = _short(refusal(partial(check_readable, folder, "none", num_ranks=num_ranks)), place)
            try:
                later = "" if said else refusal(partial(compare_texts, folder, model, num_ranks=num_ranks))
            except AssertionError:
                cells.append(OTHER)
            else:
                cells.append(said or (f"{LATER}: {_short(later, place)}" if later else EQUAL))
    return cells


def _short(sentence: str, folder: str) -> str:
    return sentence.replace(folder, "DIR").partition(" (")[0].partition(": ")[0]


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
    wanted = {*(arguments.kinds or [*known, *every_kind(), *text_kinds()])}
    tables: list[dict[str, list[Any]]] = [
        {kind: row_of(kind, sizes) for kind, sizes in known.items() if kind in wanted},
        {kind: other_row(kind) for kind in every_kind() if kind in wanted - {*known}},
        {kind: whole_row(kind) for kind in sorted(text_kinds()) if kind in wanted},
        {kind: flags_row(kind, sizes) for kind, sizes in known.items() if kind in wanted},
    ]
    if arguments.kinds and arguments.write:
        written = [{str(row[0]): row for row in rows} for rows in tables_of((PAGES / PAGE).read_text())]
        tables = [before | rows for before, rows in zip(written, tables, strict=True)]
    texts, others, wholes, flags = ([*rows.values()] for rows in tables)
    ranks, outcomes = ["1 rank", "2 ranks", "3 ranks"], [REFUSED, NO_EFFECT, NOT_BUILT]
    text = page_of(
        "families",
        tokens=NUM_NEW_TOKENS,
        positions=NUM_POSITIONS,
        apart=APART,
        parts=num_on_two(wholes),
        num_kinds=len({str(row[0]).partition(",")[0] for row in texts + others}),
        num_on_two=num_on_two(texts + others),
        table=markdown(["kind", "record", "computed by", *ranks], texts),
        others=markdown(["kind", *ranks], others),
        wholes=markdown(["kind", "kind of its text part", *ranks], wholes),
        flags=markdown(["kind", "equal on 1, 2 and 3 ranks", "equal on one, refused on more", *outcomes], flags),
    )
    show(text, page=PAGE, is_written=arguments.write)


def num_on_two(rows: list[list[Any]]) -> int:
    """The number of kinds of which a form is equal on two ranks."""
    return len({str(row[0]).partition(",")[0] for row in rows if row[-2] == EQUAL})


def tables_of(page: str) -> list[list[list[str]]]:
    """The cells of the lines of each table of a page, without its heads."""
    tables: list[list[list[str]]] = []
    for before, line in pairwise(["", *page.splitlines()]):
        if line.startswith("| "):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[2:] for rows in tables]


if __name__ == "__main__":
    main()
