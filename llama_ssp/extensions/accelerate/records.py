"""The records of layer-wise placement: the backend, and its names in other programs.

Each device has consecutive layers:

    device 0: embeddings, layers 0-9    device 1: layers 10-19    last device: layers 20-27, norm, head
"""

from collections.abc import Iterator

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import Inventory, split_blocks
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.aliases import Counterpart
from llama_ssp.settings.backends import Backend


def split_layers(num_layers: int, *, num_devices: int) -> tuple[range, ...]:
    """Split the layers evenly; if there are more devices than layers, the last devices have none."""
    used = min(num_devices, num_layers)
    return split_blocks(num_layers, used) + (range(num_layers, num_layers),) * (num_devices - used)


def _shares(model: PlannedModel, *, num_ranks: int) -> tuple[Inventory, ...]:
    uncut, layers = inventory(model.shape), split_layers(model.shape.num_hidden_layers, num_devices=num_ranks)
    return tuple(
        uncut.of_layers(held, first=device == 0, last=device == num_ranks - 1) for device, held in enumerate(layers)
    )


def _notes(spec: PlanSpec) -> Iterator[str]:
    num_devices = len(spec.target_devices)
    where = "on one device" if num_devices == 1 else f"over {num_devices} GPUs of rank {spec.target_ranks[0]}"
    yield f"the target is placed layer-wise {where}"


ACCELERATE = Backend(
    name="accelerate",
    purpose="accelerate is layer-wise on one rank, over the GPUs that no other rank has.",
    load="llama_ssp.extensions.accelerate.loading:load",
    check="llama_ssp.extensions.accelerate.loading:check",
    shares=_shares,
    is_layer_wise=True,
    notes=_notes,
)
COUNTERPART = Counterpart(
    "device_map", "device", "placement=accelerate puts the layers one after another over the GPUs"
)
