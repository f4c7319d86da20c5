"""The records of GPUs: operators that replace torch's on them."""

from llama_ssp.extensions.gpu.equal_bits import ABILITY
from llama_ssp.registry.operators import DeviceOperator

_EXTENSION = "llama_ssp.extensions.gpu"

LINEAR = DeviceOperator(operation="linear", device="cuda", make=f"{_EXTENSION}.linear:find_halves")
FEW_ROWS = DeviceOperator(operation="few_rows", device="cuda", make=f"{_EXTENSION}.linear:find_few_rows")
JOINED_EXPERTS = DeviceOperator(operation="joined_experts", device="cuda", make=f"{_EXTENSION}.linear:tried_experts")
BETWEEN = DeviceOperator(operation="between", device="cuda", make=f"{_EXTENSION}.between:find_between")
ATTENTION_BY_LENGTH = DeviceOperator(
    operation="attention_by_length", device="cuda", make=f"{_EXTENSION}.attention:find_ours"
)
LATENTS = DeviceOperator(operation="latents", device="cuda", make=f"{_EXTENSION}.latents:find_latents")
EQUAL_BITS = DeviceOperator(operation="equal_bits", device="cuda", make=f"{_EXTENSION}.one_order:find_equal_bits")
WITHOUT_EQUAL_BITS = ABILITY
RECURRENCE = DeviceOperator(operation="recurrence", device="cuda", make=f"{_EXTENSION}.recurrence:find_recurrence")
DRAW = DeviceOperator(operation="draw", device="cuda", make=f"{_EXTENSION}.draw:find_draw")
SOFTMAX = DeviceOperator(operation="softmax", device="cuda", make=f"{_EXTENSION}.draw:find_softmax")
DRAW_IN_BLOCKS = DeviceOperator(
    operation="draw_in_blocks", device="cuda", make=f"{_EXTENSION}.draw:find_draw_in_blocks"
)
SUMS = DeviceOperator(operation="sums", device="cuda", make=f"{_EXTENSION}.sums:find_sums")
