"""What the planner forecasts for the device at hand, with the bandwidth of a copy measured on it: goals of `gpu`."""

from dataclasses import replace

import torch

from llama_ssp import Pair
from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.machine import detect_hardware
from llama_ssp.errors import ConfigError
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.tasks.dry_run import job_of_run

OTHERWISE = "1xh200"
"""Whose time of a kernel stands for that of a GPU without an entry in conf/hardware."""


def machine_at_hand(device: torch.device, *, copy_bytes_per_s: float) -> HardwareConfig:
    """This device as data sheets describe it, without what `task=calibrate` measured, but for the copy."""
    try:
        found = detect_hardware(on_cpu=device.type == "cpu")
    except ConfigError:
        found = hardware.load(OTHERWISE)
    return replace(found, num_gpus=1, num_nodes=1, copy_bytes_per_s=copy_bytes_per_s, profiles=[])


def forecast(pair: Pair, machine: HardwareConfig, *, prompt_tokens: int, new_tokens: int) -> Timing:
    """The planner's times of a pair on one device, at batch 1."""
    config = replace(pair.config, batch_size=1, max_new_tokens=new_tokens)
    return timing(job_of_run(config, world_size=1, prompt_tokens=prompt_tokens, device=machine.device), machine)
