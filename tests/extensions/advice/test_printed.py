"""Every command and setting that plans, searches and their advice print is taken by the command that printed it."""

import re
import shlex
from collections.abc import Iterator

import pytest

from llama_ssp.errors import SspError
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import fits, fullest_rank
from llama_ssp.planning.spec import spec_of_plan
from llama_ssp.run.commands import plan as entry
from llama_ssp.run.commands.plan import read_settings
from llama_ssp.run.tasks.dry_run import resolve
from llama_ssp.settings.checks import check
from llama_ssp.settings.compose import Known, compose, to_run_config
from tests.helpers.extensions import need
from tests.helpers.in_process import call, planned
from tests.helpers.lanes import meeting

JOBS = """
model=llama2_13B draft=tinyllama_1B hardware=2xl4 placement=own_gpu speculation.overlap=true
model=65B draft=7B placement=own_gpu hardware=2xl4
model=llama3_8B draft=eagle3_llama3_8B hardware=h100
model=llama3_70B hardware=h100
model=30B draft=7B hardware=8xa100_80gb
model=65B draft=7B hardware=g5_12xlarge
model=65B draft=7B hardware=g5_12xlarge hardware.num_nodes=2
model=llama3_70B hardware=8xh100 hardware.num_nodes=2
model=llama3_70B draft=llama3_8B hardware=2xh100
model=llama3_70B draft=none hardware=4xl4
model=llama3_70B draft=eagle3_llama3_70B hardware=4xh100
model=llama3_8B draft=eagle3_llama3_8B hardware=t4
model=llama3_8B draft=eagle3_llama3_8B speculation.tree=2x2x1 hardware=l4
model=qwen3_32B draft=eagle3_qwen3_32B hardware=h100
model=qwen3_32B draft=qwen3_0.6B hardware=2xa10
model=qwen3_8B draft=ngram hardware=h100
model=qwen3_8B draft=ngram hardware=t4
model=qwen3_8B draft=ngram batch_size=16 hardware=8xh100
model=qwen3_30B_A3B draft=qwen3_0.6B hardware=4xh100
model=qwen3_30B_A3B hardware=l4
model=mixtral_8x7B hardware=a100_40gb
model=mixtral_8x7B draft=none hardware=8xa100_40gb batch_size=64
model=gemma2_9B draft=gemma2_2B hardware=rtx3090
model=gemma2_9B hardware=t4 batch_size=8
model=gpt_neox_20B hardware=a10g
model=gpt_neox_20B draft=none hardware=4xt4
model=gpt_neo_1.3B hardware=t4
model=phi_4 draft=none hardware=l4
model=phi_4 hardware=laptop_cpu
model=smollm2_1.7B draft=smollm2_135M hardware=laptop_cpu
model=tiny draft=tiny-draft hardware=laptop_cpu
model=vicuna_13B hardware=rtx4090
model=llama2_70B draft=llama2_7B hardware=8xrtx3090
model=llama2_70B draft=llama2_7B hardware=4xa10 placement=sharded
model=llama2_70B draft=llama2_7B hardware=4xa10 placement=own_gpu
model=llama2_70B draft=tinyllama_1B hardware=8xmi300x
model=llama2_13B draft=tinyllama_1B hardware=l4 batch_size=512 prompt_tokens=2048
model=llama2_7B draft=tinyllama_1B hardware=a10 batch_size=64 placement=replicas hardware.num_gpus=4
model=7B draft=none hardware=4xl4 batch_size=64
model=13B draft=7B hardware=4xa10g batch_size=8 placement=replicated
model=13B draft=7B hardware=4xt4 batch_size=8 placement=replicated
model=13B draft=7B placement=auto hardware=4xt4
model=30B draft=13B placement=auto hardware=8xl4
model=30B draft=7B placement.target.kind=accelerate hardware=2xl4
model=30B placement.target.kind=deepspeed hardware=2xl4
model=30B draft=7B model.quantization=int8 hardware=a10g
model=30B draft=7B model.quantization=nf4 draft.model.quantization=int8 hardware=a10g
model=65B draft=7B workload=summarize batch_size=32 hardware=8xa100_40gb
model=65B draft=7B speculation.acceptance=0.2 hardware=8xh100
model=65B draft=30B hardware=8xh100
model=65B draft=7B speculation.num_draft_tokens=auto hardware=8xa100_80gb
model=65B draft=13B speculation.num_draft_tokens=16 hardware=8xh200 hardware.num_nodes=2
model=llama3_3B draft=llama3_1B hardware=t4
model=llama3_3B draft=llama3_1B verification=block hardware=l4
model=llama3_3B draft=llama3_1B sampling=greedy hardware=rtx5090
model=llama3_8B draft=llama3_1B sampling.repetition_penalty=1.2 hardware=rtx4090
model=llama3_8B draft=llama3_1B model.dtype=bf16 hardware=t4
model=llama3_8B draft=llama3_1B draft.model.dtype=bf16 hardware=t4
model=llama3_8B draft=llama3_1B max_new_tokens=2000 batch_size=256 hardware=h200
model=llama3_8B draft=smollm2_135M draft.tokenizer=own hardware=a10
""".strip().splitlines()
NEEDED = {
    "draft=ngram": "copies",
    "draft=eagle3": "heads",
    "tokenizer=own": "tokenizers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "quantization=int8": "bitsandbytes",
}
OF_MACHINES = re.compile(r"\d+x|g5")
"""Names of machines with several GPUs."""
SETTINGS = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*=[^\s;:,)]+(?: [a-z_]+(?:\.[a-z_]+)*=[^\s;:,)]+)*")
RUN = re.compile(r"llama-ssp run [^;]*")
KNOWN: Known = {}


