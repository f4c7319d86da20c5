"""Finds how much noise on a model's output head makes it agree with itself to a wanted degree.

What it does: lets each model of the pair write text after the default prompts of `task=compare` and `task=latency`, and
bisects the noise of `llama_ssp.weights.synthetic` for each level of agreement: the chance that a drafted token is
accepted, which is the sum of the smaller of both probabilities, on average over the text. Both tasks count alike.
What it does not do: draft and verify, or look at another temperature.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import yaml
from torch import Tensor

from llama_ssp import load
from llama_ssp.models.loading import load_modules
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings import catalogue
from llama_ssp.settings.model_files import AGREEMENT_FILE
from llama_ssp.settings.schema import Dtype
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.synthetic import SMALL_MODELS, Synthetic

TEMPERATURE = 0.8
LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MOST_NOISE, STEPS = 1.5, 9
TASKS = ("compare", "latency")


@dataclass(frozen=True)
class Text:
    """A prompt with what the model wrote after it, and the model's distributions of the latter."""

    ids: list[int]
    num_new: int
    probabilities_TV: Tensor


def prompts_of(task: str) -> list[str]:
    """Returns the default prompts of a task."""
    settings = yaml.safe_load((catalogue.conf_dir() / "task" / f"{task}.yaml").read_text(encoding="utf-8"))
    prompts: list[str] = settings["default_prompts"]
    return prompts


class Measure:
    """Measures how far a small model agrees with its noisy self.

    Args:
        folder: of the model.
        num_texts: how many it writes for each task.
        length: tokens of each.
    """

    def __init__(self, folder: Path, *, num_texts: int, length: int) -> None:
        self.small = inspect(folder)
        self.texts = {}
        for task in TASKS:
            prompts = prompts_of(task)
            self.texts[task] = self._write((prompts * num_texts)[:num_texts], length)

    def agreement(self, noise: float) -> float:
        """Returns the mean over the tasks."""
        model = self._model(noise)
        means = []
        for texts in self.texts.values():
            shared = [
                torch.minimum(text.probabilities_TV, self._probabilities(model, text.ids, text.num_new)).sum(-1)
                for text in texts
            ]
            means.append(float(torch.cat(shared).mean()))
        return fmean(means)

    def noise_for(self, level: float, *, least: float) -> float:
        """Bisects the noise at which the agreement falls to a level, above the least noise."""
        low, high = least, MOST_NOISE
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.agreement(middle) > level else (low, middle)
        return (low + high) / 2

    def _write(self, prompts: list[str], length: int) -> list[Text]:
        pair = load(self.small.folder, dtype=Dtype.fp32)
        completions = pair.generate(prompts, max_new_tokens=length, temperature=TEMPERATURE, batch_size=len(prompts))
        model, texts = self._model(0.0), []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = [*pair.models.tokenizer(prompt).input_ids, *completion.token_ids]
            num_new = len(completion.token_ids)
            texts.append(Text(ids, num_new, self._probabilities(model, ids, num_new)))
        return texts

    def _model(self, noise: float) -> torch.nn.Module:
        """The small model in its own shape, with noise."""
        noisy = Synthetic(small=self.small, shape=self.small.shape, noise=noise)
        return load_modules(noisy, dtype=torch.float32, device=torch.device("cpu"), comm=Comm.single())

    @torch.inference_mode()
    def _probabilities(self, model: torch.nn.Module, ids: list[int], num_new: int) -> Tensor:
        logits_TV: Tensor = model(torch.tensor([ids])).logits[0, -num_new - 1 : -1]
        return (logits_TV / TEMPERATURE).softmax(-1)


def main() -> None:
    """Writes the points of every small model into its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("llama_ssp/shipped"), help="folder of tiny and tiny-draft")
    parser.add_argument("--texts", type=int, default=60, help="per task")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in SMALL_MODELS:
        measure = Measure(options.pair / name, num_texts=options.texts, length=options.length)
        points = [{"agreement": 1.0, "noise": 0.0}]
        for level in LEVELS:
            noise = measure.noise_for(level, least=points[-1]["noise"])
            points.append({"agreement": level, "noise": round(noise, 4)})
            print(name, points[-1], flush=True)
        content = {"temperature": TEMPERATURE, "points": points}
        (options.pair / name / AGREEMENT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
