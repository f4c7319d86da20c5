"""On the second of two stub devices: what computes there while the first one is the current device of the thread.

`python -m tests.stub_gpu.own_device` prints as JSON, for each part, the sizes of the captured graphs and the faults.
"""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from llama_ssp import load
from llama_ssp.run.calibration.operators import kernel_s, launch_s
from tests.stub_gpu import device

if TYPE_CHECKING:
    from llama_ssp.harness.model import SpeculativeLM

SECOND = torch.device("cuda", 1)
PROMPT = "import os"


def seen(compute: Callable[[], object]) -> dict[str, object]:
    """What a call leaves in the log, called while the first device is the current one."""
    torch.cuda.set_device(0)
    device.reset()
    compute()
    log = device.log()
    sizes = [len(device.graph(int(record.text))) for record in log if record.kind == "captured"]
    return {"captured": sizes, "faults": device.faults(log), "current": torch.cuda.current_device()}


def operators() -> None:
    """Time an operator of each device, in a graph and launched from Python."""
    for each in (torch.device("cuda", 0), SECOND):
        kernel_s(each)
        launch_s(each)


def harness() -> "SpeculativeLM":
    """The model of lm-evaluation-harness; modules stand in for the package where it is missing."""
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": object},
        "lm_eval.api.registry": {"register_model": lambda _name: lambda model: model},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "postprocess_generated_text": lambda text, **_: text,
            "normalize_gen_kwargs": lambda given, _most: {"do_sample": False, "until": [], **given},
        },
        "lm_eval.utils": dict.fromkeys(
            ("get_rolling_token_windows", "make_disjoint_window", "simple_parse_args_string")
        ),
    }
    for name, content in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    from llama_ssp.harness.model import SpeculativeLM

    return SpeculativeLM(target="tiny", draft="tiny-draft", device=str(SECOND), dtype="fp16")


def main() -> None:
    """Compute all parts."""
    torch.zeros(1, device="cuda:0")
    found: dict[str, Any] = {"operators": seen(operators)}
    found["load"] = seen(lambda: load("tiny", device=str(SECOND), dtype="fp16"))
    model = harness()
    asked = [SimpleNamespace(args=(PROMPT, {"max_gen_toks": 8})) for _ in range(3)]
    found["answers"] = seen(lambda: model.generate_until(asked, disable_tqdm=True))
    scored = [("", [5, 6], [7, 8, 9])]
    found["scores"] = seen(lambda: model._loglikelihood_tokens(scored, disable_tqdm=True))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
