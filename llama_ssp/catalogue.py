"""The catalogue: the files of options in all folders, and the models among them, read with PyYAML alone.

Options are searched in the folder of `--config-dir`, in the user's own one, and in the package's `conf`. All are laid
out alike: `model/NAME.yaml`, `hardware/NAME.yaml`, `experiment/NAME.yaml`, `pairs.yaml`. The first folder that has a
file wins. Hydra composes settings from what is read here (`settings.compose`). The defaults list of a model,
`[BASE, _self_]`, inherits all fields of another entry.
"""

import os
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.manifest import FOLDER, conf_of_extensions
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.fields import required, setting
from llama_ssp.storage.formats import CACHES, NO_QUANTIZATION, OWN_DTYPE, format_of, problem_of
from llama_ssp.storage.stored import StoredFormat
from llama_ssp.types import Parsed

CONFIG_FILE = "config.json"
GGUF = ".gguf"
GGUF_ALONE = "holds GGUF weights, which are not read: use the repository of this model with safetensors weights"
_given: list[Path] = []
_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast


class _Loader(_SAFE_LOADER):  # type: ignore[misc]
    """Reads values as words of a command line are read: 1e12 is a number, and a date is a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; a name that is given twice is refused."""
        names = set[object]()
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            names.add(key.value)
        return dict(super().construct_mapping(node, deep=deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_PACKAGE = re.compile(r"# @package (\S+)")


class Dtype(Enum):
    """Number format of weights, activations and cache; `planning.model.number_format` resolves `auto`."""

    auto = "auto"
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"

    @classmethod
    def find(cls, name: object) -> "Dtype | None":
        """Return the member with a name, which may be torch's; None if there is none."""
        text = str(name).removeprefix("torch.")
        return next((member for member in cls if text in {member.name, member.value}), None)

    @property
    def is_short(self) -> bool:
        """Whether a value has 16 bits."""
        return self is Dtype.bf16 or self is Dtype.fp16


NUM_TAPS = 3
"""Layers that a draft head taps unless its files say otherwise."""


@dataclass(kw_only=True)
class ModelShape:
    """Sizes of a causal language model, named as in its config.json."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    # of layers with experts; other layers and models have one MLP of `intermediate_size` units.
    num_experts: int = 0
    num_experts_per_tok: int = 0  # experts that read a token.
    moe_intermediate_size: int = 0  # units of an expert.
    shared_intermediate_size: int = 0  # units of the MLP beside the experts that reads every token.
    num_dense_layers: int = 0  # layers without experts.
    # of a Gemma 4, a letter for each layer: s for one with a window and g for a global one, upper case for one that
    # reads the keys and values of an earlier one.
    layer_kinds: str = ""
    global_head_dim: int = 0  # width of the heads of global layers.
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False  # the keys of global layers are their values too.
    use_double_wide_mlp: bool = False  # where layers read the keys and values of earlier ones.
    hidden_size_per_layer_input: int = 0  # of an embedding that each layer has for itself.
    vocab_size_per_layer_input: int = 0
    latent_width: int = 0  # numbers that every rank caches of a token in a layer, in place of keys and values.
    qk_rope_head_dim: int = 0  # of such a model, numbers of a key with positions, which all heads share,
    qk_nope_head_dim: int = 0  # without, which each head makes of the latent,
    v_head_dim: int = 0  # and of a value.
    spreads_experts: bool = False  # of several ranks, each holds whole ones: placement.target.experts=spread.
    # of a draft head: the vocabulary and the width of its target; `vocab_size` counts the tokens that it can draft.
    target_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_taps: int = NUM_TAPS  # layers of the target whose inputs it reads.
    most_drafted: int = 0  # tokens that it drafts in one pass; 0 for any number.
    markov_size: int = 0  # parameters of the part that joins the drafted tokens of a pass.
    refusal: str = ""  # why runs refuse the model, if they do.
    # the modules of a family without a record (`architectures.matrices.Inventory`); no setting.
    modules: Any = field(default=None, repr=False, metadata={"omegaconf_ignore": True})
    # a kind of layers that keep a state of the text, if the family has any (`architectures.family`); no setting.
    recurrent: str = field(default="", metadata={"omegaconf_ignore": True})
    # of a draft head, the layers of the target whose inputs it reads, where its files name them; no setting.
    tapped_layers: tuple[int, ...] = field(default=(), metadata={"omegaconf_ignore": True})
    shares_embedding: bool = False  # of a draft head without an embedding of its own, which reads its target's.
    # of a draft head, whether its files say that some layers do not see all of a text; no setting.
    sees_by_itself: bool = field(default=False, metadata={"omegaconf_ignore": True})
    # of a draft head, whether it estimates if its tokens will be accepted; no setting.
    has_confidence: bool = field(default=False, metadata={"omegaconf_ignore": True})

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of `num_layers` whose inputs a draft head reads; its MTP layer reads the output."""
        usual = (2, num_layers // 2, num_layers - 3) if self.num_taps == NUM_TAPS else (num_layers,)
        return self.tapped_layers or usual

    @property
    def is_head(self) -> bool:
        """Whether this is a draft head, which reads hidden states of its target and is not a model of its own."""
        return self.target_vocab_size is not None

    @property
    def latent_rank(self) -> int:
        """Numbers of a latent, without the key that all heads share."""
        return self.latent_width - self.qk_rope_head_dim

    @property
    def num_token_ids(self) -> int:
        """Size of the vocabulary that the model reads."""
        return self.target_vocab_size or self.vocab_size


@dataclass(kw_only=True)
class ModelConfig:
    """One entry of the catalogue `conf/model`: a checkpoint, its precision and its shape.

    The weights come from exactly one of `path`, `shipped` and `hub_id`; `path` has precedence.
    """

    name: str = required("the entry's name, the same as that of its file.")
    hub_id: str | None = setting(None, "repository on the Hugging Face hub.")
    revision: str | None = setting(None, "its branch, tag or commit; null takes the newest.")
    path: str | None = setting(None, "a folder to read instead of the hub.")
    shipped: bool = setting(False, "whether the weights come with the package.")
    dtype: Dtype = setting(
        Dtype.auto,
        "fp32, bf16, fp16 or auto. On a CPU auto is fp32 arithmetic, which is fastest there; weights of 16-bit files "
        "stay in 16 bits. On a GPU auto is gpu_dtype.",
    )
    stored_dtype: Dtype = setting(
        Dtype.auto, "number format of the files where it is known, so that a plan knows how wide a CPU keeps them."
    )
    gpu_dtype: Dtype = setting(Dtype.auto, "meaning of dtype=auto on a GPU; auto takes the format of the files.")
    quantization: str = setting(
        NO_QUANTIZATION,
        "storage of the linear layers in the decoder layers: {formats}. Each rank quantizes its own slice while it "
        "reads it. none keeps a quantized checkpoint as it is stored (compressed-tensors, GPTQ, AWQ, FP8, MXFP4, "
        "NVFP4, bitsandbytes).",
    )
    cache_dtype: str = setting(
        OWN_DTYPE,
        "format of keys and values in the cache: auto, which is dtype; bf16 or fp16; int8 or fp8 (E4M3), with a scale"
        " for each head and token. Fewer bits than dtype's change the last digits of logits, and with them texts.",
    )
    default_draft: str | None = setting(None, "entry that draft=default stands for.")
    target: str | None = setting(None, "of a draft head: entry with the sizes of the model that it was trained for.")
    trained_for: str | None = setting(
        None, "that model on the hub, where it is not the entry's own; searches offer no other."
    )
    chat: bool = setting(False, "whether the model has a chat template.")
    gated: bool = setting(False, "whether the hub asks for a login.")
    shape: ModelShape | None = setting(None, "sizes in the words of config.json; null reads them from the folder.")
    # the format of linear layers that its files quantize, once their config.json has been read; no setting.
    stored_format: StoredFormat | None = field(default=None, metadata={"omegaconf_ignore": True})

    @property
    def label(self) -> str:
        """The model's name in reports; for the entry `local`, the name of its folder."""
        return Path(self.path).absolute().name if self.name == LOCAL and self.path else self.name


@cache
def conf_dir() -> Path:
    """Return the package's folder `conf`: next to the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    in_checkout = package.parent / "conf"
    return in_checkout if in_checkout.is_dir() else package / "conf"


def base_dir(kind: str, default: str) -> Path:
    """Return a folder of the user, which need not exist: $XDG_`kind`_HOME, else the default.

    Source: XDG Base Directory Specification 0.8, by which a relative path is ignored.
    """
    base = Path(os.environ.get(f"XDG_{kind}_HOME", ""))
    # Path itself raises an error for users without a home.
    return base if base.is_absolute() else Path(os.path.expanduser(default))  # noqa: PTH111


def user_dir() -> Path:
    """Return the user's own folder of options, which need not exist."""
    return base_dir("CONFIG", "~/.config") / "llama-ssp"


def cache_dir() -> Path:
    """Return the user's folder for files that can be made again, which need not exist."""
    return base_dir("CACHE", "~/.cache") / "llama_ssp"


def use(folder: str | None) -> None:
    """Search the folder of `--config-dir` first, from now on; None for a command line without one.

    Raises ConfigError if it does not exist, or if a user's folder has a file that would replace all settings.
    """
    _given.clear()
    if folder is not None:
        if not _is_dir(Path(folder)):
            raise ConfigError(f"--config-dir {folder} is no folder: name one that has files such as model/NAME.yaml")
        _given.append(Path(folder).absolute())
    for own, name in product(own_folders(), ("config.yaml", "plan.yaml")):
        if _is_file(own / name):
            raise ConfigError(
                f"{own / name} would replace all settings of the package: rename it; settings for several runs are an "
                f"option, such as experiment=mine in {own / 'experiment' / 'mine.yaml'}"
            )


def given_folder() -> Path | None:
    """Return the absolute path of the folder of `--config-dir`."""
    return _given[0] if _given else None


def own_folders() -> list[Path]:
    """Return the user's folders that exist, the first to be searched first."""
    return [folder for folder in (*_given, user_dir()) if _is_dir(folder)]


def folders() -> list[Path]:
    """Return all folders that exist, the first to be searched first; the package's own is the last."""
    return [*own_folders(), *filter(_is_dir, conf_of_extensions()), conf_dir()]


def names(group: str) -> list[str]:
    """Return the sorted names of the options that lie directly in the folder of a group, over all of `folders`."""
    return sorted({file.stem for folder in folders() for file in (folder / group).glob("*.yaml")})


def find(group: str, name: str) -> Path | None:
    """Return the file of an option; None if no folder has it."""
    for folder in (*_given, user_dir(), *conf_of_extensions(), conf_dir()):
        file = os.path.join(folder, group, f"{name}.yaml")  # noqa: PTH118 - a plan asks for hundreds of names
        if os.path.isfile(file):  # noqa: PTH113 - as in `_is_file`
            return Path(file)
    return None


def groups(group: str) -> list[str]:
    """Return the sorted names of the groups inside a group."""
    return sorted({inner.name for folder in folders() for inner in (folder / group).glob("*/")})


def new_file(group: str, name: str) -> Path:
    """Name the file of an option that the package writes: where it is, else `conf` in a checkout, else `user_dir`.

    A checkout that this user cannot write, such as an image's, is used as an installed package is.
    """
    is_checkout = conf_dir().parent != Path(__file__).resolve().parent and os.access(conf_dir(), os.W_OK)
    return find(group, name) or (conf_dir() if is_checkout else user_dir()) / group / f"{name}.yaml"


def option(group: str, name: str) -> tuple[dict[str, Any], str | None] | None:
    """Read an option, models and machines with all that they inherit, and where its first line places it.

    The place is Hydra's: `# @package _global_` sets settings outside of the group. None if there is no such option;
    raises as `read`.
    """
    file = find(group, name)
    whole = _fields(group, name) if group in _INHERITING else None
    fields = read(file) if file and group not in _INHERITING else whole
    if fields is None:
        return None
    package = file and _PACKAGE.match(file.read_text(encoding="utf-8"))
    return fields, package[1] if package else None


_INHERITING, _MERGED = ("model", "hardware"), ("shape", "sources")
"""Groups whose files may be based on another entry, and the fields that are merged with those of that entry."""
_COUNTED = re.compile(r"([1-8])x(.+)", re.DOTALL)
"""A machine with several of the GPUs that a file describes, as 4xh100."""


def head_of(file: Path) -> str:
    """The comment at the head of a file of options, without Hydra's directives."""
    head = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in head if not line.startswith("# @"))


def is_own(file: Path) -> bool:
    """Whether a file is the user's."""
    return not any(map(file.is_relative_to, (conf_dir(), FOLDER)))


def shown(file: Path) -> str:
    """Name a file in a message: a file of the package as `conf/...`."""
    return (
        str(file)
        if is_own(file)
        else str(file.relative_to(conf_dir().parent if file.is_relative_to(conf_dir()) else FOLDER.parent))
    )


def read(file: Path) -> dict[str, Any]:
    """Read a file of options; raises ConfigError if it is unreadable or has no settings."""
    try:
        content = deepcopy(_parsed(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(file)} cannot be read ({error}): it must be a text file in UTF-8") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{shown(file)} is not YAML ({reason}): settings are written name: value") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{shown(file)} holds no settings: they are written name: value")
    defaults = content.get("defaults", [])
    is_list = isinstance(defaults, list)
    if not is_list or not all(
        isinstance(entry, str) or (isinstance(entry, dict) and len(entry) == 1) for entry in defaults
    ):
        raise ConfigError(f"{shown(file)}: defaults must be a list, such as defaults: [7B, _self_]")
    return content


@cache
def _parsed(text: str) -> Parsed:
    """Parse a file once: a search for the best placement reads the catalogue some hundred times."""
    return yaml.load(text, Loader=_Loader)


def _is_dir(folder: Path) -> bool:
    return os.path.isdir(folder)  # noqa: PTH112 - Path raises an error where a user may not look


def _is_file(file: Path) -> bool:
    return os.path.isfile(file)  # noqa: PTH113 - as above


def read_path(text: str) -> Path:
    """Return the path with `~` expanded, which need not exist; raise ConfigError if it cannot be looked up."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{text} cannot be read ({reason}): name another path") from None
    return path


ENDINGS_WITH_FIELDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of files of prompts whose entries have fields."""
LOCAL = "local"
"""The name of the entry for a model from a folder, and of that model."""
GROUPS = ("model", "draft")  # Groups whose options may be ids of the hub, and folders.
_PART = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}/{_PART}", flags=re.ASCII)


def ending_of(path: str) -> str:
    """Return the ending of a file's name, in lower case and with its dot; empty without one."""
    return os.path.splitext(path)[1].lower()  # noqa: PTH122 - Path raises an error for names that no file can have


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name`; whether the hub has it shows when its files are read."""
    return _ID.fullmatch(name) is not None


def is_folder(name: str) -> bool:
    """Whether a value of `model=` or `draft=` is a folder: an existing path with a separator, or that begins so.

    What could be an id of the hub is one, unless the folder holds a config of a model and no entry has this name.
    """
    path = os.path.expanduser(name)  # noqa: PTH111 - as in `base_dir`
    if not ("/" in name or name.startswith((".", "~"))) or not os.path.isdir(path):  # noqa: PTH112 - as in `_is_dir`
        return False
    holds_model = any(Path(path).glob(f"*{CONFIG_FILE}"))  # adapter_config.json too
    return not is_hub_id(name) or (holds_model and find("model", name) is None)


def load(name: str) -> ModelConfig:
    """Read one entry as `model=NAME` does; an id of the hub is an entry with that id alone.

    An unknown name, or a file that describes no model, raises ConfigError.
    """
    file = _file(name)
    fields = _fields("model", name) if file else None
    if file is None or fields is None:
        return ModelConfig(name=name, hub_id=name)
    if fields.get("name") != name:
        raise ConfigError(f"{shown(file)} must have the line name: {name}, the name of the file")
    shape = fields.pop("shape", None)
    try:
        for key in ("dtype", "stored_dtype", "gpu_dtype"):
            fields[key] = Dtype[fields.get(key, "auto")]
        model: ModelConfig = whole(ModelConfig)(shape=ModelShape(**shape) if shape else None, **fields)
        problem = problem_of(model.quantization) or CACHES.problem_of(model.cache_dtype)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{shown(file)} does not describe a model: {error}") from error
    if problem:
        raise ConfigError(f"{shown(file)} does not describe a model: {problem}")
    return model


def entries() -> list[ModelConfig]:
    """Read all entries, in the order of `names`; raises as `load`."""
    return [*map(load, names("model"))]


def may_share_vocabulary(target: ModelShape, draft: ModelShape) -> bool:
    """Allow 1 % within a family, whose models pad the vocabulary differently; tokenizers are compared later."""
    difference = abs(target.vocab_size - draft.num_token_ids)
    return difference == 0 or (target.model_type == draft.model_type and difference <= 0.01 * target.vocab_size)


def relatives(model: ModelConfig, *, known: Sequence[ModelConfig] | None = None) -> list[ModelConfig]:
    """The unquantized entries of the same family and vocabulary, itself included, of all or of the `known` ones."""
    shape = model.shape
    whole = [other for other in known or entries() if not format_of(other.quantization).is_quantized]
    family = [other for other in whole if shape and other.shape and _family(other.shape) == _family(shape)]
    return [other for other in family if shape and other.shape and may_share_vocabulary(shape, other.shape)]


def _family(shape: ModelShape) -> str:
    return shape.model_type.removesuffix("_moe")


def smaller_relatives(model: ModelConfig, *, known: Sequence[ModelConfig] | None = None) -> list[str]:
    """Name the possible draft models, which are smaller `relatives`; smallest first."""
    found = sorted(relatives(model, known=known), key=_relative_size)
    return [other.name for other in found if _relative_size(other) < _relative_size(model)]


def _relative_size(model: ModelConfig) -> int:
    shape = model.shape
    assert shape, "relatives have shapes"
    return shape.num_hidden_layers * shape.hidden_size * (shape.hidden_size + shape.intermediate_size)


def _file(name: str) -> Path | None:
    """The file of an entry; None for an id of the hub without one. ConfigError for any other name."""
    file = find("model", name) if is_hub_id(name) or "/" not in name else None
    if file or is_hub_id(name):
        return file
    raise ConfigError(unknown_name("model", name, names("model")))


def _fields(group: str, name: str, *, names_below: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The fields of an entry, merged over its base's; `names_below` are the entries that inherit them."""
    file = find(group, name)
    if file is None:
        counted = _COUNTED.fullmatch(name) if group == "hardware" else None
        one = None
        if counted and counted[2] not in names_below:
            one = _fields(group, counted[2], names_below=names_below)
        is_one = one is not None and (one.get("device"), one.get("num_gpus")) == ("cuda", 1)
        return one | {"name": name, "num_gpus": int(name[0])} if one and is_one else None
    fields = read(file)
    for base in fields.pop("defaults", []):
        if base == "_self_":
            continue
        is_other = isinstance(base, str) and base not in (*names_below, name)
        inherited = _fields(group, base, names_below=(*names_below, name)) if is_other else None
        if inherited is None:
            raise ConfigError(f"{shown(file)}: defaults must name another entry, as in defaults: [7B, _self_]")
        parts = {field: (inherited.get(field) or {}) | (fields.get(field) or {}) for field in _MERGED}
        fields = inherited | fields | {field: part for field, part in parts.items() if part}
    return fields
