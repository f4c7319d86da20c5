"""Operators of a device, from an extension or a plugin, that replace torch's version, which is the reference.

Code that builds a model or a decoder asks once for an operation on its device, with all facts that matter, and keeps
the result, which is None if torch's version is to run. The function `make` of a record decides this, by the number
format, the sizes, the instructions of this machine, or because the operator does not agree with its reference.

    operation             asked by                                what is made
    linear                `kernels.linear.make_linear`            the kernel of a weight
    packed_linear         `kernels.linear.compiled_for`           the kernel of packed weights of a format
    packed_block          `models.loading`, `run.calibration`     the number whose multiples sizes of such layers are
    attention             `models.llama.decoder`                  attention, and whole layers, an `OperatorAttention`
    few_rows              `models.quantization.weight_only`       products with packed weights, a `FewRows`
    joined_experts        the same                                experts whose weights are joined
    between               `models.llama.decoder`                  operators between products, `OwnKernels`
    attention_by_length   the same                                attention of rounds by the lengths of rows
    latents               `kernels.latents`                       attention to latents, a `LatentAttention`
    equal_bits            the same                                operators for `reproducible=true`, an `EqualBits`
    recurrence            the runner of a `ModelLibrary`          a layer's tokens taken in whole
    draw, softmax, draw_in_blocks   `speculate.sampling`          the functions of `processors` and `shards`
    sums                  `ranks.comms`                           sums over ranks, an `OwnSums`
    messages              the same                                memory that ranks share, a `Board`
    collectives           the same                                calls of collectives that a trace holds
    executor              `speculate.engine.executors`            the runner of a round's stages, an `Executor`
    threads               `run.decoders`                          the choice of a number of threads, a `Threads`
"""

from dataclasses import dataclass
from typing import Any

from llama_ssp.registry import Registry, imported


@dataclass(frozen=True, kw_only=True)
class DeviceOperator:
    """A record of code that computes an operation on a kind of device."""

    operation: str  # see above.
    device: str  # torch's name of the kind: cpu or cuda.
    make: str  # `module:function`, which takes the case and returns the operator, or None.

    @property
    def name(self) -> str:
        """Operation and device."""
        return f"{self.operation} on {self.device}"


OPERATORS: Registry[DeviceOperator] = Registry(setting="operator", kind=DeviceOperator)
register = OPERATORS.register


def made(operation: str, device: str, /, *case: Any, **how: Any) -> Any:  # noqa: ANN401 - as the operation has them
    """Make the operator of an operation on a kind of device for a case; None if torch's version is to run."""
    record = OPERATORS.find(f"{operation} on {device}")
    return record and imported(record.make, setting=record.name)(*case, **how)
