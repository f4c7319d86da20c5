"""A folder of safetensors weights: checked as a whole before loading, then read slice by slice.

Every fault of a folder raises `CheckpointError`: missing, truncated or corrupt files, pickle weights, unknown models or
models with custom code. Module `models.loading` matches tensors with a model; `hub` finds the folder.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llama_ssp.architectures.family import LIBRARIES, check_kind, check_servable, families, kinds, record_of, text_part
from llama_ssp.architectures.model_files import (
    MISTRAL_ALONE,
    change_alone,
    read_json,
    read_model_config,
    require_folder,
)
from llama_ssp.architectures.reading import shape_from
from llama_ssp.catalogue import CONFIG_FILE, GGUF, GGUF_ALONE, ModelConfig, ModelShape
from llama_ssp.errors import CheckpointError, shown
from llama_ssp.registry import imported
from llama_ssp.settings.draft_heads import HeadFile, head_file
from llama_ssp.storage.formats import PackedLayout
from llama_ssp.storage.stored import QUANTIZATION, layout_of, unreadable
from llama_ssp.text.messages import said
from llama_ssp.types import Parsed
from llama_ssp.weights.packed import combine
from llama_ssp.weights.source import ListedTensor, StoredTensor, Wanted, read_header
from llama_ssp.weights.turned import TurnedTensor, turn

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_NAME_BYTES, _MAX_NAME_SHOWN, _MAX_NAMES_SHOWN = 255, 200, 4


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder checked by `inspect`; a `WeightSource`."""

    folder: Path
    config: PretrainedConfig
    shape: ModelShape
    tensors: Mapping[str, ListedTensor]
    head: HeadFile | None = None  # of a draft head, which its extension joins with its target.
    context = property(attrgetter("shape.max_position_embeddings"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the stored tensors that are not packed."""
        dtypes = Counter(tensor.dtype for tensor in self.tensors.values() if tensor.dtype and not tensor.storage)
        return dtypes.most_common(1)[0][0]

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """See `ListedTensor.read`."""
        return self.tensors[name].read(**wanted)


def inspect(folder: Path, *, config_alone: bool = False) -> Checkpoint:
    """Check a folder written by `save_pretrained`, without loading weights; every fault is a CheckpointError.

    ConfigError for layers that do not run and have no heads. With `config_alone` there are no tensors, and only
    config.json is read.
    """
    require_folder(folder)
    content = read_model_config(folder)
    head = head_file(content, folder / CONFIG_FILE)
    text = text_part(content)
    if head is None:
        check_kind(content, folder / CONFIG_FILE)
    config, layout = _read_config(folder, text if head is None else head.sizes)
    try:
        shape = shape_of(config) if head is None else head.shape_over(shape_of(config))
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        check_servable(lambda name: getattr(config, name, None))
        raise CheckpointError(f"{folder}/config.json describes no decoder with attention: {error}") from error
    sizes = {entry.name: getattr(shape, entry.name) for entry in fields(shape) if entry.default is MISSING}
    if small := [f"{name} {size}" for name, size in sizes.items() if type(size) is int and size < 1]:
        raise CheckpointError(
            f"{folder}/config.json gives {', '.join(small)}, but at least 1 is required: copy it again"
        )
    if head:
        config.update({"vocab_size": shape.vocab_size})
    tensors: Mapping[str, ListedTensor] = {} if config_alone else _list_tensors(folder, is_head=head is not None)
    if text is not content and tensors:
        tensors = text_tensors(tensors, str(content.get("model_type")), width=shape.hidden_size)
        has_head = any(name.startswith(_HEAD) for name in tensors)
        if has_head or _EMBEDDING in tensors:  # the configs of both parts may differ
            config.update({"tie_word_embeddings": not has_head})
            shape = replace(shape, tie_word_embeddings=not has_head)
    packed = combine(tensors, layout, folder) if layout and tensors else tensors
    for library in LIBRARIES.all().values():
        packed = imported(library.join, setting=f"model_type={shape.model_type}")(packed, folder)
    joined = turn(packed, record_of(shape.model_type).turned)
    return Checkpoint(folder=folder, config=config, shape=shape, tensors=joined, head=head)


_PARTS = "(?:language_model|text_model|llm)"
_OF_TEXT = re.compile(rf"^model\.{_PARTS}\.(?:model\.)?")
_HOLDER = re.compile(rf"^(?:thinker\.)?(?:{_PARTS}\.)?")
_HEAD, _EMBEDDING = "lm_head.", "model.embed_tokens.weight"


def of_text(name: str) -> str:
    """The name of a tensor in a text model, from that in the files of a model that reads images too."""
    return _OF_TEXT.sub("model.", _HOLDER.sub("", name))


def text_tensors(tensors: Mapping[str, ListedTensor], model_type: str, *, width: int) -> dict[str, ListedTensor]:
    """The tensors of a model of this kind by their names in its text part, as transformers renames and turns them.

    Experts of a text part of this width are stored the other way round by some kinds.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import Transpose, WeightRenaming

    changes = get_checkpoint_conversion_mapping(model_type) or []
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    turned = [change for change in changes if [type(each) for each in getattr(change, "operations", ())] == [Transpose]]
    found = dict[str, ListedTensor]()
    for stored, tensor in tensors.items():
        name = stored
        for change in renamings:
            name, _ = change.rename_source_key(name)
        name, dim = of_text(name), 2 - stored.endswith("down_proj")
        if len(tensor.shape) == 3 and tensor.shape[dim] != width:
            is_turned = any(stored.endswith(pattern) for change in turned for pattern in change.source_patterns)
            tensor = TurnedTensor.of(tensor) if is_turned else tensor  # noqa: PLW2901
        found[name] = tensor
    return found


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The sizes of a model; sizes that its family does not store are derived from the rest."""
    content = config.to_dict()

    def field(name: str) -> Parsed:
        return content[name] if name in content else getattr(config, name, None)

    return shape_from(field, ties=config.tie_word_embeddings)


def check_shape(entry: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare a catalogue entry with its checkpoint; CheckpointError if it has another shape.

    Of a head, the context is its target's, and the plan alone needs to know whether it has an embedding.
    """
    if entry.shape is None:
        return
    wanted, found = asdict(entry.shape), asdict(checkpoint.shape)
    for name in ("recurrent", *(("max_position_embeddings", "shares_embedding") if checkpoint.head else ())):
        del wanted[name]
    if differences := [
        f"{name} is {found[name]}, not {value}" for name, value in wanted.items() if found[name] != value
    ]:
        raise CheckpointError(
            f"{checkpoint.folder} is not {entry.name}: {', '.join(differences)}; "
            f"{said('model', checkpoint.folder)} accepts it"
        )


def _read_config(folder: Path, content: Mapping[str, Any]) -> tuple[PretrainedConfig, PackedLayout | None]:
    """The configuration, and the layout of packed weights if there are any."""
    file, model_type = folder / CONFIG_FILE, content.get("model_type")
    problem, reader = None, None
    layout = layout_of(content[QUANTIZATION]) if QUANTIZATION in content else None
    if not isinstance(model_type, str):
        problem = "has no model_type: a config.json as save_pretrained writes it is required"
    elif (reader := _reader_of(model_type)) is None:
        asks = ", and asks for Python code from its folder, which is never run" if "auto_map" in content else ""
        problem = (
            f"has model_type {shown(model_type)}, unknown to transformers {__version__}{asks}: a newer one may know it"
        )
    elif model_type in CONFIG_MAPPING and model_type not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *kinds()):
        problem = (
            f"has model_type {shown(model_type)}, for which transformers {__version__} has no causal language model"
        )
    elif isinstance(layout, str):
        problem = unreadable(layout)
    if reader is None or problem or isinstance(layout, str):
        raise CheckpointError(f"{file} {problem}")
    try:
        config: PretrainedConfig = reader.from_dict(dict(content))
    except Exception as error:  # each family raises its own errors
        reason = " ".join(str(error).split())[:_MAX_NAME_SHOWN] or type(error).__name__
        raise CheckpointError(f"{file} is no valid configuration of {model_type}: {reason}") from error
    vars(config).pop(QUANTIZATION, None)  # which only the library's own loader needs
    if not hasattr(config, "tie_word_embeddings"):  # of a text part, which has no output of its own
        config.update({"tie_word_embeddings": False})
    return config, layout


def _reader_of(model_type: str) -> type[PretrainedConfig] | None:
    """The class that reads a config.json of this kind, if there is one.

    A family of the lean decoder that transformers does not know has the fields of a Llama.
    """
    if model_type in CONFIG_MAPPING:
        found: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
        return found
    family = families().get(model_type)
    is_lean = family is not None and family.is_llama_kind and not family.is_head
    return type("LlamaKind", (CONFIG_MAPPING["llama"],), {"model_type": model_type}) if is_lean else None


def _list_tensors(folder: Path, *, is_head: bool) -> dict[str, StoredTensor]:
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _no_weights(folder, is_head=is_head)
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(map(_is_file_name, file_of.values())):
        raise CheckpointError(
            f"{index} has no weight_map from tensors to files in the folder: copy or download it again"
        )
    files = sorted(set(file_of.values()))
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{index} names {summary(absent)}, which is missing: copy or download the folder again")
    # As transformers reads them: all tensors of the files, whatever the index says of each.
    return {name: tensor for file in files for name, tensor in read_header(folder / file).items()}


def _is_file_name(name: object) -> bool:
    """Whether this can be the name of a file directly in the folder."""
    if not isinstance(name, str) or "\0" in name or Path(name).name != name:
        return False
    return len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES


def _no_weights(folder: Path, *, is_head: bool) -> CheckpointError:
    if said_of_change := change_alone(str(folder), folder, []):
        return CheckpointError(said_of_change)
    if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in {".bin", ".pt", ".pth", ".ckpt"}):
        program = (
            f"from transformers import AutoModelForCausalLM as M; m, i = M.from_pretrained('{folder}', dtype='auto', "
            f"output_loading_info=True); i['missing_keys'] and exit(str(i)); "
            f"m.save_pretrained('{folder}')"
        )
        if is_head:
            loaded = f"torch.load('{folder / pickles[0]}', weights_only=True)"
            program = f"import torch, safetensors.torch as s; s.save_file({loaded}, '{folder / SINGLE_FILE}')"
        return CheckpointError(
            f"{folder} holds pickle weights ({summary(pickles)}), which can run code when read: convert them with "
            f'python -c "{program}"'
        )
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    is_of_mistral = bool(shards) and all(name.startswith("consolidated") for name in shards)
    if is_of_mistral or any(folder.glob(f"*{GGUF}")):
        return CheckpointError(f"{folder} {MISTRAL_ALONE if is_of_mistral else GGUF_ALONE}")
    if shards:
        return CheckpointError(f"{folder} holds {summary(shards)} but no {INDEX_FILE}: copy or download the index too")
    return CheckpointError(f"{folder} holds no weights: {SINGLE_FILE}, or shards and their {INDEX_FILE}, is required")


def summary(names: Sequence[str]) -> str:
    """The first few names, in a printable and short form, and the number of others."""
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    printable = [
        name if name.isprintable() else shown(name) for name in names[:_MAX_NAMES_SHOWN]
    ]  # a damaged file may garble them
    return ", ".join(f"{name[:_MAX_NAME_SHOWN]}{'...' * (len(name) > _MAX_NAME_SHOWN)}" for name in printable) + more
