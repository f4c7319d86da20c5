"""Sentences about settings, options and words that do not exist: similar ones, or what to type instead."""

import os
from collections.abc import Collection, Iterator, Sequence

from llama_ssp.errors import ConfigError, similar_name, unknown_name
from llama_ssp.machines import hardware
from llama_ssp.settings import catalogue, folders
from llama_ssp.settings.folders import GROUPS, is_hub_id
from llama_ssp.settings.tasks import task_specs

_RANKS = "llama-ssp run ranks=N starts N ranks on this machine, and llama-ssp plan takes hardware.num_gpus=N"
_NODES = "several nodes are started by sbatch --nodes N launch/slurm.sbatch, or by torchrun --nnodes N launch/run.py"
_STOP = """stop_strings='["END"]' ends a completion at a text"""
_LENGTH = "max_new_tokens=64 limits the new tokens of a completion"
_DRAFTED = "speculation.num_draft_tokens=4 is K, the number of drafted tokens per round"
_EIGHT_BITS = "model.quantization=int8 or nf4 stores the target so, and draft.model.quantization the draft"
_LAYERS = "placement=accelerate puts the layers in a row over the GPUs"
_FOREIGN = {
    "no_repeat_ngram_size": "it forbids every n-gram that the whole text has at each drafted position, which is not "
    "supported; sampling.repetition_penalty=1.1 or sampling.frequency_penalty=0.5 also make repetition rarer",
    **dict.fromkeys(("stop", "stop_sequences", "stop_token", "until", "eos"), _STOP),
    **dict.fromkeys(("max_tokens", "max_length", "n_predict", "num_tokens", "length"), _LENGTH),
    **dict.fromkeys(
        ("K", "k", "gamma", "lookahead", "num_speculative_tokens", "num_assistant_tokens", "draft_tokens"), _DRAFTED
    ),
    **dict.fromkeys(
        ("ranks", "rank", "num_ranks", "gpus", "num_gpus", "nproc", "nproc_per_node", "world_size"), _RANKS
    ),
    **dict.fromkeys(("tp", "tensor_parallel_size"), f"the target is tensor parallel over all ranks, and {_RANKS}"),
    **dict.fromkeys(("nodes", "nnodes", "num_nodes"), _NODES),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "int8", "bits"), _EIGHT_BITS),
    **dict.fromkeys(("target", "target_model", "model_name"), "model=NAME is the target"),
    **dict.fromkeys(("draft_model", "assistant_model", "speculative_model"), "draft=NAME is the draft"),
    "device_map": _LAYERS,
    "do_sample": "sampling=greedy draws nothing, and all other sampling draws",
    "n": "num_samples=4 completes each prompt 4 times",
}
"""Settings of other programs, by their last word, and what has their place here."""
_OLD_TASKS = {"eval": "task=evaluate suite=arithmetic"}
"""Tasks of the first llama-ssp that have another name now."""


def unknown_setting(key: str, keys: Collection[str], *, otherwise: str) -> str:
    """Report an unknown setting with similar keys; without any, `otherwise` says where all keys are listed."""
    if reason := _FOREIGN.get(key.rpartition(".")[2]):
        return f"unknown setting {key!r}: {reason}"
    last_words = {name.rpartition(".")[2]: name for name in sorted(keys, key=len, reverse=True)}
    similar = similar_name(key.rpartition(".")[2], last_words)
    close = dict.fromkeys(filter(None, [similar_name(key, keys), similar and last_words[similar]]))
    hint = f"did you mean {' or '.join(close)}?" if close else otherwise
    return f"unknown setting {key!r}: {hint}"


def unread_words(words: Sequence[str]) -> list[str]:
    """Report words of a command line that are no settings, one by one unless they are names alone."""
    if words and (settings := as_settings(words)):
        return [f"{' '.join(words)!r} names no settings: write {settings}"]
    return [unreadable(word) for word in words]


def unreadable(text: str) -> str:
    """Report that a word of the command line is no setting, and how one is written."""
    return (
        f"cannot read {text!r}: settings are written name=value, and a value with brackets, quotes or commas "
        "needs quotes of its own inside those of the shell"
    )


def as_settings(words: Sequence[str]) -> str | None:
    """What names alone, such as `compare 30B 7B`, are as settings; None if one of the words is no name."""
    settings, roles = [], ["model", "draft"]
    for word in words:
        if word in _OLD_TASKS:
            settings.append(_OLD_TASKS[word])
        elif word in task_specs():
            settings.append(f"task={word}")
        elif roles and (word in catalogue.names() or word == "none"):
            settings.append(f"{roles.pop(0)}={word}")
        else:
            return None
    return " ".join(settings)


def unknown_command(words: Sequence[str], commands: Sequence[str]) -> str:
    """Report a first word that is no command of the program."""
    if "=" in words[0] or words[0].startswith("-"):
        return f"{words[0]} follows a command, such as llama-ssp run {words[0]}; the commands are {', '.join(commands)}"
    names = [word for word in words if "=" not in word]
    if settings := as_settings(names):
        others = [word for word in words if "=" in word]
        return f"{words[0]!r} is no command: write llama-ssp run {' '.join([settings, *others])}"
    return unknown_name("command", words[0], commands)


def problems_of_option(group: str, name: str, known: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with an option of a group, its name or a user's file; `known` lacks ids of the hub."""
    if name not in known:
        problem = _of_name(group, name, known)
        if problem:
            yield problem
        return
    try:
        if file := folders.find(group, name):
            folders.read(file)
        if group == "hardware":
            hardware.load(name)
        elif group in GROUPS and name in catalogue.names():
            catalogue.load(name)
    except ConfigError as error:
        yield str(error)


def _of_name(group: str, name: str, known: Collection[str]) -> str | None:
    if group not in GROUPS:
        return unknown_name(group, name, known)
    key = "model" if group == "model" else f"{group}.model"
    if os.path.isfile(f"{name}/config.json"):  # noqa: PTH113 - a name can be no path at all
        of_hub = f", or {group}=local {key}.hub_id={name} for the model of the hub" if is_hub_id(name) else ""
        return f"{group}={name} is a folder here: give {group}=local {key}.path={name}{of_hub}"
    if is_hub_id(name):
        return None
    if "/" in name:
        return (
            f"{group}={name} is neither a name of the catalogue nor an id of the hub, owner/name: for a folder give "
            f"{group}=local {key}.path=DIR"
        )
    sentence = unknown_name(group, name, known)
    return sentence if similar_name(name, known) else f"{sentence}; {group}=owner/name takes a model of the hub"
