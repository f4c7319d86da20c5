"""Every setting of a run and of a plan, as typed dataclasses without logic.

`settings.compose` makes them, and `settings.checks` checks them. Enum members are written as on the command line.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llama_ssp.catalogue import ModelConfig
from llama_ssp.settings.backends import TENSOR
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.fields import made, setting
from llama_ssp.settings.lengths import LengthChooser, chooser_named, longest
from llama_ssp.settings.processors import filters, numbers_of, penalties
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.trees import TreeShape, tree_shape
from llama_ssp.settings.weights import CHECKPOINT, WEIGHTS, WeightsRecord

DEFAULT_DRAFT, NO_DRAFT, MODEL_DRAFT = "default", "none", "model"
"""Kinds of draft: the model entry's default, plain decoding, and a smaller model."""
DERIVED = ("task.name", "model.name", "model.shape", "draft.kind", "draft.model.name", "draft.model.shape")
"""Settings that follow from the choice of an option: task=, model= and draft= set them."""


class DraftLayout(Enum):
    """Placement of the draft model; `DraftPlacement` says more."""

    one_rank = "one_rank"
    sharded = "sharded"
    replicated = "replicated"
    own_gpu = "own_gpu"


class DeviceKind(Enum):
    """Device of the ranks; `auto` uses GPUs if every rank has one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True)
class DrafterConfig:
    """The drafter: a kind of `settings.drafters`, and its model if it has one."""

    kind: str = setting(DEFAULT_DRAFT, "follows from draft=NAME.")
    model: ModelConfig | None = setting(None, "the fields of a model's entry.")
    fallback: str | None = setting(
        None,
        "with {choosers}, a draft without a model for rounds in which it gains more{free_drafts}.",
    )

    @property
    def ends_early(self) -> bool:
        """Whether a draft says how many of its tokens count (`sampling.draft.Draft`), so that ranks send the number."""
        return False


class ExpertParts(Enum):
    """How ranks share the experts of a layer: each has some units of every expert, or some experts as a whole."""

    cut = "cut"
    spread = "spread"


@dataclass(kw_only=True)
class TargetPlacement:
    """Ranks of the target."""

    kind: str = setting(TENSOR.name, "{backends} Each is also a placement, and tensor is the fastest.")
    ranks: list[int] | None = setting(None, "ranks of the target; null takes all that an own_gpu draft leaves.")
    tp_size: int | None = setting(None, "or how many of them; with stages, of each stage.")
    stages: int = setting(
        1,
        "parts of consecutive layers, which a token passes one after the other; the ranks of each share its layers. "
        "The first ranks have the last stage.",
    )
    layers: list[int] | None = setting(
        None, "layers of each stage, such as [21,19]; null shares them out so that all stages take about as long."
    )
    groups: int | None = setting(
        None,
        "parts of a batch, of a row each at least, that follow each other through stages, so that several of these "
        "work at a time; null takes the number whose forecast is the fastest, and 1 in the library.",
    )
    experts: ExpertParts = setting(
        ExpertParts.cut,
        "with tensor, each rank holds some units of every expert (cut), or whole experts (spread), as many as the "
        "others.",
    )


@dataclass(kw_only=True)
class DraftPlacement:
    """Ranks of the draft."""

    kind: DraftLayout = setting(
        DraftLayout.one_rank,
        "one_rank is whole on one rank; sharded is tensor parallel too; replicated is whole on every rank of the "
        "target, each of which drafts for its share of the batch; own_gpu is on ranks without the target. Each is "
        "also a placement.",
    )
    ranks: list[int] | None = setting(
        None,
        "ranks of the draft; null takes the target's first (one_rank), the target's (sharded, replicated), of stages "
        "those of the last, or the last ranks (own_gpu).",
    )
    tp_size: int | None = setting(None, "or how many, for sharded and own_gpu; null takes as many as the target, or 1.")


@dataclass(kw_only=True)
class PlacementConfig:
    """Placement of target and draft, and the number of replicas of both."""

    target: TargetPlacement = field(default_factory=TargetPlacement)
    draft: DraftPlacement = field(default_factory=DraftPlacement)
    num_replicas: int = setting(
        1,
        "copies of target and draft, each on an equal block of ranks, that share the prompts; ranks count from 0 in "
        "each copy.",
    )
    auto: bool = setting(False, "true takes the fastest placement by the forecast for these models on this machine.")


MOST_BIASES = 300
"""The most biases of a row with settings of its own."""


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling from the logits of target and draft."""

    temperature: float = setting(0.8, "0 always takes the most probable token.")
    # Each number of a filter or penalty has a record of its name in `settings.processors`.
    top_k: int | None = setting(None, "only the k most probable tokens.")
    top_p: float | None = setting(None, "only the most probable tokens that hold this much probability.")
    min_p: float | None = setting(None, "only tokens with at least this share of the highest probability.")
    top_nsigma: float | None = setting(None, "only tokens whose logits are within n standard deviations of the best.")
    repetition_penalty: float = setting(
        1.0, "above 1, tokens of prompt and text become less probable, as in transformers; 1 is off."
    )
    frequency_penalty: float = setting(0.0, "taken off the logit of a token for each time that the new text has it.")
    presence_penalty: float = setting(0.0, "taken off the logit of every token that the new text has.")
    logit_bias: dict[int, float] = made(dict, "numbers added to the logits of tokens, by their ids, as in {198: -2.5}.")
    bad_words: list[str] = made(
        list,
        "texts that are not written, also with a space before them: the token that would complete the ids of one has "
        "probability 0; other ids may still spell it.",
    )
    min_new_tokens: int | None = setting(
        None, "no end-of-sequence token before so many new tokens; stop_strings still end a completion."
    )
    # of the model's files, once they are read (`run.generation.with_ids`); no settings.
    bad_ids: tuple[tuple[int, ...], ...] = field(default=(), metadata={"omegaconf_ignore": True})
    eos_ids: tuple[int, ...] = field(default=(), metadata={"omegaconf_ignore": True})
    # of batches whose rows have settings of their own, in place of these; no setting.
    by_row: bool | None = field(default=None, metadata={"omegaconf_ignore": True})
    from_model: list[str] = made(
        list,
        "of these settings, those that take the values of the model's generation_config.json, unless you give them.",
    )

    @property
    def truncates(self) -> bool:
        """Whether most tokens get probability 0."""
        return bool(numbers_of(self, filters()))

    @property
    def penalizes(self) -> bool:
        """Whether logits are changed before the temperature, by token or by the text before them."""
        counted = numbers_of(self, penalties())
        return bool(counted or self.logit_bias or self.bad_words or self.min_new_tokens)

    @property
    def takes_best(self) -> bool:
        """Whether a token is the one with the model's largest logit."""
        return self.temperature == 0 and not (self.penalizes or constraint_asked(self))


