"""The manifest: the name of every extension of the package, and the words that ask for it.

A request for an extension that was taken out of this installation gets a sentence with its name.
"""

from functools import cache
from pathlib import Path
from pkgutil import iter_modules

EXTENSIONS: dict[str, tuple[str, ...]] = {
    "accelerate": ("placement=accelerate", "placement.target.kind=accelerate"),
    "acceptance": ("task=acceptance", "setting=trace"),
    "adapters": ("setting=adapter", "file=adapter_config.json"),
    "adaptive": ("speculation.num_draft_tokens=auto",),
    "advice": ("setting=search",),
    "benchmark": ("task=benchmark", "task=latency", "experiment=llama_2023"),
    "bitsandbytes": tuple(f"model.quantization={name}" for name in ("int8", "nf4", "fp4")),
    "calibrate": ("task=calibrate", "command=calibrate"),
    "copies": ("draft=ngram", "draft.fallback=ngram"),
    "cpu": (),
    "deepspeed": ("placement=deepspeed", "placement.target.kind=deepspeed"),
    "eight_bits": (
        *(f"model.quantization={name}" for name in ("int8_weight_only", "int8_groups", "fp8_weight_only")),
        *(f"model={name}_8bit" for name in ("7B", "13B", "30B", "65B")),
    ),
    "evaluate": ("task=evaluate", "task=audit", "task=swaps", "command=audit"),
    "four_bits": tuple(f"model.quantization={name}" for name in ("int4_weight_only", "mxfp4", "nvfp4")),
    "gpu": (),
    "grammars": tuple(f"setting=sampling.{name}" for name in ("json_schema", "regex", "choice", "grammar")),
    "heads": (
        "draft=mtp",
        "setting=draft.confidence",
        "model=tiny-eagle",
        "draft=eagle3_llama3_70B",
        "draft=eagle3_llama3_8B",
        "draft=eagle3_qwen3_14B",
        "draft=eagle3_qwen3_32B",
        "draft=eagle3_qwen3_8B",
        "draft=eagle3_vicuna_13B",
        "draft=tiny-eagle",
        "config.json=draft_vocab_size",
        "config.json=dflash_config",
        "config.json=speculators_model_type",
    ),
    "modules": (
        "model_type=*",
        *(
            f"{kind}={name}"
            for kind in ("model", "draft")
            for name in (
                "gemma2_2B",
                "gemma2_9B",
                "gpt_neo_1.3B",
                "gpt_neox_20B",
                "mixtral_8x7B",
                "qwen3_30B_A3B",
            )
        ),
    ),
    "python_ranks": ("argument=ranks",),
    "reports": ("command=report", "setting=figure"),
    "self_drafts": ("draft=self",),
    "serve": ("task=serve", "command=serve", "field=custom_id"),
    "slurm": ("hydra/launcher=slurm",),
    "synthetic": ("weights=synthetic", "setting=agreement"),
    "tokenizers": ("setting=draft.tokenizer", "tokenizer=own"),
    "windows": ("setting=draft.window", "setting=draft.sinks"),
}
"""Requests for an extension: kind and name, as `unknown_name` is given them; a field is one of a line of prompts.

`*` stands for every name.
"""
NEEDS = {"accelerate": "modules", "deepspeed": "modules", "heads.library": "modules"}
"""Extensions, or modules of extensions, that import another extension, and so are removed with it."""
FOLDER = Path(__file__).parent / "extensions"


@cache
def present() -> tuple[str, ...]:
    """The names of the extensions of this installation, sorted."""
    found = [each.name for each in iter_modules([str(FOLDER)])]
    return tuple(name for name in found if NEEDS.get(name, name) in found)


def records_of_extensions() -> tuple[str, ...]:
    """The modules with the records of the extensions of this installation."""
    return tuple(f"llama_ssp.extensions.{name}.records" for name in present())


def conf_of_extensions() -> tuple[Path, ...]:
    """The folders with the options of the extensions of this installation."""
    return _conf_of(present())


@cache
def _conf_of(extensions: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(folder for name in extensions if (folder := FOLDER / name / "conf").is_dir())


def absent(kind: str, name: str) -> str | None:
    """Return the sentence for a name that belongs to a missing extension; None if it belongs to none."""
    for extension, asked in EXTENSIONS.items():
        if extension not in present() and not {f"{kind}={name}", f"{kind}=*"}.isdisjoint(asked):
            needed = NEEDS.get(extension, extension)
            missing = extension if needed in present() else needed
            return (
                f"{kind}={name} needs the {missing} extension, which was removed from this installation: reinstall "
                "llama-ssp"
            )
    return None
