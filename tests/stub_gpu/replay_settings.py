"""The pairs of models and the ways of decoding whose replays are compared with Python, on the stub device."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llama_ssp import catalogue
from llama_ssp.run.tasks.records import CompareConfig
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import (
    ExpertParts,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    TargetPlacement,
    VerificationConfig,
)
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights import hub
from tests.helpers import one_pass_heads, other_tokenizer
from tests.helpers.models import FAMILIES, VOCAB_SIZE, build_checkpoint
from tests.helpers.mtp_layers import save_with_mtp
from tests.helpers.packed_checkpoints import pack_checkpoint
from tests.helpers.tokenizers import save_tokenizer
from tests.stub_gpu.settings import TREE_OF_60

GREEDY = SamplingConfig(temperature=0.0)
ROWS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.7, top_p=0.8),
    GREEDY,
    SamplingConfig(temperature=0.9, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    SamplingConfig(top_k=5, logit_bias={5: 1.0}),
)
"""Settings of rows beside each other: with and without truncation and penalties, as a server gets them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a pair decodes.

    Attributes:
        config: other values of the `RunConfig`, by name.
        draft: other values of its draft's config.
        structure: of texts, by settings of `sampling`; with settings by row, of every other row.
        by_row: rows have `ROWS` in turn.
        limits: the most drafted tokens of rows, in turn.
        long: some prompts have more tokens than one chunk.
        updates: the pair gets its weights once more between runs, which drops no graph.
        calls: arguments of `Pair.generate`, which then decodes in place of a decoder.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    structure: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 2
    by_row: bool = False
    limits: tuple[int | None, ...] = (None,)
    long: bool = False
    updates: bool = False
    calls: dict[str, Any] | None = None

    def config_of(self, config: RunConfig) -> RunConfig:
        """The config of a loaded pair, decoded in this way; of arguments of `Pair.generate`, those that it has too."""
        more = {**self.config} | {name: value for name, value in (self.calls or {}).items() if name in vars(config)}
        sampling = more.pop("sampling", config.sampling)
        if not self.by_row:
            sampling = self._structured(sampling)
        draft = replace(config.draft, **self.draft)
        return replace(config, batch_size=self.batch_size, draft=draft, sampling=sampling, **more)

    def sampling_of(self, row: int) -> SamplingConfig | None:
        """The settings of a row; None for those of the run."""
        if not self.by_row:
            return None
        own = ROWS[row % len(ROWS)]
        return self._structured(own) if row % 2 else own

    def _structured(self, sampling: SamplingConfig) -> SamplingConfig:
        if not self.structure:
            return sampling
        made: SamplingConfig = whole(SamplingConfig)(**vars(sampling) | self.structure)
        return made

    def requests(self, num: int, num_new: int, *, num_prompt: int = 20) -> list[Request]:
        """Requests of about so many tokens, which begin alike in each call."""
        return [
            Request(
                index=row,
                prompt_ids=tuple((5 + place * (row + 1)) % 150 + 3 for place in range(num_prompt + row)),
                max_new_tokens=num_new,
                sampling=self.sampling_of(row),
                seed=row,
                num_draft_tokens=self.limits[row % len(self.limits)],
                ignores_eos=True,
            )
            for row in range(num)
        ]


def _speculation(**values: Any) -> dict[str, Any]:
    return {"speculation": SpeculationConfig(**values)}