@dataclass(kw_only=True)
class VerificationConfig:
    """Acceptance of drafted tokens."""

    rule: str = setting(
        DEFAULT,
        "name of a rule; each is also an option, verification=NAME. All but greedy keep the target's distribution.",
    )


@dataclass(kw_only=True)
class SpeculationConfig:
    """Number of drafted tokens per round (K in Chen et al. 2023), and the acceptance that the forecast assumes."""

    num_draft_tokens: int | str = setting(4, "K, the number of drafted tokens per round{or_choosers}.")
    acceptance: float | None = setting(
        None, "probability of acceptance that the forecast assumes; null takes a measured figure, or the default."
    )
    tree: str | None = setting(
        None,
        "a tree of drafted tokens instead of a chain, by the children of every node, level by level, such as 2x2x1: "
        "it has 2, 4 and 4 nodes; dynamic lets the draft's probabilities decide. Needs verification=speculative or "
        "temperature 0.",
    )
    forced_lengths: list[int] = made(
        list,
        "drafted tokens that the rounds of a row accept, one number after the other and then from the first again, "
        "whatever the target says: times at a given acceptance. The text is not the target's: every output says so.",
    )
    overlap: bool = setting(False, "true drafts while the target verifies; needs placement=own_gpu, untried on GPUs.")

    @property
    def chooser(self) -> LengthChooser | None:
        """The record of what chooses K for each round; None for a fixed K, for trees, and for an unknown name."""
        return None if self.tree else chooser_named(self.num_draft_tokens)

    @property
    def tree_shape(self) -> TreeShape | None:
        """The shape of a tree, if rounds draft trees; raises ValueError as `trees.tree_shape`."""
        return tree_shape(self.tree) if self.tree else None


