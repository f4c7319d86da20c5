"""Published speeds of plain decoding and of first tokens, each of a described machine, as their pages state them.

A fitted row gives a constant of the planner, so it is no forecast; neither are the others of a source with such a
row, because they share its engine and its machine. Rows of other sources are forecasts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

A100, A100_40GB = "8xa100_80gb", "p4d_24xlarge"
PROMPT_MS = 132.4
"""The first token that gives the share of the data sheet's FLOPs."""


class Measure(Enum):
    """What a row measures: tokens/s of all rows while they decode, with their prompts, or ms to the first token."""

    decoding = "tokens/s"
    run = "tokens/s with prompts"
    first = "first token, ms"


class Source(NamedTuple):
    """A page that states speeds of a machine.

    Attributes:
        left_out: its rows that are no rows here, and why.
    """

    name: str
    page: str
    left_out: str = "none"


GPT_FAST = Source("gpt-fast", "README.md of pytorch-labs/gpt-fast; batch 1, 5 tokens in")
TRANSFORMERS = Source("transformers", "assisted generation, 70B with 7B and 13B on 8 A100 (13B alone: 31.9 ms, fitted)")
TENSORRT = Source(
    "TensorRT-LLM 0.6", "docs/source/performance.md of release 0.6.1 to 0.9; A100, fp16",
    "H100 and L40S: FP8, whose products no plan computes; GPT-J and Falcon: families without a catalogue entry",
)  # fmt: skip
PEARL = Source(
    "nano-PEARL", "docs/bench_summary.md and benchmark.html of smart-lty/nano-PEARL; 2 H200, bf16, 200 tokens out",
    "AIME, CNNDM, GSM8K: prompts of unknown length (HumanEval's are taken as 200 tokens); Qwen2.5-72B: no catalogue "
    "entry; L40S: number of GPUs not stated; PEARL: K is chosen while it runs, and not stated",
)  # fmt: skip
SGLANG = Source(
    "SGLang", "speculative_decoding.html of docs.sglang.io; one H100, bf16, MT-bench, taken as 100 + 200 tokens",
    "EAGLE-2 and EAGLE-3: trees of a shape and a depth that the page does not state",
)  # fmt: skip
VLLM = Source(
    "vLLM 0.6, Qwen", "speed_benchmark.rst of QwenLM/Qwen2.5; one A100-80GB, batch 1, 2048 tokens out",
    "1.5B, 3B, 14B, 32B, 72B: no catalogue entries; beyond 30720 tokens: other settings; AWQ: as GPTQ-Int4; "
    "transformers: operators launched from Python, as those of its own page",
)  # fmt: skip
LLM_BENCHMARK = Source(
    "llm_benchmark", "README.md of rkooo567/llm_benchmark; Llama 2 70B on 8 A100-40GB", "transformers: layers in a row"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published speed; `engine` is set where a source has several, `by_library` in transformers, layers in a row."""

    source: Source
    value: float
    model: str
    quantization: str = "none"
    machine: str = A100
    num_gpus: int = 1
    batch_size: int = 1
    prompt_tokens: int = 5
    max_new_tokens: int = 200
    measure: Measure = Measure.decoding
    engine: str = ""
    by_library: bool = False
    is_fitted: bool = False


_FORMATS = "none", "int8_weight_only", "int4_weight_only"


def _of_gpt_fast() -> Iterator[Row]:
    for num_gpus, value in (1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43):
        yield Row(source=GPT_FAST, model="llama2_7B", num_gpus=num_gpus, value=value, is_fitted=True)
    for num_gpus, value in (2, 21.32), (4, 38.01), (8, 62.50):
        yield Row(source=GPT_FAST, model="llama2_70B", num_gpus=num_gpus, value=value)
    of_formats = (155.58, 19.13, 80.44), (196.80, 25.25, 90.77)
    for quantization, (of_7b, of_70b, on_eight) in zip(_FORMATS[1:], of_formats, strict=True):
        yield Row(source=GPT_FAST, model="llama2_7B", quantization=quantization, value=of_7b, is_fitted=True)
        yield Row(source=GPT_FAST, model="llama2_70B", quantization=quantization, value=of_70b)
        yield Row(source=GPT_FAST, model="llama2_70B", quantization=quantization, value=on_eight, num_gpus=8)
    for quantization, value in zip(_FORMATS, (76.33, 101.86), strict=False):
        yield Row(source=GPT_FAST, model="llama2_7B", quantization=quantization, value=value, machine="mi250")


def _of_tensorrt() -> Iterator[Row]:
    for model, num_gpus, batch_size, prompt_tokens, new_tokens, of_gpu in (
        ("llama2_7B", 1, 384, 128, 128, 5586), ("llama2_7B", 1, 60, 128, 2048, 1928),
        ("llama2_7B", 1, 52, 2048, 128, 591), ("llama2_7B", 2, 64, 2048, 2048, 782),
        ("llama2_70B", 4, 1280, 128, 128, 670), ("llama2_70B", 4, 240, 128, 2048, 525),
        ("llama2_70B", 4, 120, 2048, 128, 79),
    ):  # fmt: skip
        yield Row(
            source=TENSORRT, model=model, num_gpus=num_gpus, batch_size=batch_size, prompt_tokens=prompt_tokens,
            max_new_tokens=new_tokens, value=num_gpus * of_gpu, measure=Measure.run,
        )  # fmt: skip
    for model, num_gpus, prompt_tokens, value in (
        ("llama2_7B", 1, 2048, 132.4), ("llama2_7B", 1, 128, 16.0), ("llama2_70B", 4, 128, 47.0),
        ("llama2_70B", 4, 2048, 377.0), ("llama2_70B", 8, 2048, 249.2),
    ):  # fmt: skip
        yield Row(
            source=TENSORRT, model=model, num_gpus=num_gpus, prompt_tokens=prompt_tokens, value=value,
            measure=Measure.first, is_fitted=value == PROMPT_MS,
        )  # fmt: skip


def _of_pearl() -> Iterator[Row]:
    of_models = {"llama3_70B": (44.29, 341.70, 655.49, 1206.26), "qwen3_32B": (78.64, 613.32, 1165.10, 2194.92)}
    for model, values in of_models.items():
        for batch_size, value in zip((1, 8, 16, 32), values, strict=True):
            yield Row(
                source=PEARL, model=model, machine="8xh200", num_gpus=2, batch_size=batch_size, prompt_tokens=200,
                value=value, measure=Measure.run,
            )  # fmt: skip


def _of_vllm() -> Iterator[Row]:
    of_models = {
        "qwen2.5_7B": (
            (84.28, 80.70, 77.69, 70.33), (122.01, 112.38, 105.25, 90.71), (154.05, 141.98, 129.35, 108.30)
        ),
        "qwen2.5_0.5B": (
            (311.55, 304.79, 290.28, 264.51), (257.07, 254.10, 243.69, 223.86), (260.93, 257.33, 247.01, 226.50)
        ),
    }  # fmt: skip
    for model, of_formats in of_models.items():
        for quantization, values in zip(_FORMATS, of_formats, strict=True):
            for prompt_tokens, value in zip((1, 6144, 14336, 30720), values, strict=True):
                yield Row(
                    source=VLLM, model=model, quantization=quantization, prompt_tokens=prompt_tokens,
                    max_new_tokens=2048, value=value, measure=Measure.run,
                )  # fmt: skip


def _of_llm_benchmark() -> Iterator[Row]:
    of_engines = {"TensorRT-LLM": (70.19, 38.97), "vLLM": (133.70, 76.12)}
    sizes = (32, 1, 2048), (24, 1024, 1024)
    for engine, times_s in of_engines.items():
        for (batch_size, prompt_tokens, new_tokens), seconds in zip(sizes, times_s, strict=True):
            yield Row(
                source=LLM_BENCHMARK, engine=engine, model="llama2_70B", machine=A100_40GB, num_gpus=8,
                batch_size=batch_size, prompt_tokens=prompt_tokens, max_new_tokens=new_tokens,
                value=batch_size * new_tokens / seconds, measure=Measure.run,
            )  # fmt: skip


ROWS = (
    *_of_gpt_fast(),
    Row(source=TRANSFORMERS, model="llama2_70B", num_gpus=8, value=1e3 / 113.3, by_library=True),
    *_of_tensorrt(),
    *_of_pearl(),
    Row(source=SGLANG, model="llama3_8B", machine="8xh100", value=158.34, prompt_tokens=100, measure=Measure.run),
    *_of_vllm(),
    *_of_llm_benchmark(),
)
