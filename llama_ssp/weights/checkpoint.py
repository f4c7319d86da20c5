"""A folder of safetensors weights: checked as a whole before loading, then read slice by slice.

Every fault of a folder raises `CheckpointError`: missing, truncated or corrupt files, pickle weights, unknown models or
models with custom code. Module `loader` matches tensors with a model; `hub` finds the folder.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Unpack

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llama_ssp.config.model_files import CONFIG_FILE, read_json, shown
from llama_ssp.config.schema import ModelConfig, ModelShape
from llama_ssp.errors import CheckpointError
from llama_ssp.weights.source import TensorFacts, Wanted

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_NAME_BYTES, _MAX_NAME_SHOWN = 255, 200
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class StoredTensor(TensorFacts):
    """A tensor and its safetensors file."""

    file: Path


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder checked by `inspect`; a `WeightSource`."""

    folder: Path
    config: PretrainedConfig
    shape: ModelShape
    tensors: Mapping[str, StoredTensor]

    @property
    def context(self) -> int:
        """The maximum sequence length."""
        return self.shape.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the stored tensors."""
        dtypes = Counter(tensor.dtype for tensor in self.tensors.values() if tensor.dtype)
        return dtypes.most_common(1)[0][0]

    def read(self, name: str, **wanted: Unpack[Wanted]) -> Tensor:
        """Copy a tensor or a slice of it out of its file, casting in the same copy; see `WeightSource.read`.

        CheckpointError if the file has changed since it was inspected.
        """
        file, dim = self.tensors[name].file, wanted.get("dim")
        try:
            with safe_open(file, framework="pt") as stored:
                source = stored.get_slice(name)
                if dim is None:
                    pieces = [source[:]]
                else:
                    pieces = [source[(*[slice(None)] * dim, slice(part.start, part.stop))] for part in wanted["parts"]]
                piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim or 0)
                # A copy, because it may be a view of the mapped file.
                dtype = wanted.get("dtype") or piece.dtype
                values = piece.to(dtype, copy=True, memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error
        return values.to(wanted.get("device"))


def inspect(folder: Path) -> Checkpoint:
    """Check a folder written by `save_pretrained`, without loading weights; every fault is a CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: a folder with config.json and safetensors weights is required")
    config = _read_config(folder)
    try:
        shape = shape_of(config)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder}/config.json describes no decoder with attention: {error}") from error
    small = [f"{name} {size}" for name, size in asdict(shape).items() if type(size) is int and size < 1]
    if small:
        message = f"{folder}/config.json gives {', '.join(small)}, but at least 1 is required: copy it again"
        raise CheckpointError(message)
    return Checkpoint(folder=folder, config=config, shape=shape, tensors=_list_tensors(folder))


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The sizes of a model; sizes that its family does not store are derived from others."""
    num_heads = config.num_attention_heads
    derived = ("num_key_value_heads", "head_dim", "intermediate_size")
    return ModelShape(
        **{field.name: getattr(config, field.name) for field in fields(ModelShape) if field.name not in derived},
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
    )


def check_shape(entry: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare a catalogue entry with its checkpoint; CheckpointError if it has another shape."""
    if entry.shape is None:
        return
    wanted, found = asdict(entry.shape), asdict(checkpoint.shape)
    differences = [f"{name} is {found[name]}, not {value}" for name, value in wanted.items() if found[name] != value]
    if differences:
        raise CheckpointError(
            f"{checkpoint.folder} is not {entry.name}: {', '.join(differences)}; "
            f"model=local model.path={checkpoint.folder} accepts it"
        )


def _read_config(folder: Path) -> PretrainedConfig:
    file = folder / CONFIG_FILE
    content = read_json(file)
    model_type = content.get("model_type")
    problem = None
    if "auto_map" in content or "trust_remote_code" in content:
        problem = (
            "asks for Python code from its folder, which is never run: a model that transformers knows is required"
        )
    elif not isinstance(model_type, str):
        problem = "has no model_type: a config.json as save_pretrained writes it is required"
    elif model_type not in CONFIG_MAPPING:
        problem = f"has model_type {shown(model_type)}, unknown to transformers {__version__}: a newer one may know it"
    elif model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = f"has model_type {shown(model_type)}, which is no causal language model"
    elif "quantization_config" in content:
        problem = "describes quantized weights: float32, bfloat16 or float16 weights are required"
    if problem:
        raise CheckpointError(f"{file} {problem}")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each family raises its own errors
        reason = " ".join(str(error).split())[:_MAX_NAME_SHOWN] or type(error).__name__
        raise CheckpointError(f"{file} is no valid configuration of {model_type}: {reason}") from error
    return config


def _list_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise _no_weights(folder)
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(_is_file_name(name) for name in file_of.values()):
        message = f"{index} has no weight_map from tensors to files in the folder: copy or download it again"
        raise CheckpointError(message)
    files = sorted(set(file_of.values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index} names {summary(absent)}, which is missing: copy or download the folder again")
    headers = {name: _read_header(folder / name) for name in files}
    strays = [name for name, file in file_of.items() if name not in headers[file]]
    if strays:
        message = f"{index} looks for {summary(strays)} in files without it: copy or download the folder again"
        raise CheckpointError(message)
    return {name: headers[file][name] for name, file in file_of.items()}


def _is_file_name(name: object) -> bool:
    """Whether this can be the name of a file directly in the folder."""
    if not isinstance(name, str) or "\0" in name or Path(name).name != name:
        return False
    return len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """List a file's tensors; on opening, safetensors checks the header against the size of the file."""
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: StoredTensor(
                    file=file, dtype=_FLOAT_DTYPES.get(piece.get_dtype()), shape=tuple(piece.get_shape())
                )
                for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is truncated or corrupt ({error}): copy or download it again")


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{folder} holds pickle weights ({summary(pickles)}), which can run code when read: convert them with "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
        )
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        return CheckpointError(f"{folder} holds {summary(shards)} but no {INDEX_FILE}: copy or download the index too")
    return CheckpointError(f"{folder} holds no weights: {SINGLE_FILE}, or shards and their {INDEX_FILE}, is required")


def summary(names: Sequence[str], *, limit: int = 4) -> str:
    """The first few names and the number of others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(_shortened, names[:limit])) + more


def _shortened(name: str) -> str:
    """A printable, short form of a name, which a damaged file may have garbled."""
    name = name if name.isprintable() else shown(name)
    return name if len(name) <= _MAX_NAME_SHOWN else f"{name[:_MAX_NAME_SHOWN]}..."
