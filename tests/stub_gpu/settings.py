"""The settings whose rounds are captured on the stub device, in the groups that share a pair of models."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from llama_ssp.architectures.experts import EXPERTS
from llama_ssp.architectures.family import record_of
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import SamplingConfig
from tests.helpers.models import FAMILIES

HEAD = "draft head"
"""The shipped target with its draft head."""
TREE_OF_60 = "4x2x2x1x1"
ANOTHER_TOKENIZER = "another tokenizer"
"""A pair with two tokenizers, whose draft draws among the tokens that both have."""
NGRAM = "ngram"
PAIR, PLAIN = "pair", "plain"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a pair decodes.

    Attributes:
        drafter: the pair's draft (PAIR), prompt look-up (NGRAM), or none (PLAIN).
        num_draft_tokens: K, or `auto`.
        tree: the shape of drafted trees; None for chains.
        breaks: each piece of a round reads a value on the host, which no capture allows.
    """

    name: str
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rule: str = DEFAULT
    batch_size: int = 1
    drafter: str = PAIR
    num_draft_tokens: int | str = 4
    tree: str | None = None
    breaks: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """A pair of models, and how it decodes.

    Attributes:
        family: of `tests.helpers.models`, ANOTHER_TOKENIZER, or the shipped pair for None.
    """

    name: str
    settings: tuple[Setting, ...]
    dtype: str = "fp16"
    quantization: str = "none"
    family: str | None = None


SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0.0),
    "sampled": SamplingConfig(),
    "top_k": SamplingConfig(top_k=20),
    "top_p": SamplingConfig(top_p=0.9),
    "min_p": SamplingConfig(min_p=0.05),
    "top_k, top_p, min_p": SamplingConfig(top_k=20, top_p=0.9, min_p=0.05),
    "penalties": SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    "greedy, penalties": SamplingConfig(temperature=0.0, repetition_penalty=1.2),
}
RULES = ("block", "coupled", "greedy")
BROKEN = Setting(name="a value is read", breaks=True)


def _samplings() -> Iterator[Setting]:
    for batch_size in (1, 4):
        for name, sampling in SAMPLINGS.items():
            yield Setting(name=f"{name}, batch {batch_size}", sampling=sampling, batch_size=batch_size)


def _rules_and_drafters() -> Iterator[Setting]:
    for rule in RULES:
        sampling = SAMPLINGS["greedy" if rule == "greedy" else "sampled"]
        for batch_size in (1, 4):
            yield Setting(name=f"rule {rule}, batch {batch_size}", rule=rule, sampling=sampling, batch_size=batch_size)
    for batch_size in (1, 4):
        yield Setting(name=f"plain, batch {batch_size}", drafter=PLAIN, batch_size=batch_size)
        yield Setting(name=f"look-up, batch {batch_size}", drafter=NGRAM, batch_size=batch_size)
        yield Setting(name=f"tree by look-up, batch {batch_size}", drafter=NGRAM, tree="3x2x1", batch_size=batch_size)
    yield Setting(name="K chosen by the run", num_draft_tokens="auto")


def _is_dense(family: str) -> bool:
    """Whether a family has a record and no experts: nobody has captured the library's rounds of others."""
    return record_of(family.partition(",")[0]).is_written and not FAMILIES[family].keys() & set(EXPERTS)


_FEW = tuple(
    setting
    for batch_size in (1, 4)
    for setting in (
        Setting(name=f"sampled, batch {batch_size}", batch_size=batch_size),
        Setting(name=f"plain, batch {batch_size}", drafter=PLAIN, batch_size=batch_size),
    )
)
_TREES = (
    Setting(name="tree of 60", tree=TREE_OF_60),
    Setting(name="tree, greedy", tree="2x2x1", sampling=SAMPLINGS["greedy"]),
    Setting(name="tree, batch 4", tree="2x2x1", batch_size=4),
    Setting(name="dynamic tree, batch 4", tree="dynamic-12x4x4", batch_size=4),
)
GROUPS = (
    Group(name="fp16", settings=(*_samplings(), *_rules_and_drafters(), BROKEN)),
    *(Group(name=dtype, dtype=dtype, settings=_FEW) for dtype in ("bf16", "fp32")),
    *(Group(name=form, quantization=form, settings=_FEW) for form in ("int8_weight_only", "int4_weight_only")),
    *(Group(name=family, family=family, settings=_FEW[2:]) for family in FAMILIES if _is_dense(family)),
    Group(name=HEAD, family=HEAD, settings=(*_FEW[::2], *_TREES)),
    Group(name="trees", settings=_TREES),
    Group(name="trees by masks", dtype="fp32", settings=_TREES[1:]),
    Group(name=ANOTHER_TOKENIZER, family=ANOTHER_TOKENIZER, settings=(_FEW[0], _FEW[2])),
)
