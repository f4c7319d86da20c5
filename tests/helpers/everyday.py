"""What people type at `llama-ssp run`, and the first line and the exit code that answer it."""

import shlex
from typing import NamedTuple


class Typed(NamedTuple):
    """A command line, as in a shell.

    Attributes:
        text: settings and options.
        first: pattern at the begin of the first line: of standard error after a failure, else of standard output.
        code: the exit code, which torchrun turns into 1.
        starts: whether ranks are started, which the program announces first.
    """

    text: str
    first: str
    code: int = 2
    starts: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    def __str__(self) -> str:
        return self.text


def _done(text: str, first: str) -> Typed:
    return Typed(text, first, code=0, starts=True)


def _shown(text: str, first: str, code: int = 0) -> Typed:
    return Typed(text, first, code=code)


TYPOS = [
    Typed("model=nosuch", r"unknown model 'nosuch': there are 13B, "),
    Typed("modle=7B", r"unknown setting 'modle': did you mean model\?"),
    Typed("model:7B", r"cannot read 'model:7B': settings are written name=value"),
    Typed("task=genrate", r"unknown task 'genrate': .*; did you mean generate\?"),
    Typed("sampling=gredy", r"unknown sampling 'gredy': .*; did you mean greedy\?"),
    Typed("hardware=nosuch dry_run=true", r"unknown hardware 'nosuch': there are 1xa100_80gb, "),
    Typed("--model 7B", r"unrecognized arguments: --model: settings are written name=value"),
    Typed("--draft=7B", r"unrecognized arguments: --draft=7B: settings are written name=value"),
    Typed("--help samplign", r"unknown topic 'samplign': there are all, .*; did you mean sampling\?"),
    Typed("--config-dir nosuch", r"--config-dir nosuch is no folder: name one that has files such as model/NAME\.yaml"),
]
FOREIGN = [
    Typed("temperature=0.5", r"unknown setting 'temperature': did you mean sampling\.temperature\?"),
    Typed("repetition_penalty=1.1", r"unknown setting .*: did you mean sampling\.repetition_penalty\?"),
    Typed("stop=END", r"""unknown setting 'stop': stop_strings='\["END"\]' ends a completion at a text"""),
    Typed("rule=block", r"unknown setting 'rule': verification=NAME is the rule"),
    Typed("top_logprobs=5", r"unknown setting 'top_logprobs': logprobs=5 gives log-probabilities"),
    Typed("min_tokens=5", r"unknown setting 'min_tokens': sampling\.min_new_tokens=8"),
    Typed("guided_json=x", r"unknown setting 'guided_json': text in a given format is not here"),
    Typed("max_model_len=9", r"unknown setting 'max_model_len': a run allocates what"),
    Typed("gpu_memory_utilization=0.9", r"unknown setting 'gpu_memory_utilization': batch_size=8"),
    Typed("lora=x", r"unknown setting 'lora': model\.adapter=DIR merges"),
    Typed("wandb=x", r"unknown setting 'wandb': trackers are not here"),
    Typed("max_tokens=64", r"unknown setting 'max_tokens': max_new_tokens=64 limits"),
    Typed("K=6", r"unknown setting 'K': speculation\.num_draft_tokens=4 is K"),
    Typed("tp=2", r"unknown setting 'tp': .* llama-ssp run ranks=N starts N ranks"),
    Typed("nproc_per_node=4", r"unknown setting 'nproc_per_node': llama-ssp run ranks=N starts N ranks"),
    Typed("nodes=2", r"unknown setting 'nodes': several nodes are started by sbatch"),
    Typed("target=7B", r"unknown setting 'target': model=NAME is the target"),
    Typed("assistant_model=7B", r"unknown setting 'assistant_model': draft=NAME is the draft"),
    Typed("load_in_8bit=true", r"unknown setting 'load_in_8bit': model\.quantization=int8"),
    Typed("compare 30B 7B", r"'compare 30B 7B' names no settings: write task=compare model=30B draft=7B"),
    Typed("eval 13B", r"'eval 13B' names no settings: write task=evaluate suite=arithmetic model=13B"),
    Typed("latency 30B", r"'latency 30B' names no settings: write task=latency model=30B"),
    Typed("30B", r"'30B' names no settings: write model=30B"),
]
VALUES = [
    Typed("seed=abc", r"seed=abc: Value 'abc' of type 'str' could not be converted to Integer"),
    Typed("device=gpu", r"device=gpu: Invalid value 'gpu', expected one of \[auto, cpu, cuda\]"),
    Typed("model.dtype=fp8", r"model\.dtype=fp8: Invalid value 'fp8'"),
    Typed("sampling.temperature=-1", r"sampling\.temperature=-1\.0 must be 0 \(greedy\) or"),
    Typed("sampling.temperature=hot", r"sampling\.temperature=hot: Value 'hot'"),
    Typed("speculation.num_draft_tokens=0", r"speculation\.num_draft_tokens=0 must be at least 1"),
    Typed("max_new_tokens=0", r"max_new_tokens=0 must be at least 1, for example 64"),
    Typed("max_new_tokens=100000 task=generate prompt=x", r"max_new_tokens=100000 leaves no room for a prompt"),
    Typed("batch_size=0", r"batch_size=0 must be at least 1 sequence"),
    Typed("stop_strings=[2.]", r"stop_strings=\[2\.\]: quote items that are not plain words"),
    Typed("model=7B,13B", r"model=7B,13B gives several values: add -m"),
    Typed("draft=none", r"task=compare needs a draft, and model=tiny runs without one here"),
    Typed("model=7B draft=smollm2_135M", r"the draft must have the target's vocabulary: model=7B has 32000 tokens"),
    Typed("task=generate chat=true prompt=x", r"chat=true needs a model with a chat template"),
    Typed("model=local", r"2 problems in the configuration:"),
]
FILES = [
    Typed("prompts=nosuch.txt", r"prompts=nosuch\.txt must be a file"),
    Typed("prompt=x prompts=README.md", r"prompt= and prompts= exclude each other"),
    Typed("model=local model.path=nosuch draft=none task=generate prompt=x", r"nosuch does not exist"),
    Typed("model=local model.path=README.md draft=none task=generate prompt=x", r"README\.md does not exist"),
    Typed("task=generate prompt=x run_dir=/dev/null/x", r"cannot use /dev/null/x: not a directory", starts=True),
]
TELLING = [
    _shown("--help", r"llama-ssp: speculative sampling on models that are too large for one GPU\."),
    _shown("--help sampling", r"SAMPLING: sampling=default \| greedy \| nucleus"),
    _shown("--help top_p", r"SAMPLING: "),
    _shown("--help all", r"llama-ssp: speculative sampling"),
    _shown("--cfg job", r"task:$"),
    _shown("dry_run=true", r"\S"),
    _shown("model=30B draft=7B hardware=8xa100_80gb dry_run=true", r"\S"),
    _shown("-m speculation.num_draft_tokens=2,4 dry_run=true", r"\S"),
    _shown("model=65B draft=7B hardware=laptop_cpu dry_run=true", r"rank 0 needs [\d.]+ GiB \(target", code=3),
]
RUNS = [
    _done("task=generate max_new_tokens=4 'prompt=import os' run_dir={run}", r"\S"),
    _done("task=generate max_new_tokens=4 draft=none prompt=x run_dir={run}", r"\S"),
    _done("task=generate max_new_tokens=4 format=jsonl 'prompt=$5, \"or\" ${{more}}' run_dir={run}", r'\{"index": 0'),
    _done("task=generate max_new_tokens=4 format=jsonl prompts=- run_dir={run}", r'\{"index": 0.*import os'),
    _done("max_new_tokens=4 'prompt=def f' run_dir={run}", r"\S"),
    _done("-m task=generate format=jsonl max_new_tokens=4 prompt=x seed=0,1 run_dir={run}", r'\{"index": 0'),
]  # fmt: skip
EVERYDAY = [*TYPOS, *FOREIGN, *VALUES, *FILES, *TELLING, *RUNS]
