"""Libraries behind OpenAI's `/completions`, for `llama-ssp audit`: `python -m benchmarks.audited ENGINE`.

`transformers` is its `generate`; `assisted` has a draft model, `lookup` takes drafts from the text. `flashspec` is that
package with its default strategy, `flashspec-model` with the draft model alone. One request at a time; a field that an
engine lacks is refused. Engines with servers of their own need none of this. `write_gguf` of `benchmarks.llama_cpp`
makes the files of llama.cpp.
"""

import argparse
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers

from llama_ssp import catalogue
from llama_ssp.weights import hub

Body = Mapping[str, Any]
Complete = Callable[[list[int], Body], tuple[list[int], torch.Tensor | None]]
"""New tokens after a prompt, and the logits (T, V) that they were drawn from, before all processors."""
NUM_DRAFTED = 4
_NEUTRAL: dict[str, Any] = {
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
}
_PLAIN = {"model", "prompt", "max_tokens", "temperature", "seed", "logprobs", "return_token_ids"}


class _RefusedError(Exception):
    """A request that an engine cannot do."""


def _fields(body: Body, known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request; raises _RefusedError for others than `known`."""
    unknown = [
        name for name, value in body.items() if name not in _PLAIN | known.keys() and value != _NEUTRAL.get(name)
    ]
    if unknown:
        raise _RefusedError(f"this engine has no {', '.join(unknown)}")
    return {name: body.get(name, off) for name, off in known.items()}


def of_transformers(target: Path, draft: Path, **how: Any) -> Complete:
    """`generate` with `how`, in which `assistant_model` stands for the draft."""
    model, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (target, draft)
    )
    if "assistant_model" in how:
        how |= {"assistant_model": assistant}

    def complete(ids: list[int], body: Body) -> tuple[list[int], torch.Tensor | None]:
        fields = _fields(body, _NEUTRAL)
        settings: dict[str, Any] = {name: fields[name] for name in ("top_p", "repetition_penalty")}
        settings |= {"top_k": max(fields["top_k"], 0), "min_new_tokens": fields["min_tokens"] or None}
        settings |= {"min_p": fields["min_p"] or None}
        if fields["logit_bias"]:
            settings["sequence_bias"] = {(int(token),): bias for token, bias in fields["logit_bias"].items()}
        temperature = body.get("temperature", 1.0)
        settings |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        torch.manual_seed(body.get("seed") or 0)
        prompt = torch.tensor([ids])
        found = model.generate(  # a mask of its own leaves out tokens that are those of padding
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=body["max_tokens"],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=bool(body.get("logprobs")),
            **settings,
            **how,
        )
        logits = torch.cat(found.logits) if found.logits else None
        return found.sequences[0, len(ids) :].tolist(), logits

    return complete


def of_flashspec(target: Path, draft: Path, *, strategy: str) -> Complete:
    """The engine of flashspec at temperature 1, and at 0 for greedy texts."""
    import flashspec as library  # type: ignore[import-not-found]
    from flashspec.bandit.ucb import UCB1Selector  # type: ignore[import-not-found]
    from flashspec.engine.drafter import load_drafters  # type: ignore[import-not-found]
    from flashspec.engine.verifier import TargetModel  # type: ignore[import-not-found]

    device, eos = torch.device("cpu"), transformers.AutoConfig.from_pretrained(target).eos_token_id

    def engine(temperature: float) -> Any:  # noqa: ANN401 - of the library
        config = library.FlashSpecConfig(
            drafter_name=str(draft),
            target_name=str(target),
            device="cpu",
            dtype="float32",
            eos_token_ids=(eos,),
            drafter_strategy=strategy,
            bandit=library.BanditConfig(n_arms=1),
            sampling=library.SamplingConfig(gamma=NUM_DRAFTED, temperature=temperature),
        )
        drafters = load_drafters([str(draft)], device=device, dtype=torch.float32, temperature=temperature)
        selector = UCB1Selector(n_arms=1, window_size=100)
        return library.SpeculativeEngine(config, drafters, TargetModel(str(target), device, torch.float32), selector)

    engines = {temperature: engine(temperature) for temperature in (0.0, 1.0)}

    def complete(ids: list[int], body: Body) -> tuple[list[int], torch.Tensor | None]:
        _fields(body, {})
        if (temperature := float(body.get("temperature", 1.0))) not in engines or body.get("logprobs"):
            raise _RefusedError("this engine has temperatures of 0 and 1, and no logprobs")
        torch.manual_seed(body.get("seed") or 0)
        found = engines[temperature].generate(torch.tensor([ids]), max_new_tokens=body["max_tokens"])
        return [token for token in found.output_ids[0].tolist() if token >= 0], None

    return complete


ENGINES: dict[str, Callable[[Path, Path], Complete]] = {
    "transformers": of_transformers,
    "assisted": lambda *folders: of_transformers(*folders, assistant_model=None),
    "lookup": lambda *folders: of_transformers(*folders, prompt_lookup_num_tokens=NUM_DRAFTED),
    "flashspec": lambda *folders: of_flashspec(*folders, strategy="auto"),
    "flashspec-model": lambda *folders: of_flashspec(*folders, strategy="bandit"),
}


def answer(complete: Complete, body: Body, tokenizer: Any, *, length: int) -> dict[str, Any]:  # noqa: ANN401
    """The answer to a request, as vLLM has it with return_token_ids."""
    ids, num_top = list(body["prompt"]), body.get("logprobs") or 0
    found, logits = complete(ids, body)
    logprobs = None
    if logits is not None:
        log_probs_TV = logits.float().log_softmax(-1)
        own, top = log_probs_TV[range(len(found)), found].tolist(), log_probs_TV.topk(num_top)
        tops = [
            {f"token_id:{token}": value for token, value in zip(tokens, values, strict=True)}
            for tokens, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        logprobs = {"tokens": [f"token_id:{token}" for token in found], "token_logprobs": own, "top_logprobs": tops}
    is_whole = len(found) == min(body["max_tokens"], length - len(ids))
    choice = {
        "index": 0,
        "text": tokenizer.decode(found),
        "token_ids": found,
        "logprobs": logprobs,
        "finish_reason": "length" if is_whole else "stop",
    }
    return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": len(ids)}}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--target", default="tiny", help="a model of the catalogue")
    parser.add_argument("--draft", default="tiny-draft")
    parser.add_argument("--port", type=int, default=8001)
    arguments = parser.parse_args()
    folders = [hub.resolve(catalogue.load(name)) for name in (arguments.target, arguments.draft)]
    complete, tokenizer = ENGINES[arguments.engine](*folders), transformers.AutoTokenizer.from_pretrained(folders[0])
    length, one_at_a_time = (
        transformers.AutoConfig.from_pretrained(folders[0]).max_position_embeddings,
        threading.Lock(),
    )

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": arguments.engine, "max_model_len": length}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                with one_at_a_time, torch.inference_mode():
                    self._say(200, answer(complete, body, tokenizer, length=length))
            except _RefusedError as error:
                self._say(400, {"error": {"message": str(error)}})

        def _say(self, status: int, content: object) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    print(f"{arguments.engine} at http://127.0.0.1:{arguments.port}/v1", flush=True)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
