"""Measures all libraries in all number formats, in turns: milliseconds per token with prefill, and tokens per round.

Ours runs in this process, the others in processes of their own (`process`), with equal prompts and settings.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.by_format.checkpoints import FOLDER, Stored, stored
from benchmarks.by_format.lines import ADAPTERS, LINES, OURS, PLAIN, SPECULATIVE, Figures, Line
from benchmarks.by_format.process import LibraryProcess
from llama_ssp import Pair, load
from llama_ssp.calibration.interleave import interleave
from llama_ssp.config.schema import Dtype, SamplingConfig, SpeculationConfig
from llama_ssp.session.loading import build_decoder
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import Ours


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every library is asked for.

    Attributes:
        models: names of the target and of the draft, or of a target alone, which decodes plainly.
        num_draft_tokens: in a speculative round.
    """

    models: Sequence[str]
    prompts: Sequence[str]
    num_new_tokens: int
    num_draft_tokens: int
    temperature: float

    @property
    def modes(self) -> tuple[str, ...]:
        """What is measured."""
        return (PLAIN, SPECULATIVE)[: len(self.models)]


class Candidate(Protocol):
    """A line in one mode."""

    def ms_per_token(self, repetition: int) -> float:
        """Complete all prompts; negative repetitions do not count."""

    @property
    def tokens_per_round(self) -> float | None:
        """Of all counted repetitions, without the first token of a text; rounds that the end cuts count too."""


class Here(Ours):
    """One of our decoders."""

    @property
    def tokens_per_round(self) -> float | None:
        """See `Candidate`."""
        rows = [row for rows in self.done for row in rows]
        return sum(len(row.token_ids) - 1 for row in rows) / sum(row.num_target_forwards - 1 for row in rows)


@dataclass(kw_only=True)
class There:
    """A library in its process.

    Attributes:
        idle_s, idle_cpu_s: time that this process waits for that one, and processor time that it takes meanwhile.
    """

    process: LibraryProcess
    prompts: Sequence[Sequence[int]]
    settings: Mapping[str, object]
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0

    def ms_per_token(self, repetition: int) -> float:
        """See `Candidate`."""
        began, began_cpu = time.perf_counter(), time.process_time()
        seconds, completed = self.process.complete(self.prompts, **self.settings, seed=max(repetition, 0) + 1)
        self.idle_s += time.perf_counter() - began
        self.idle_cpu_s += time.process_time() - began_cpu
        if repetition >= 0:
            self.num_tokens += sum(each.num_tokens - 1 for each in completed)
            self.num_rounds += sum(each.num_rounds for each in completed)
        return 1e3 * seconds / sum(each.num_tokens for each in completed)

    @property
    def tokens_per_round(self) -> float | None:
        """See `Candidate`."""
        return self.num_tokens / self.num_rounds


@dataclass(kw_only=True)
class Bench:
    """Candidates by line and mode, of as many libraries as there are."""

    setting: Setting
    stack: ExitStack
    models: Sequence[Stored] = ()
    candidates: dict[tuple[Line, str], Candidate] = field(default_factory=dict)
    processes: dict[str, LibraryProcess] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models = [stored(name) for name in self.setting.models]

    def add_ours(self, line: Line) -> None:
        """Load a form of ours."""
        pair = self._pair(line)
        config = replace(
            pair.config,
            sampling=SamplingConfig(temperature=self.setting.temperature),
            speculation=SpeculationConfig(num_draft_tokens=self.setting.num_draft_tokens),
            ignore_eos=True,
        )
        for mode in self.setting.modes:
            self.candidates[line, mode] = Here(
                decoder=build_decoder(pair.models, config, speculative=mode == SPECULATIVE),
                prompts=self.prompts(pair), num_new_tokens=self.setting.num_new_tokens,
            )  # fmt: skip

    def _pair(self, line: Line) -> Pair:
        folders = [model.all_bits if line.from_fp32 else model.halves for model in self.models]
        return load(*folders, dtype=Dtype.fp32, quantization=line.form)

    def prompts(self, pair: Pair) -> list[tuple[int, ...]]:
        """The prompts as ids."""
        return [encode(prompt, pair.models.tokenizer, chat=False) for prompt in self.setting.prompts]

    def add(self, line: Line, python: Path, prompts: Sequence[Sequence[int]]) -> None:
        """Load a form of another library, in the process that it has."""
        num_threads = torch.get_num_threads()
        if line.library not in self.processes:
            process = LibraryProcess(python, ADAPTERS[line.library], num_threads=num_threads)
            self.processes[line.library] = self.stack.enter_context(process)
        process = self.processes[line.library]
        folders = [str(model.fp32.resolve()) for model in self.models]
        self.versions[line.library] = process.load(
            form=line.form, folders=folders, converted=str(FOLDER.resolve()), num_threads=num_threads
        )
        for mode in self.setting.modes:
            num_draft_tokens = self.setting.num_draft_tokens if mode == SPECULATIVE else None
            settings = {
                "form": line.form, "num_new_tokens": self.setting.num_new_tokens,
                "num_draft_tokens": num_draft_tokens, "temperature": self.setting.temperature,
            }  # fmt: skip
            self.candidates[line, mode] = There(
                process=process, prompts=prompts, settings=settings
            )  # fmt: skip

    @property
    def idle_cpu_share(self) -> float:
        """The largest share of a core that a process took while another had its turn."""
        waiting = [each for each in self.candidates.values() if isinstance(each, There)] + [*self.processes.values()]
        return max((each.idle_cpu_s / each.idle_s for each in waiting), default=0.0)


def measure(setting: Setting, pythons: Mapping[str, Path], *, num_repetitions: int) -> dict[str, object]:
    """Measure ours and the libraries whose interpreters are given; returns a row to store."""
    lines = [line for line in LINES if line.library == OURS or line.library in pythons]
    with ExitStack() as stack:
        bench = Bench(setting=setting, stack=stack)
        for line in lines:
            if line.library == OURS:
                bench.add_ours(line)
        prompts = next(each.prompts for each in bench.candidates.values() if isinstance(each, Here))
        for line in lines:
            if line.library != OURS:
                bench.add(line, pythons[line.library], prompts)
        names = {f"{line.column}, {line.label}, {mode}": each for (line, mode), each in bench.candidates.items()}
        ms = interleave({name: each.ms_per_token for name, each in names.items()}, num_repetitions=num_repetitions)
        figures = [
            Figures(
                column=line.column, library=line.library, label=line.label,
                ms={mode: ms[f"{line.column}, {line.label}, {mode}"] for mode in setting.modes},
                tokens_per_round=(
                    bench.candidates[line, SPECULATIVE].tokens_per_round if SPECULATIVE in setting.modes else None
                ),
            )
            for line in lines
        ]  # fmt: skip
        return {
            "models": list(setting.models), "num_prompts": len(prompts), "num_new_tokens": setting.num_new_tokens,
            "num_draft_tokens": setting.num_draft_tokens, "temperature": setting.temperature,
            "num_threads": torch.get_num_threads(), "num_repetitions": num_repetitions, "libraries": bench.versions,
            "idle_cpu_share": bench.idle_cpu_share, "lines": [asdict(each) for each in figures],
        }  # fmt: skip
