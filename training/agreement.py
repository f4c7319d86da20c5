"""Finds how much noise on a model's output head makes it agree with itself to a wanted degree.

What it does: lets each model of the pair write text after the default prompts of `task=compare` and `task=latency`, and
bisects the noise of `llama_ssp.extensions.synthetic` for each level of agreement: the chance that a drafted token is
accepted, which is the sum of the smaller of both probabilities, on average over the text. Both tasks count alike.
A head that drafts several tokens reads its own states, so the engine drafts with it and counts what is accepted.
What it does not do: look at another temperature.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.decoding import default_prompts, run_config
from llama_ssp import catalogue, load
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.heads.sources import HeadSource
from llama_ssp.extensions.heads.synthetic import SMALL_HEAD
from llama_ssp.extensions.modules.building import load_modules
from llama_ssp.extensions.synthetic.records import AGREEMENT_FILE, NAME, SyntheticConfig
from llama_ssp.extensions.synthetic.source import SMALL_MODELS, Synthetic
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.requests import encode
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete

TEMPERATURE = 0.8
LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MOST_NOISE, STEPS = 1.5, 9
HEAD_NOISES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.3, 1.6)
TASKS = ("compare", "latency")


@dataclass(frozen=True)
class Text:
    """A prompt with what the model wrote after it, and the model's distributions of the latter."""

    ids: list[int]
    num_new: int
    probabilities_TV: Tensor


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
            prompts = default_prompts(task)
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
        return load_modules(Loading(noisy, dtype=torch.float32))

    @torch.inference_mode()
    def _probabilities(self, model: torch.nn.Module, ids: list[int], num_new: int) -> Tensor:
        logits_TV: Tensor = model(torch.tensor([ids])).logits[0, -num_new - 1 : -1]
        return (logits_TV / TEMPERATURE).softmax(-1)


def acceptance(
    model: str, draft: str, *, agreement: float = 0.5, noise: float | None = None, num_texts: int = 60, length: int = 64
) -> float:
    """Returns the share of drafted tokens that the engine accepts, of those examined, on average over the tasks.

    Target and draft have synthetic weights of this agreement, or the draft, then a head, of this noise.
    """
    config = run_config(
        catalogue.load(model),
        catalogue.load(draft),
        weights=NAME,
        synthetic=SyntheticConfig(agreement=agreement),
        batch_size=num_texts,
        ignore_eos=False,
    )
    with start(device=DeviceKind.cpu, timeout_s=60) as world:
        target, source = find_sources(config, world)
        if source and noise is not None and isinstance(source.origin, HeadSource):
            assert isinstance(source.origin.files, Synthetic)
            files = replace(source.origin.files, noise=noise)
            source = replace(source, origin=replace(source.origin, files=files))
        models = load_models(config, world, (target, source))
    decoder = build_decoder(models, config, speculative=True)
    rates = []
    for task in TASKS:
        prompts, num_accepted, num_examined = default_prompts(task), 0, 0
        requests = [
            Request(index=index, sample=sample, prompt_ids=encode(prompt, models.tokenizer), max_new_tokens=length)
            for sample, (index, prompt) in product(range(num_texts // len(prompts)), enumerate(prompts))
        ]
        for done in complete(decoder, requests):
            for accepted, examined in zip(done.accepted_lengths, done.examined_lengths, strict=True):
                num_accepted += accepted if examined else 0
                num_examined += examined
        rates.append(num_accepted / num_examined)
    return fmean(rates)


def head_points(*, num_texts: int, length: int) -> Iterator[dict[str, float]]:
    """Yields how often the small head's drafts are accepted with each noise."""
    for noise in HEAD_NOISES:
        found = acceptance(SMALL_MODELS[0], SMALL_HEAD, noise=noise, num_texts=num_texts, length=length)
        yield {"agreement": round(found, 3), "noise": noise}


def model_points(folder: Path, *, num_texts: int, length: int) -> Iterator[dict[str, float]]:
    """Yields how much noise gives each level of a small model's agreement with itself."""
    measure, noise = Measure(folder, num_texts=num_texts, length=length), 0.0
    yield {"agreement": 1.0, "noise": 0.0}
    for level in LEVELS:
        noise = round(measure.noise_for(level, least=noise), 4)
        yield {"agreement": level, "noise": noise}


def main() -> None:
    """Writes the points of every small model, or of the head, into its folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("llama_ssp/shipped"), help="folder of tiny and tiny-draft")
    parser.add_argument("--texts", type=int, default=60, help="per task")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--head", action="store_true", help="the shipped head, instead of the pair")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in (SMALL_HEAD,) if options.head else SMALL_MODELS:
        sizes = {"num_texts": options.texts, "length": options.length}
        points = []
        for point in head_points(**sizes) if name == SMALL_HEAD else model_points(options.pair / name, **sizes):
            points.append(point)
            print(name, point, flush=True)
        content = {"temperature": TEMPERATURE, "points": points}
        folder = hub.resolve(catalogue.load(name)) if name == SMALL_HEAD else options.pair / name
        (folder / AGREEMENT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
