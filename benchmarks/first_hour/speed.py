"""Synthetic models at true sizes: `python -m benchmarks.first_hour.speed TARGET [--int8] [--small]`.

The planner says what fits into this GPU's memory: the target alone, and the first of DRAFTS that fits with it. Plain
and speculative rounds are timed, held to a copy of the bytes that they read and to the forecast; a trace of a few
rounds is kept, and the memory that was used at most is held to the plan.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decoding import Pace, config_of, decode_once, load_pair, make_decoder, pace, requests
from benchmarks.first_hour.engine import path_faults
from benchmarks.first_hour.runner import FOLDER
from benchmarks.first_hour.step import Where, main, say, skip
from llama_ssp import Pair
from llama_ssp.calibration.operators import copy_bytes_per_s
from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.machine import detect_hardware
from llama_ssp.config.schema import Dtype, RunConfig
from llama_ssp.distributed.memory import MemoryWatch
from llama_ssp.errors import ConfigError
from llama_ssp.planning.plan import Plan, make_plan, shortage
from llama_ssp.tasks.dry_run import job_of_run

DRAFTS = {"7B": ["tinyllama_1B"], "tiny": ["tiny-draft"]}
OTHER_DRAFTS = ["7B", "tinyllama_1B"]
OTHERWISE = "1xh200"
"""Whose figures stand for those of a GPU without an entry in conf/hardware."""
PROMPT_TOKENS, NEW_TOKENS, TRACED_TOKENS = 512, 128, 8


def machine_at_hand(where: Where) -> HardwareConfig:
    """This device with its memory and the bandwidth of a copy, without what `task=calibrate` measured."""
    try:
        found = detect_hardware(on_cpu=not where.is_gpu)
    except ConfigError:
        found = hardware.load(OTHERWISE)
    memory = torch.cuda.mem_get_info()[1] if where.is_gpu else found.memory_bytes
    copied = copy_bytes_per_s(where.device, 2**24 if where.is_small else 2**30)
    say(copy_bytes_per_s=copied, memory_bytes=memory, forecast_for=found.name)
    if where.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return replace(found, num_gpus=1, num_nodes=1, copy_bytes_per_s=copied, memory_bytes=memory, profiles=[])


def planned(config: RunConfig, machine: HardwareConfig) -> Plan:
    """The plan of a run on this device."""
    config = replace(config, batch_size=1, max_new_tokens=NEW_TOKENS)
    return make_plan(job_of_run(config, world_size=1, prompt_tokens=PROMPT_TOKENS, device=machine.device), machine)


def speed(where: Where, *, target: str, is_int8: bool) -> Iterator[str]:
    """Load what fits, time it, trace it."""
    machine = machine_at_hand(where)
    dtype = Dtype.fp16 if where.is_gpu else Dtype.fp32
    made = partial(
        config_of, target, dtype=dtype, device=where.device, quantization="int8_weight_only" if is_int8 else "none"
    )
    configs = [made(draft) for draft in [*DRAFTS.get(target, OTHER_DRAFTS), None]]
    plans = [planned(config, machine) for config in configs]
    fitting = [(config, plan) for config, plan in zip(configs, plans, strict=True) if plan.fits]
    if not fitting:
        skip(shortage(plans[-1]))
    config, plan = fitting[0]
    draft = config.draft.model.name if config.draft.model else None
    say(doing="load", draft=draft, left_out=[shortage(each) for each in plans[: plans.index(plan)]])
    pair, paces = load_pair(config), {}
    for speculative in (False, True) if draft else (False,):
        mode = "speculative" if speculative else "plain"
        say(doing=mode)
        decoder = make_decoder(pair, speculative=speculative)
        wanted = requests(pair, number=1, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        paces[mode] = pace(decoder, wanted)
        say(mode=mode, **asdict(paces[mode]))
        yield from path_faults(where, pair, decoder)
    _say_shares(plan, paces)
    yield from _memory_faults(where, plan)
    say(doing="trace")
    _trace(where, pair, speculative=draft is not None)


def _say_shares(plan: Plan, paces: dict[str, Pace]) -> None:
    """Plain steps against a copy of what they read and the forecast; speculative rounds against both."""
    timed, plain = plan.timing, paces["plain"].ms_per_token
    bound_ms = 1e3 * timed.plain_s * timed.copy_share
    say(plain_ms=plain, share_of_copy=bound_ms / plain, forecast_ms=1e3 * timed.plain_s)
    if "speculative" in paces:
        fast = paces["speculative"].ms_per_token
        say(speculative_ms=fast, speedup=plain / fast, forecast_ms=1e3 * (timed.speculative_s or 0))


def _memory_faults(where: Where, plan: Plan) -> Iterator[str]:
    """Whether more of the GPU was used than planned."""
    if not where.is_gpu:
        return
    watch = MemoryWatch(where.device)
    watch.sample()
    used, needed = watch.peak_bytes or 0, plan.fullest.needed_bytes
    say(used_bytes=used, reserved_bytes=torch.cuda.max_memory_reserved(), planned=plan.fullest.as_items())
    if used > needed:
        yield f"{used / 2**30:.1f} GiB were used, {needed / 2**30:.1f} GiB planned"


def _trace(where: Where, pair: Pair, *, speculative: bool) -> None:
    """Keep a trace of a few rounds, and say where their time goes."""
    decoder = make_decoder(pair, speculative=speculative)
    wanted = requests(pair, number=1, prompt_tokens=PROMPT_TOKENS, new_tokens=TRACED_TOKENS)
    for seed in (0, 1):
        decode_once(decoder, wanted, seed=seed)
    activity = ProfilerActivity.CUDA if where.is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        decode_once(decoder, wanted, seed=2)
    took = {event.key[:80]: event.self_device_time_total or event.self_cpu_time_total for event in seen.key_averages()}
    say(kernels_us=dict(sorted(took.items(), key=lambda each: each[1], reverse=True)[:25]))
    name = f"{pair.config.model.name}-{pair.config.model.quantization}.trace.json.gz"
    seen.export_chrome_trace(str(Path(os.environ.get(FOLDER, ".")) / name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("target")
    parser.add_argument("--int8", action="store_true")
    named, _ = parser.parse_known_args()
    main({named.target: partial(speed, target=named.target, is_int8=named.int8)})
