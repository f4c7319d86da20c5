"""Changes the files of a checkpoint in place."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor]], object]


def edit_json(file: Path, **changes: object) -> None:
    """Give a JSON object other fields."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_config(folder: Path, **changes: object) -> None:
    """Give a config.json other fields."""
    edit_json(folder / "config.json", **changes)


def edit_tensors(file: Path, edit: Edit) -> None:
    """Let a function change the tensors of a safetensors file."""
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
