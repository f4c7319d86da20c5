"""The records of CPUs: what takes the place of torch's operators there."""

from llama_ssp.operators import DeviceOperator
from llama_ssp.rooms.cpu.equal_bits import ABILITY

_ROOM = "llama_ssp.rooms.cpu"

LINEAR = DeviceOperator(operation="linear", device="cpu", make=f"{_ROOM}.linear:find_linear")
PACKED_LINEAR = DeviceOperator(operation="packed_linear", device="cpu", make=f"{_ROOM}.linear:find_packed")
PACKED_BLOCK = DeviceOperator(operation="packed_block", device="cpu", make=f"{_ROOM}.linear:find_block")
ATTENTION = DeviceOperator(operation="attention", device="cpu", make=f"{_ROOM}.decoder:find_model_attention")
LATENTS = DeviceOperator(operation="latents", device="cpu", make=f"{_ROOM}.latents:find_latents")
DRAW = DeviceOperator(operation="draw", device="cpu", make=f"{_ROOM}.draw:find_draw")
EXECUTOR = DeviceOperator(operation="executor", device="cpu", make=f"{_ROOM}.executor:TracedExecutor")
EQUAL_BITS = ABILITY
COLLECTIVES = DeviceOperator(operation="collectives", device="cpu", make=f"{_ROOM}.sums:find_collectives")
MESSAGES = DeviceOperator(operation="messages", device="cpu", make=f"{_ROOM}.shared_memory:find_board")
THREADS = DeviceOperator(operation="threads", device="cpu", make=f"{_ROOM}.threads:find_threads")
