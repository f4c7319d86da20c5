"""Compiles Triton kernels for GPUs that are not here, and reads what ptxas made of them.

pip's Triton brings its own ptxas and disassembler, so that this works with torch's CPU build. It says nothing about
speed or values: `TRITON_INTERPRET=1` computes values.
"""

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90)
"""A100 and H100."""
CHAINED = 90
"""The first capability with programmatic dependent launch."""
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BACKWARD = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What ptxas made of a kernel.

    Attributes:
        shared_bytes: of a block.
        ptx: the instructions before ptxas.
        cubin: what ptxas wrote.
    """

    shared_bytes: int
    ptx: str
    cubin: bytes

    @property
    def steps(self) -> str:
        """Its accesses of global memory, l or s or a, where it releases the next kernel, R, and where it waits, W."""
        found = re.findall(r"\bgriddepcontrol\.(l|w)|\b(ld|st|cp\.async|atom)\b\S*global", self.ptx)
        return "".join({"l": "R", "w": "W"}.get(control, access[:1].replace("c", "l")) for control, access in found)

    @property
    def is_chained(self) -> bool:
        """Whether it releases the next kernel and waits for those before, once each, before it touches memory."""
        return re.fullmatch("RW[^RW]+", self.steps) is not None

    @cached_property
    def sass(self) -> str:
        """The instructions, with their addresses; the disassembler takes most of a second."""
        return _disassembled(self.cubin, "-sass")

    @cached_property
    def body(self) -> tuple[str, ...]:
        """The instructions of the longest loop."""
        placed = [(int(address, 16), text) for address, text in _INSTRUCTION.findall(self.sass)]
        jumps = [(int(found[1], 16), place) for place, text in placed if (found := _BACKWARD.search(text))]
        loops = [tuple(text for place, text in placed if first <= place <= last) for first, last in jumps]
        return max(loops, key=len)

    def count(self, pattern: str) -> int:
        """Count the instructions of the longest loop that a regular expression matches."""
        return sum(bool(re.search(pattern, text)) for text in self.body)


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    capability: int,
    num_warps: int,
    num_stages: int = 1,
    uneven: Collection[str] = (),
) -> Compiled:
    """Compile a kernel for a GPU; AssertionError if registers do not fit and are spilled to a stack.

    Args:
        kernel: a function under `triton.jit`.
        types: Triton's types of its arguments, such as "*fp16"; "i32" where there is none.
        constants: values of its `tl.constexpr` arguments, and of arguments that are None or 1.
        capability: 10 times the compute capability; see CAPABILITIES.
        num_warps: of a block.
        num_stages: of the loops' pipelines.
        uneven: arguments that are no multiples of 16; Triton finds this out for each call.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    if "PDL" in kernel.arg_names:
        constants = {"PDL": capability >= CHAINED, **constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind[0] in "*i" and name not in uneven
    }
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=even)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        built = triton_compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "num_stages": num_stages}
        )
    usage = _disassembled(built.asm["cubin"], "-res-usage")
    assert re.findall(r" STACK:(\d+)", usage) == ["0"], usage
    return Compiled(shared_bytes=built.metadata.shared, ptx=built.asm["ptx"], cubin=built.asm["cubin"])


def _disassembled(cubin: bytes, option: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout
