"""One GPU, measured in minutes: `python -m benchmarks.gpu`. It needs torch, transformers and this repository.

Correctness first (`gpu_checks`), then plain and speculative decoding of synthetic models at true sizes, held to the
planner's forecast, to the forwards of a round alone, and to transformers; goals stand beside what was measured. The
physical limit, a copy of the bytes that a step reads, stands with both. Every stage is a row of `results/gpu.jsonl`.
`--quick` runs all of it with the shipped tiny shapes, on any device.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass

import torch
import transformers
from rich.console import Console

from benchmarks import gpu_checks
from benchmarks.gpu_engine import (
    Pace,
    attention_ms,
    forwards_alone_ms,
    load_pair,
    make_decoder,
    pace,
    prompt,
    release,
    requests,
)
from benchmarks.gpu_forecast import forecast, machine_at_hand
from benchmarks.timing import Goal, print_goals, store
from llama_ssp import Pair
from llama_ssp.calibration.operators import copy_bytes_per_s
from llama_ssp.config import catalogue
from llama_ssp.config.schema import Dtype
from llama_ssp.distributed.comms import Comm
from llama_ssp.models.build import load_modules
from llama_ssp.weights.synthetic import synthesize

NUM_DRAFT_TOKENS = 4
BATCH_SIZE = 16
MOST_TO_FORECAST, MOST_ROUND, LEAST_SPEEDUP = 1.05, 1.08, 0.95
LEAST_TO_ASSISTED, LEAST_BATCH = 2.5, 6.0

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A pair that is made once, and what is measured with it.

    Attributes:
        target, draft: entries of the catalogue.
        plain, peers, batch: whether plain steps, transformers, and a large batch are measured.
    """

    target: str
    draft: str | None = None
    quantization: str = "none"
    plain: bool = True
    peers: bool = False
    batch: bool = False

    @property
    def name(self) -> str:
        """What it is called in rows and goals."""
        quantized = "" if self.quantization == "none" else f" {self.quantization}"
        return f"{self.target}{quantized}" + (f" with {self.draft}" if self.draft else "")


STAGES = (
    Stage(target="7B", draft="tinyllama_1B", peers=True),
    Stage(target="30B", draft="7B", batch=True),
    Stage(target="30B", draft="tinyllama_1B", plain=False),
    Stage(target="30B", quantization="int8_weight_only"),
    Stage(target="13B", draft="7B"),
    Stage(target="65B", quantization="int8_weight_only"),
)
QUICK_STAGES = (
    Stage(target="tiny", draft="tiny-draft", peers=True, batch=True),
    Stage(target="tiny", quantization="int8_weight_only"),
)


class Bench:
    """What all stages share, and the rows and goals that they leave.

    Args:
        device: where to measure.
        quick: with few tokens.
        stored: whether rows go into the results.
        console: where to print.
    """

    def __init__(self, device: torch.device, *, quick: bool, stored: bool, console: Console) -> None:
        self.device = device
        self.dtype = Dtype.fp32 if quick else Dtype.fp16
        self.prompt_tokens, self.new_tokens = (64, 24) if quick else (512, 128)
        self.goals: list[Goal] = []
        self._stored = stored
        self._console = console
        self._plain: dict[str, tuple[float, float]] = {}  # measured and forecast, ms
        self._common: Row = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "quick": quick,
            "dtype": self.dtype.name,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
        }
        self.copy_bytes_per_s = copy_bytes_per_s(device, 2**24 if quick else 2**30)
        self._machine = machine_at_hand(device, copy_bytes_per_s=self.copy_bytes_per_s)
        self.keep("copy", {"bytes_per_s": self.copy_bytes_per_s, "forecast_for": self._machine.name})
        for heads in (8, 52):  # of a draft with few key-value heads, and of 30B
            times = attention_ms(device, num_heads=heads, dtype=getattr(torch, self.dtype.value), num_slots=640)
            self.keep(f"attention of {heads} heads, ms", dict(times))

    def keep(self, name: str, figures: Row) -> None:
        """Print a row, and store it at once: what comes later may fail."""
        row = {"name": name} | figures
        self._console.print(row)
        if self._stored:
            store("gpu", self._common | row)

    def check(self) -> bool:
        """Whether the device computes what it should."""
        found = gpu_checks.all_faults(self.device)
        self.keep("correctness", {"faults": found})
        return not any(found.values())

    def run(self, stage: Stage) -> None:
        """Measure a stage."""
        started = time.perf_counter()
        pair = load_pair(
            stage.target, stage.draft, dtype=self.dtype, device=self.device, quantization=stage.quantization
        )
        self.keep(f"{stage.name}: loading", {"s": time.perf_counter() - started})
        if stage.plain:
            self._steps(stage, pair)
        if stage.draft:
            fast = self._speculative(stage, pair)
            if stage.batch:
                self._batch(stage, pair, fast)
            if stage.peers:
                self._peers(stage, pair)

    def _pace(self, pair: Pair, *, speculative: bool, temperature: float = 0.8, batch_size: int = 1) -> Pace:
        decoder = make_decoder(
            pair, speculative=speculative, num_draft_tokens=NUM_DRAFT_TOKENS, temperature=temperature,
            batch_size=batch_size,
        )  # fmt: skip
        wanted = requests(pair, number=batch_size, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        return pace(decoder, wanted)

    def _steps(self, stage: Stage, pair: Pair) -> None:
        """Plain decoding, held to the planner's forecast."""
        measured = self._pace(pair, speculative=False)
        planned = forecast(pair, self._machine, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        forecast_ms = 1e3 * planned.plain_s
        bound_ms = planned.copy_share * forecast_ms
        self._plain[stage.name.partition(" with ")[0]] = measured.round_ms, forecast_ms
        self.keep(
            f"{stage.name}: plain",
            asdict(measured)
            | {"bound_ms": bound_ms, "share_of_copy": bound_ms / measured.round_ms}
            | {"forecast_ms": forecast_ms, "forecast_share_of_copy": planned.copy_share},
        )
        self._goal(
            f"{stage.name.partition(' with ')[0]}, plain: time / forecast ({planned.copy_share:.0%} of a copy's speed)",
            measured.round_ms / forecast_ms, MOST_TO_FORECAST,
        )  # fmt: skip
        if stage.quantization != "none" and stage.target in self._plain:
            full_ms, full_forecast_ms = self._plain[stage.target]
            self._goal(
                f"{stage.target}, plain: {stage.quantization} / {self.dtype.name}",
                measured.round_ms / full_ms, MOST_TO_FORECAST * forecast_ms / full_forecast_ms,
            )  # fmt: skip

    def _speculative(self, stage: Stage, pair: Pair) -> Pace:
        measured = self._pace(pair, speculative=True)
        decoder = make_decoder(pair, speculative=True, num_draft_tokens=NUM_DRAFT_TOKENS)
        verify_ms, draft_ms = forwards_alone_ms(decoder, context=self.prompt_tokens + self.new_tokens // 2)
        to_forwards = measured.round_ms / (verify_ms + draft_ms)
        figures = asdict(measured) | {"verify_ms": verify_ms, "draft_ms": draft_ms, "round_to_forwards": to_forwards}
        self._goal(f"{stage.name}: round / forwards alone", to_forwards, MOST_ROUND)
        if stage.target in self._plain:
            plain_ms, _ = self._plain[stage.target]
            formula = plain_ms * measured.tokens_per_round / (verify_ms + draft_ms)
            figures |= {"speedup": plain_ms / measured.ms_per_token, "speedup_by_formula": formula}
            self._goal(
                f"{stage.name}: speed-up by the formula / measured",
                formula * measured.ms_per_token / plain_ms, 1 / LEAST_SPEEDUP,
            )  # fmt: skip
        self.keep(f"{stage.name}: speculative", figures)
        return measured

    def _batch(self, stage: Stage, pair: Pair, single: Pace) -> None:
        many = self._pace(pair, speculative=True, batch_size=BATCH_SIZE)
        self.keep(f"{stage.name}: speculative, batch {BATCH_SIZE}", asdict(many))
        self._goal(
            f"{stage.name}: ms/token, batch {BATCH_SIZE} / batch 1", many.ms_per_token / single.ms_per_token,
            1 / LEAST_BATCH,
        )  # fmt: skip

    def _peers(self, stage: Stage, pair: Pair) -> None:
        """The library's own generation on the same weights."""
        shapes = [shape for name in (stage.target, stage.draft) if name and (shape := catalogue.load(name).shape)]
        dtype = getattr(torch, self.dtype.value)
        target, draft = (
            load_modules(origin, dtype=dtype, device=self.device, comm=Comm.single()).eval()
            for origin in synthesize(shapes, agreement=pair.config.synthetic.agreement)
        )
        for model in (target, draft):
            generation = model.generation_config
            generation.eos_token_id, generation.pad_token_id = None, 0
            generation.num_assistant_tokens = NUM_DRAFT_TOKENS
            generation.num_assistant_tokens_schedule = "constant"
            generation.assistant_confidence_threshold = 0.0
        ids_1T = torch.tensor([prompt(pair, self.prompt_tokens)], device=self.device)
        for temperature in (0.0, 0.8):
            sampling: Row = {"do_sample": False}
            if temperature:
                sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}

            def generate(num_tokens: int, assistant: object, sampling: Row = sampling) -> float:
                started = time.perf_counter()
                out = target.generate(
                    ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=num_tokens,
                    assistant_model=assistant, **sampling,
                )  # fmt: skip
                out.tolist()
                return time.perf_counter() - started

            for speculative, assistant in ((False, None), (True, draft)):
                generate(self.new_tokens, assistant)
                prefill_s = generate(1, None)
                peer_ms = 1e3 * (generate(self.new_tokens, assistant) - prefill_s) / (self.new_tokens - 1)
                ours = self._pace(pair, speculative=speculative, temperature=temperature)
                mode = "assisted" if speculative else "generate"
                self.keep(
                    f"{stage.name}: transformers, {mode}, temperature {temperature:g}",
                    {"ms_per_token": peer_ms, "ours_ms_per_token": ours.ms_per_token},
                )
                if speculative:
                    self._goal(
                        f"{stage.name}: ours / transformers, assisted, temperature {temperature:g}",
                        ours.ms_per_token / peer_ms, 1 / LEAST_TO_ASSISTED,
                    )  # fmt: skip

    def _goal(self, name: str, measured: float, at_most: float) -> None:
        self.goals.append(Goal(name=name, measured=measured, at_most=at_most))


def main() -> None:
    """Check, measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shipped tiny shapes and few tokens, on any device")
    parser.add_argument("--minutes", type=float, default=8.0, help="no stage begins later than this (default 8)")
    parser.add_argument("--store", action=argparse.BooleanOptionalAction, help="default: unless --quick")
    arguments = parser.parse_args()
    ends_at = time.perf_counter() + 60 * arguments.minutes
    console = Console()
    transformers.utils.logging.set_verbosity_error()
    is_cuda = torch.cuda.is_available()
    if not (is_cuda or arguments.quick):
        parser.error("no GPU was found: --quick runs the same on this CPU, with tiny models")
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    stored = arguments.store if arguments.store is not None else not arguments.quick
    bench = Bench(device, quick=arguments.quick, stored=stored, console=console)
    failed = not bench.check()
    stages = QUICK_STAGES if arguments.quick else STAGES
    for stage in stages:
        if time.perf_counter() > ends_at:
            bench.keep(f"{stage.name}: left out", {"reason": f"{arguments.minutes:g} minutes are over"})
            continue
        try:
            bench.run(stage)
        except Exception as error:  # noqa: BLE001 - compilers raise what they like; later stages still count
            failed = True
            bench.keep(f"{stage.name}: failed", {"error": f"{type(error).__name__}: {error}"})
        release()
    print_goals(console, bench.goals)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
