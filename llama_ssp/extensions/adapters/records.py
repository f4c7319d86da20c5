"""The records of LoRA adapters: their setting, their files, and what does not combine with them. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from llama_ssp.architectures.model_files import FLAG, LARGE, OBJECT, POSITIONS, TEXT, Kind, read_json
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import shown
from llama_ssp.settings.aliases import Counterpart
from llama_ssp.settings.combinations import Ability
from llama_ssp.settings.extensions import MoreSettings
from llama_ssp.settings.fields import setting
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.weight_changes import WeightChange
from llama_ssp.text.messages import said

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS: dict[str, Kind] = {
    "r": POSITIONS,
    "lora_alpha": LARGE,
    "use_rslora use_dora fan_in_fan_out lora_bias": FLAG,
    "rank_pattern alpha_pattern": OBJECT,
    "base_model_name_or_path peft_type bias": TEXT,
}
"""Fields of `CONFIG` with a known type."""


@dataclass(kw_only=True)
class AdaptedModel(ModelConfig):
    """A model that may have an adapter."""

    adapter: str | None = setting(
        None,
        "a folder with a LoRA adapter as PEFT writes it, or its id on the hub; it is merged into the weights while "
        "they are loaded.",
    )


def _adapter(config: RunConfig) -> object:
    return getattr(config.model, "adapter", None)


def _alone(where: str, config: Path) -> str:
    base = read_json(config, FIELDS).get("base_model_name_or_path")
    of_base = f"of {shown(base)}" if base else "of another model, which it does not name"
    return (
        f"{where} is an adapter {of_base}, not a model: give that one as the model, and the adapter as model.adapter="
    )


SETTINGS = MoreSettings(
    name="adapter", config=AdaptedModel, after="path", paths=("model.adapter", "draft.model.adapter")
)
ADAPTER = WeightChange(
    name="adapter",
    config=CONFIG,
    weights=WEIGHTS,
    alone=_alone,
    apply="llama_ssp.extensions.adapters.merging:with_adapter",
)
ABILITY = Ability(
    name="an adapter of the target",
    has=_adapter,
    words=lambda config: {"adapter": said("model.adapter", _adapter(config))},
)
COUNTERPART = Counterpart(
    "lora lora_path enable_lora lora_modules",
    "",
    "model.adapter=DIR merges a LoRA adapter into the weights; several at once are not here",
)
