"""Settles which kernels a run on GPUs uses, since products that are rounded in another order may give another text.

Each rank has timed the kernels of its models. All take the choice of the first rank that has made it, and a run folder
keeps it for when the run is resumed. A choice is for one kind of GPU and the versions that it was made with; without a
choice for this rank's, its own stays.
"""

import json
import logging
from collections.abc import Sequence

from llama_ssp.distributed.agree import raise_on_all_ranks
from llama_ssp.distributed.comms import Comm
from llama_ssp.errors import ConfigError
from llama_ssp.models.runner import Runner
from llama_ssp.reports.reading import read_json
from llama_ssp.reports.records import KERNELS_FILE, RunFolder

_log = logging.getLogger(__name__)


def settle_kernels(runners: Sequence[Runner], *, comm: Comm, folder: RunFolder | None) -> None:
    """Let all ranks use the kernels of the run folder, or else of the first rank; all must call this together.

    `folder` is the run folder on rank 0. Raises ConfigError on every rank if its choices are damaged, and SspError if
    they cannot be written.
    """
    from llama_ssp.models.llama.decoder import LeanRunner  # noqa: PLC0415 - transformers' models take seconds to import

    kept: dict[str, list[int]] = {}
    with raise_on_all_ranks(comm):
        if folder:
            kept = _read(folder)
    lean = [runner for runner in runners if isinstance(runner, LeanRunner)]
    own = {key: tile for runner in lean for key, tile in runner.kernel_choices().items()}
    kept, *others = (json.loads(text) for text in _told(comm, kept, own))
    chosen = dict(kept)
    for each in others:
        chosen = each | chosen
    if folder and kept and len(chosen) > len(kept):
        _log.warning(
            "this run began on another GPU, or with another torch or Triton: its kernels are chosen again, and texts "
            "may be rounded in another way"
        )
    with raise_on_all_ranks(comm):
        try:
            for runner in lean:
                runner.use_kernel_choices(chosen)
        except ValueError as error:
            raise _damaged(error) from None
        if folder and chosen != kept:
            folder.write_measured(KERNELS_FILE, json.dumps(chosen, indent=1) + "\n")


def _told(comm: Comm, kept: dict[str, list[int]], own: dict[str, list[int]]) -> list[str]:
    """What rank 0's folder has kept, then what every rank has chosen."""
    return [comm.broadcast_text(json.dumps(kept), src=0), *comm.gather_text(json.dumps(own))]


def _read(folder: RunFolder) -> dict[str, list[int]]:
    text = folder.read_measured(KERNELS_FILE)
    if text is None:
        return {}
    try:
        content = read_json(text)
    except ValueError as error:
        raise _damaged(error) from None
    if not isinstance(content, dict) or not all(map(_is_tile, content.values())):
        raise _damaged("it should map products to tiles")
    return content


def _is_tile(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _damaged(reason: object) -> ConfigError:
    return ConfigError(f"{KERNELS_FILE} of run_dir is damaged ({reason}): delete it to choose again")