_BY_ROW = {"sampling": SamplingConfig(temperature=1.0, by_row=True)}
SAMPLED, ONE_GREEDY = Way(name="sampled"), Way(name="greedy", config={"sampling": GREEDY}, batch_size=3)
LONG = Way(name="long prompts", batch_size=4, long=True)
TREE, DYNAMIC = (
    Way(name="tree", config=_speculation(tree="2x2x1")),
    Way(name="dynamic tree", config=_speculation(tree="dynamic-20x4x4")),
)
AUTO = Way(name="K = auto", config=_speculation(num_draft_tokens="auto"))
BY_ROW = Way(name="settings by row", config=_BY_ROW, batch_size=4, by_row=True)
MANY = Way(name="more tokens than a pass of the kernel", batch_size=32)
UPDATED = Way(name="updated", updates=True)
COUPLED = Way(name="coupled", config={"verification": VerificationConfig(rule="coupled")})
SPARE = Way(name="spare rows", config={"spare_rows": 2}, long=True)
RESTORED = Way(name="the target's cache as it was", draft={"restores": True})
_ANY_TEXT = {"regex": "(?s:.*)"}
STRUCTURED, STRUCTURED_BY_ROW = (
    Way(name="structured text", structure=_ANY_TEXT),
    replace(BY_ROW, name="structured text of some rows", structure=_ANY_TEXT),
)
STRUCTURED_TREE = replace(TREE, name="structured text, trees", structure=_ANY_TEXT)
LIMITED = replace(BY_ROW, name="rows without drafts, and with short ones", limits=(None, 0, 2))
_EARLY = {"confidence": 0.3}
ENDING_EARLY = tuple(
    replace(way, name=f"drafts that end early, {way.name}", draft=_EARLY) for way in (SAMPLED, ONE_GREEDY, BY_ROW)
)
_OF_PAIR = (
    SAMPLED,
    LONG,
    ONE_GREEDY,
    TREE,
    AUTO,
    BY_ROW,
    UPDATED,
    Way(name="tree of 60", config=_speculation(tree=TREE_OF_60)),
    Way(name="settings by row, K = auto", config=_BY_ROW | _speculation(num_draft_tokens="auto"), by_row=True),
    COUPLED,
    Way(name="block", config={"verification": VerificationConfig(rule="block")}),
    Way(name="greedy rule", config={"sampling": GREEDY, "verification": VerificationConfig(rule="greedy")}),
    Way(name="forced lengths", config={"task": CompareConfig(), **_speculation(forced_lengths=[3, 0, 2])}),
    Way(
        name="bias and bans",
        config={
            "sampling": SamplingConfig(logit_bias={5: 1.0}, bad_ids=((5, 6), (7,)), min_new_tokens=3, eos_ids=(1,))
        },
    ),
    Way(name="top-k and top-p", config={"sampling": SamplingConfig(top_k=20, top_p=0.9, min_p=0.05, top_nsigma=2.0)}),
    Way(name="greedy drafts", draft={"greedy": True}),
    Way(name="greedy drafts, trees", draft={"greedy": True}, config=_speculation(tree="2x2x1")),
    Way(name="copied drafts too", draft={"fallback": "ngram"}, config=_speculation(num_draft_tokens="auto")),
    Way(name="log-probabilities", calls={"logprobs": 2, "prompt_logprobs": 1}),
    SPARE,
    STRUCTURED,
    STRUCTURED_BY_ROW,
    STRUCTURED_TREE,
    LIMITED,
)
_COPIES = (LONG, ONE_GREEDY, BY_ROW, Way(name="tree", config=_speculation(tree="3x2x1")))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A pair of models, and the ways in which it decodes.

    Attributes:
        arguments: makes those of `llama_ssp.load`, in a folder.
        num_ranks: processes, each with a device.
        asks_host: long prompts of experts are read one expert after the other, which waits for the device. So does what
            `Pair.generate` is asked for beside the text.
    """

    name: str
    arguments: Callable[[Path], dict[str, Any]]
    ways: tuple[Way, ...]
    num_ranks: int = 1
    asks_host: bool = False


def _shipped(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _folder: {"model": "tiny", "draft": "tiny-draft", "dtype": "fp16", **arguments}


def _family(
    family: str, *, draft: str | dict[str, Any] | None = None, **arguments: Any
) -> Callable[[Path], dict[str, Any]]:
    """A target of a family, and a draft of the same one or of this kind."""

    def make(folder: Path) -> dict[str, Any]:
        sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 16} if "experts" in arguments else {}
        for part in ("target",) if draft else ("target", "draft"):
            build_checkpoint(folder / part, family, max_position_embeddings=1024, **sizes)
            save_tokenizer(folder / part, VOCAB_SIZE)
        others = {name: value for name, value in arguments.items() if name != "experts"}
        return {"model": folder / "target", "draft": draft or folder / "draft", "dtype": "bf16", **others}

    return make


def _one_pass(layout: str, dtype: str, **settings: Any) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        one_pass_heads.save_pair(folder, layout)
        save_tokenizer(folder / "target", one_pass_heads.VOCABULARY)
        return {"model": folder / "target", "draft": {"model": folder / "head", **settings}, "dtype": dtype}

    return make


def _mtp(family: str, *, num_modules: int = 1, **settings: Any) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        save_with_mtp(folder, family, num_modules=num_modules, max_position_embeddings=1024)
        save_tokenizer(folder, VOCAB_SIZE)
        return {"model": folder, "draft": {"model": "mtp", **settings}, "dtype": "bf16"}

    return make


def _other_tokenizer(folder: Path) -> dict[str, Any]:
    other_tokenizer.save_pair(folder, num_steps=0)
    return {"model": folder / "target", "draft": folder / "draft", "tokenizer": "own", "dtype": "fp16"}


def _corpus(folder: Path) -> dict[str, Any]:
    (folder / "corpus.txt").write_text("import os\nimport sys\ndef f(x): return x\n" * 200)
    copying = {"corpus": str(folder / "corpus.txt"), "longest": 5, "shortest": 2, "history": 1000}
    return _shipped(draft={"kind": "ngram", **copying})(folder)


def _stored(form: str, layout: str) -> Callable[[Path], dict[str, Any]]:
    """The shipped target in files of a layout that some tool writes."""

    def make(folder: Path) -> dict[str, Any]:
        packed, origin = folder / "packed", hub.resolve(catalogue.load("tiny"))
        pack_checkpoint(origin, packed, folder / "numbers", layout)
        return _shipped(model=packed, quantization=(form, "none"))(folder)

    return make


def _self(**settings: Any) -> dict[str, Any]:
    return {"kind": "self", **settings}


def _short_draft(family: str) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        found = _family(family)(folder)
        build_checkpoint(folder / "short", family, max_position_embeddings=40)
        save_tokenizer(folder / "short", VOCAB_SIZE)
        return found | {"draft": folder / "short"}

    return make


HYBRIDS = (
    "qwen3_next, dense",
    "qwen3_5_text",
    "kimi_linear, dense",
    "olmo_hybrid",
    "lfm2",
    "bamba",
    "granitemoehybrid, dense",
    "falcon_h1",
    "nemotron_h",
)
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "granitemoe",
    "glm4_moe",
    "lfm2_moe",
    "gemma4_text, keys",
)
FORMS = ("int8_weight_only", "int4_weight_only", "fp8_weight_only")
_STORED = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized", "int8_groups": "gptq_v2, bytes"}
"""Formats of files that are made by other tools alone, with a layout of each."""


def _of_experts(family: str, form: str) -> Kind:
    is_wide = family in {"mixtral", "gpt_oss"}
    return Kind(
        name=f"experts, {family}, {form}",
        asks_host=form != "none",
        ways=(SAMPLED, MANY) if is_wide else (SAMPLED,),
        arguments=_family(family, draft="ngram", quantization=form, **{"experts": True} if is_wide else {}),
    )


_LAYOUTS = [(layout, "fp16") for layout in one_pass_heads.CONFIGS] + [("peagle", "fp32"), ("dflash", "fp32")]
_OF_HEAD = (LONG, TREE, DYNAMIC, BY_ROW)
_OF_SELF = (LONG, ONE_GREEDY, BY_ROW, TREE)
_WINDOW: dict[str, Any] = {"window": 16, "sinks": 2}
_STAGES = PlacementConfig(target=TargetPlacement(stages=2))
_SPREAD = PlacementConfig(target=TargetPlacement(experts=ExpertParts.spread))
_INT8 = ("int8_weight_only", "none")
KINDS = (
    Kind(name="pair", arguments=_shipped(), ways=_OF_PAIR[:7]),
    Kind(name="pair, further ways", arguments=_shipped(), ways=_OF_PAIR[7:]),
    Kind(name="no draft", arguments=_shipped(draft=None), ways=(LONG, BY_ROW, SPARE, STRUCTURED)),
    *(
        Kind(name=f"head, {dtype}", arguments=_shipped(draft="tiny-eagle", dtype=dtype), ways=_OF_HEAD)
        for dtype in ("fp16", "fp32")
    ),
    Kind(name="head, further ways", arguments=_shipped(draft="tiny-eagle"), ways=(SPARE, STRUCTURED_TREE, LIMITED)),
    Kind(name="layers of the target", arguments=_shipped(draft=_self(layers=1)), ways=(*_OF_SELF, RESTORED)),
    Kind(name="window of the target", arguments=_shipped(draft=_self(**_WINDOW)), ways=_OF_SELF),
    Kind(
        name="copy of the target",
        arguments=_shipped(draft=_self(layers=1, quantization="int8_weight_only")),
        ways=(SAMPLED, BY_ROW),
    ),
    Kind(
        name="layers of a hybrid",
        arguments=_family(HYBRIDS[0], draft=_self(layers=1)),
        ways=(SAMPLED, BY_ROW, RESTORED),
    ),
    Kind(
        name="window of a draft model",
        arguments=_shipped(draft={"model": "tiny-draft", **_WINDOW}),
        ways=(LONG, ONE_GREEDY, BY_ROW, AUTO),
    ),
    Kind(
        name="window of a head",
        arguments=_shipped(draft={"model": "tiny-eagle", **_WINDOW}),
        ways=(LONG, TREE, BY_ROW, SPARE),
    ),
    Kind(name="window of a head of one pass", arguments=_one_pass("peagle", "fp16", **_WINDOW), ways=(LONG, BY_ROW)),
    Kind(name="window of modules", arguments=_mtp("glm4_moe", num_modules=3, **_WINDOW), ways=(LONG, BY_ROW)),
    *(
        Kind(name=f"early ends, {layout}", arguments=_one_pass(layout, "fp16"), ways=ENDING_EARLY)
        for layout in ("dspark", "recurrent dspark")
    ),
    Kind(name="own tokenizer", arguments=_other_tokenizer, ways=(SAMPLED, ONE_GREEDY, BY_ROW, AUTO)),
    Kind(name="equal bits", arguments=_shipped(reproducible=True), ways=(SAMPLED, LONG, COUPLED, SPARE)),
    Kind(name="copies", arguments=_shipped(draft="ngram"), ways=_COPIES),
    Kind(name="copies of a corpus", arguments=_corpus, ways=(SAMPLED, BY_ROW)),
    *(
        Kind(name=f"one pass, {layout}, {dtype}", arguments=_one_pass(layout, dtype), ways=(ONE_GREEDY, TREE, BY_ROW))
        for layout, dtype in _LAYOUTS
    ),
    *(
        Kind(name=f"MTP, {family}", arguments=_mtp(family), ways=(SAMPLED, ONE_GREEDY, BY_ROW, LONG))
        for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    ),
    *(
        Kind(name=f"MTP, {family}, 3 modules", arguments=_mtp(family, num_modules=3), ways=(SAMPLED, BY_ROW, LONG))
        for family in ("qwen2", "deepseek_v3", "glm4_moe", "mimo_v2_flash")
    ),
    Kind(name="MTP, glm4_moe", arguments=_mtp("glm4_moe"), ways=(SAMPLED, ONE_GREEDY, BY_ROW, TREE)),
    *(Kind(name=f"hybrid, {family}", arguments=_family(family), ways=(LONG, BY_ROW, AUTO)) for family in HYBRIDS),
    Kind(name="hybrid, copies", arguments=_family(HYBRIDS[0], draft="ngram"), ways=(SAMPLED,)),
    Kind(name="hybrid, int8", arguments=_family(HYBRIDS[0], quantization=_INT8), ways=(SAMPLED,)),
    *(_of_experts(family, form) for family in EXPERTS for form in ("none", "int8_weight_only")),
    *(_of_experts(family, form) for family in ("mixtral", "gpt_oss") for form in FORMS[1:2]),
    *(
        Kind(name=f"cache in {form}", arguments=_shipped(cache_dtype=(form, "auto")), ways=(LONG, TREE))
        for form in ("int8", "fp8", "bf16", "fp16")
    ),
    *(
        Kind(name=form, arguments=_shipped(quantization=(form, "none")), ways=(SAMPLED, MANY, UPDATED))
        for form in (*FORMS, "nf4", "fp4", "int8")
    ),
    *(Kind(name=form, arguments=_stored(form, layout), ways=(SAMPLED, MANY)) for form, layout in _STORED.items()),
    Kind(name="short draft", arguments=_short_draft("llama"), ways=(SAMPLED,)),
    Kind(name="short draft of a hybrid", arguments=_short_draft(HYBRIDS[0]), ways=(SAMPLED,)),
    *(
        Kind(name=f"family, {family}", arguments=_family(family, draft="ngram"), ways=(SAMPLED,))
        for family in FAMILIES
        if family not in {*HYBRIDS, *EXPERTS}
    ),
    Kind(
        name="overlapped",
        arguments=_shipped(placement="own_gpu"),
        num_ranks=2,
        ways=tuple(
            replace(way, config={**way.config, **_speculation(overlap=True)}) for way in (SAMPLED, ONE_GREEDY, BY_ROW)
        ),
    ),
    Kind(
        name="draws over shards",
        arguments=_shipped(placement="sharded"),
        num_ranks=2,
        ways=(SAMPLED, ONE_GREEDY, COUPLED),
    ),
    *(
        Kind(name=f"draft, {layout}", arguments=_shipped(placement=layout), num_ranks=2, ways=(SAMPLED, BY_ROW, LONG))
        for layout in ("one_rank", "replicated")
    ),
    Kind(
        name="experts, spread",
        arguments=_family("mixtral", draft="ngram", placement=_SPREAD),
        num_ranks=2,
        ways=(SAMPLED,),
    ),
    Kind(
        name="stages",
        arguments=_shipped(placement=_STAGES),
        num_ranks=2,
        ways=(
            SAMPLED,
            LONG,
            BY_ROW,
            replace(
                SAMPLED,
                name="groups of rows",
                config={"placement": replace(_STAGES, target=replace(_STAGES.target, groups=2))},
            ),
        ),
    ),
    Kind(
        name="stages, head", arguments=_shipped(draft="tiny-eagle", placement=_STAGES), num_ranks=2, ways=(LONG, BY_ROW)
    ),
)
