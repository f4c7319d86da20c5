"""Speeds that others published: plain decoding, and pairs of a target and a draft; docs/benchmarks/published.md."""

from dataclasses import dataclass

A100 = "8xa100_80gb"
TRANSFORMERS_13B_MS, TRANSFORMERS_70B_MS = 31.9, 113.3


@dataclass(frozen=True)
class PlainRow:
    """Published tokens per second of plain decoding; `by_library` in transformers, layers in a row."""

    model: str
    quantization: str
    num_gpus: int
    tokens_per_s: float
    is_fitted: bool = False
    by_library: bool = False

    @property
    def name(self) -> str:
        """How tables name it."""
        if self.by_library:
            return f"{self.model} fp16, transformers, layers in a row"
        return f"{self.model} {'bf16' if self.quantization == 'none' else 'int8 weight-only'}"


PLAIN = (
    *(
        PlainRow("llama2_7B", "none", gpus, rate, True)
        for gpus, rate in ((1, 104.9), (2, 168.8), (4, 254.0), (8, 328.4))
    ),
    PlainRow("llama2_70B", "none", 2, 21.3),
    PlainRow("llama2_70B", "none", 4, 38.0),
    PlainRow("llama2_70B", "none", 8, 62.5),
    PlainRow("llama2_7B", "int8_weight_only", 1, 155.6),
    PlainRow("llama2_70B", "int8_weight_only", 1, 19.1),
    PlainRow("llama2_70B", "int8_weight_only", 8, 80.4),
    PlainRow("llama2_70B", "none", 8, 1e3 / TRANSFORMERS_70B_MS, by_library=True),
)


@dataclass(frozen=True)
class Pair:
    """A published pair; `draft_ms` is the draft's published time per token, None where the planner must forecast it."""

    name: str
    target: str
    draft: str
    num_draft_tokens: int
    plain_ms: float
    speculative_ms: float
    draft_ms: float | None
    machine: str | None = None

    @property
    def row(self) -> str:
        """Its name in conf/acceptance.yaml, without the mark of a footnote."""
        return self.name.partition(" [^")[0]


PAIRS = (
    Pair("llama-ssp, 8xA100-40GB: 13B with 7B", "13B", "7B", 4, 125, 114, 70),
    Pair("llama-ssp, 8xA100-40GB: 30B with 7B", "30B", "7B", 4, 330, 180, 70),
    Pair("llama-ssp, 8xA100-40GB: 65B with 7B", "65B", "7B", 4, 610, 270, 70),
    Pair("llama-ssp, 4xA10G, 8-bit: 13B with 7B", "13B", "7B", 4, 270, 330, 210),
    Pair("llama-ssp, 4xA10G, 8-bit: 30B with 7B", "30B", "7B", 4, 405, 370, 210),
    Pair("transformers, A100, fp16: 13B with 7B [^k]", "llama2_13B", "llama2_7B", 4, 31.9, 27.8, None, A100),
    Pair("transformers, 8xA100, fp16: 70B with 7B [^k]", "llama2_70B", "llama2_7B", 4, 113.3, 40.1, None, "eager"),
    Pair("transformers, 8xA100, fp16: 70B with 13B [^k]", "llama2_70B", "llama2_13B", 4, 113.3, 46.3, 31.9),
    Pair(
        "gpt-fast, A100-80GB, int4: 70B with 7B [^k]", "llama2_70B", "llama2_7B", 4, 1e3 / 25.3, 1e3 / 48.4, 1e3 / 196.8
    ),
    Pair("Chinchilla 70B with 4B, nucleus [^c]", "chinchilla", "4B", 4, 14.1, 7.52, 1.8),
    Pair("Chinchilla 70B with 4B, greedy [^c]", "chinchilla", "4B", 4, 14.1, 7.00, 1.8),
    Pair("Chinchilla 70B with 4B, code [^c]", "chinchilla", "4B", 4, 14.1, 5.73, 1.8),
    Pair("SmolLM2 1.7B with 135M", "smollm2_1.7B", "smollm2_135M", 10, 35.8, 28.4, 10.7),
    Pair("GPT-NeoX 20B with GPT-Neo 1.3B, AMD", "gpt_neox_20B", "gpt_neo_1.3B", 4, 77.2, 57.0, None, "mi250"),
)