def refusal(*settings: str, must_fit: bool = False) -> str | None:
    """Why `llama-ssp plan` refuses some settings."""
    try:
        for config in map(resolve, read_settings(settings, KNOWN)):
            machine = hardware.build(config.hardware)
            spec = spec_of_plan(config, machine)
            fullest_rank(spec, machine)
            if must_fit and not config.placement.auto and not fits(spec, machine):
                return "does not fit"
    except SspError as error:
        return str(error)
    return None


def refused_run(command: str) -> str | None:
    """Why `llama-ssp run` refuses a command."""
    try:
        (composed,) = compose(shlex.split(command)[2:])
        check(to_run_config(composed), composed.explicit, world_size=1)
    except SspError as error:
        return str(error)
    return None


def faults_of_plan(job: str) -> Iterator[tuple[str, str | None]]:
    """Whatever a plan prints, each with why it is refused."""
    asked = job.split()
    shown = call(entry.main, asked)
    assert shown.code in {0, 3}, shown.err
    for line in shown.out.splitlines():
        if line.startswith(("warning: ", "note: ")):
            yield from ((command, refused_run(command)) for command in RUN.findall(line))
            for settings in SETTINGS.findall(RUN.sub("", line)):
                if not settings.startswith("task="):
                    yield settings, refusal(*asked, *settings.split())
    for change in planned_changes(asked) if shown.code else ():
        yield " ".join(change), refusal(*asked, *change, must_fit=True)


def planned_changes(asked: list[str]) -> Iterator[list[str]]:
    """The settings of the changes that fit, as the message names them."""
    message = call(entry.main, [*asked, "format=json"]).err
    for change in re.findall(r"(?:fits?: |, or |, )((?:[\w.]+=\S+ )+)\(", message):
        yield change.split()


def faults_of_search(job: str) -> Iterator[tuple[str, str | None]]:
    asked = [*job.split(), "search=true"]
    for line in call(entry.main, asked).well().out.splitlines():
        if "  llama-ssp plan " in line:
            command = shlex.split(line)[3:]
            yield line, refusal(*command, must_fit=True)
    rows = planned(*asked)["search"]
    for row in rows[:: 1 + len(rows) // 12]:
        yield " ".join(row["settings"]), refusal(*row["settings"])


def parts(job: str) -> set[str]:
    """What is chosen in a job: settings with their options, without names of targets and numbers."""
    found = set()
    for word in job.split()[1:]:
        name, _, value = word.partition("=")
        if name == "hardware":
            value = "several GPUs" if OF_MACHINES.match(value) else "one GPU"
        elif name == "draft" and value not in {"none", "ngram"}:
            value = "a head" if value.startswith("eagle") else "a model"
        found.add(name if value.replace(".", "").isdigit() else f"{name}={value}")
    return found


@pytest.mark.seconds
@pytest.mark.parametrize("job", meeting(JOBS, parts, always=1))
def test_whatever_a_plan_and_its_search_print_is_taken_as_printed(job: str) -> None:
    for word, extension in NEEDED.items():
        if word in job:
            need(extension)
    searched = () if "placement.target.kind" in job else faults_of_search(job)  # searches refuse libraries
    found = [*faults_of_plan(job), *searched]
    assert found
    assert [fault for fault in found if fault[1]] == []