@dataclass(kw_only=True)
class TimeoutConfig:
    """Seconds that a rank waits for a silent rank; a rank that dies ends the run within seconds."""

    load_s: float = setting(1800.0, "while models are loaded.")
    decode_s: float = setting(60.0, "after that.")


class Resume(Enum):
    """Ways to resume a folder with finished completions: only with the models' files that it began with, or any."""

    if_unchanged = "if_unchanged"
    anyway = "anyway"


class TooLong(Enum):
    """Ways to treat a prompt that leaves no room for its new tokens in the context."""

    refuse = "refuse"
    skip = "skip"
    truncate = "truncate"


@dataclass(kw_only=True)
class TaskConfig:
    """The task of a run; each task adds its own fields and a default for `name` (`settings.tasks`)."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SweepPlace:
    """Place of a run in a sweep: its number from 1, and the settings in which points differ.

    Attributes:
        baseline: the folder of the point whose plain completions this one takes over, since they would be the same.
        repeats: this is the last point with these plain completions, and makes them again, to show how times drift.
    """

    number: int
    num_points: int
    settings: str
    baseline: str | None = None
    repeats: bool = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"point {self.number} of {self.num_points}"

    @property
    def title(self) -> str:
        """Its name with its settings."""
        return f"{self.name}: {self.settings}" if self.settings else self.name


@dataclass(kw_only=True)
class RunConfig:
    """All settings of one run."""

    task: TaskConfig
    model: ModelConfig
    draft: DrafterConfig
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sampling: SamplingConfig = field(default_factory=lambda: whole(SamplingConfig)())  # noqa: PLW0108 - extensions are read later
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    weights: str = setting(CHECKPOINT.name, "{weights}")
    timeouts: TimeoutConfig = field(default_factory=lambda: whole(TimeoutConfig)())  # noqa: PLW0108 - extensions are read later
    max_new_tokens: int = setting(64, "new tokens per completion.")
    batch_size: int = setting(1, "sequences decoded together; the draws do not depend on it.")
    spare_rows: int = setting(
        0,
        "extra cache rows that keep finished sequences, so that prompts with the same beginning read it once.",
    )
    reproducible: bool = setting(
        False,
        "true ends a run at its start unless the bits of every logit are the same for any draft, K, batch and number "
        "of threads; runs on CPUs that have this without asking say so in summary.json, and GPUs take other kernels "
        "for it, which read prompts more slowly.",
    )
    num_samples: int = setting(1, "completions per prompt.")
    seed: int = setting(
        0,
        "seed of all draws. The same seed gives the same text, also on another placement, unless sums that round "
        "differently change a draw: one token in some 100000 in fp32, more in 16 bits.",
    )
    prompt: str | None = setting(None, "one prompt, taken literally; only the shell needs quotes.")
    prompts: str | None = setting(
        None,
        "a file. .txt has a prompt per line; .jsonl and .json have objects with a `prompt`, or `turns`, a list of "
        "texts of which each follows the answers to those before it (Spec-Bench), or `messages`, a list with roles "
        "for the chat template{request_files}; .csv, .tsv and .parquet have a column `prompt`. - is standard input; on "
        "a terminal the run asks for one prompt after the other, until Ctrl-D; a line that ends with \\ goes on in the "
        "next.",
    )
    prompts_column: str | None = setting(None, "another column or field of that file.")
    category: str | None = setting(None, "the records of that file whose `category` this is; null takes all.")
    num_prompts: int | None = setting(
        None, "the first N of them, a conversation counting once; a resumed run may ask for more. null takes all."
    )
    too_long: TooLong = setting(
        TooLong.refuse,
        "a prompt without room for its new tokens in the context ends the run (refuse), is left out with the turns "
        "that follow it (skip), or loses its beginning (truncate).",
    )
    chat: bool = setting(False, "true puts each prompt into the model's chat template.")
    chat_arguments: dict[str, Any] = made(
        dict, "arguments of the model's chat template, such as {enable_thinking: false}; its text says which it reads."
    )
    ignore_eos: bool = setting(False, "true continues after the end-of-sequence token.")
    stop_strings: list[str] = made(
        list,
        r'texts or special tokens that end a completion and stay in it, as in ["\n\n"]; \n is a line break, \t a tab.',
    )
    logprobs: int | None = setting(
        None,
        "log-probabilities of every new token and of the N most probable ones in its place, under the model "
        "(temperature 1, before all processors), and under the law of the draws if it is another; logprobs.jsonl has "
        "them. The target reads every text once more.",
    )
    prompt_logprobs: int | None = setting(None, "the same of the prompt's tokens, under the model.")
    device: DeviceKind = setting(DeviceKind.auto, "cpu, cuda, or auto, which takes GPUs when every rank has one.")
    cuda_graphs: bool = setting(
        True, "on GPUs, captures rounds as CUDA graphs and replays them; false launches every operator from Python."
    )
    own_sums: bool = setting(
        False,
        "true sums small tensors over the GPUs of a node by a kernel of the program, if it is right at start, and else "
        "by NCCL; so far not seen on several GPUs.",
    )
    hardware: dict[str, Any] = made(
        dict,
        "machine of the forecast, an entry of conf/hardware; without one, what was measured here, else a guess.",
    )
    dry_run: bool = setting(False, "true prints the plan of exactly this run and loads nothing.")
    run_dir: str | None = setting(
        None, "the run folder, outputs/ID by default; a folder with finished prompts is resumed."
    )
    resume: Resume = setting(
        Resume.if_unchanged, "anyway resumes also a folder whose models have other files now, or of an earlier version."
    )
    quiet: bool = setting(
        False, "true prints tables alone: prompts and texts are only in the records, notes on standard error."
    )
    # of a point of a sweep, which the command line finds; no setting.
    place: SweepPlace | None = field(default=None, repr=False, metadata={"omegaconf_ignore": True})

    @property
    def scores_texts(self) -> bool:
        """Whether the target reads every text once more, for log-probabilities."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def most_draft_tokens(self) -> int:
        """The most drafted tokens of a round: K, the largest K that can be chosen, or the number of a tree's nodes."""
        if shape := self.speculation.tree_shape:
            return shape.num_nodes
        return longest(self.speculation.num_draft_tokens, self.draft.model.shape if self.draft.model else None)

    @property
    def most_steps(self) -> int:
        """The most drafted tokens that follow one another in a round."""
        tree = self.speculation.tree_shape
        return tree.depth if tree else self.most_draft_tokens

    @property
    def source(self) -> WeightsRecord:
        """The record of the source of the weights; for an unknown name, that of files."""
        return WEIGHTS.find(self.weights) or CHECKPOINT

    @property
    def reads_files(self) -> bool:
        """Whether weights are read from files instead of made."""
        return not self.source.make


class PlanFormat(Enum):
    """Output of `llama-ssp plan`."""

    table = "table"
    full = "full"
    json = "json"


@dataclass(kw_only=True)
class PlanConfig(RunConfig):
    """A run that is not started, on a machine that is only described."""

    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="generate"))
    prompt_tokens: int = setting(128, "length of the longest prompt.")
    format: PlanFormat = setting(
        PlanFormat.table,
        "full has every item of memory, the parts of a step, and all notes, machines or choices; json prints the "
        "document that docs/reference/plan-document.md describes.",
    )
