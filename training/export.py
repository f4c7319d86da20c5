"""Saving of the pair in the form the runner and transformers load, and of checkpoints to go on from.

What it does: writes a model as bf16 safetensors with its config, generation config and the tokenizer.
What it does not do: train or measure.
"""

import json
from copy import deepcopy
from pathlib import Path

from safetensors.torch import save_model as save_tensors
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.tokenizer import BOS_ID, EOS_ID, PAD_ID

WEIGHTS = "model.safetensors"
READABLE = 0o644


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model folder that `from_pretrained` loads."""
    partial = folder.with_name(folder.name + ".partial")
    copy = deepcopy(model).bfloat16()
    copy.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    copy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    settings_file = partial / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(partial.iterdir()):
        file.chmod(READABLE)
        file.replace(folder / file.name)
    partial.rmdir()


def save_checkpoint(model: LlamaForCausalLM, file: Path) -> None:
    """Writes the float32 weights, so that `safetensors.torch.load_model` can go on from them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_tensors(model, str(partial))
    partial.replace(file)
