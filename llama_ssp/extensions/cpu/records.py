"""The records of CPUs: what replaces torch's operators on them."""

from llama_ssp.extensions.cpu.equal_bits import ABILITY
from llama_ssp.registry.operators import DeviceOperator

_EXTENSION = "llama_ssp.extensions.cpu"

LINEAR = DeviceOperator(operation="linear", device="cpu", make=f"{_EXTENSION}.linear:find_linear")
PACKED_LINEAR = DeviceOperator(operation="packed_linear", device="cpu", make=f"{_EXTENSION}.linear:find_packed")
PACKED_BLOCK = DeviceOperator(operation="packed_block", device="cpu", make=f"{_EXTENSION}.linear:find_block")
ATTENTION = DeviceOperator(operation="attention", device="cpu", make=f"{_EXTENSION}.decoder:find_model_attention")
LATENTS = DeviceOperator(operation="latents", device="cpu", make=f"{_EXTENSION}.latents:find_latents")
DRAW = DeviceOperator(operation="draw", device="cpu", make=f"{_EXTENSION}.draw:find_draw")
EXECUTOR = DeviceOperator(operation="executor", device="cpu", make=f"{_EXTENSION}.executor:TracedExecutor")
EQUAL_BITS = ABILITY
COLLECTIVES = DeviceOperator(operation="collectives", device="cpu", make=f"{_EXTENSION}.sums:find_collectives")
MESSAGES = DeviceOperator(operation="messages", device="cpu", make=f"{_EXTENSION}.shared_memory:find_board")
THREADS = DeviceOperator(operation="threads", device="cpu", make=f"{_EXTENSION}.threads:find_threads")
