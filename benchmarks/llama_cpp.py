"""Batches in llama.cpp, through the packages llama-cpp-python and gguf: random draws behind prompts of token ids.

Neither is a dependency; `pip install llama-cpp-python gguf` builds the first one from source. Files have a vocabulary
only for servers, which need one.

Shapes: H heads, O outputs, I inputs.
"""

import ctypes
import json
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

IS_INSTALLED = all(map(find_spec, ("llama_cpp", "gguf")))
_MOST_TOKENS = 512
_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
    "head_count_kv": "num_key_value_heads",
    "rope_dimension_count": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
}


class LlamaCpp:
    """A model in a file that `write` has made, for so many rows of so many tokens."""

    def __init__(self, file: Path, *, num_rows: int, num_slots: int, num_threads: int) -> None:
        self._library: Any = import_module("llama_cpp")
        # It tells about every tensor that it loads; the function must live as long as the library.
        self._silent = self._library.llama_log_callback(lambda *_: None)
        self._library.llama_log_set(self._silent, ctypes.c_void_p(0))
        self._model = self._library.llama_model_load_from_file(
            str(file).encode(), self._library.llama_model_default_params()
        )
        settings = self._library.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = num_rows * -(-num_slots // 256) * 256, num_rows
        settings.n_batch = settings.n_ubatch = _MOST_TOKENS
        settings.n_threads = settings.n_threads_batch = num_threads
        self._context = self._library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not read {file}")
        self._batch = self._library.llama_batch_init(_MOST_TOKENS, 0, 1)

    def close(self) -> None:
        """Free the memory."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def tokens_per_s(
        self, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, temperature: float, seed: int
    ) -> float:
        """Complete all prompts as one batch; returns new tokens a second, prefill included."""
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for step in (library.llama_sampler_init_temp(temperature), library.llama_sampler_init_dist(seed)):
            library.llama_sampler_chain_add(chain, step)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        started = time.perf_counter()
        texts = [[*ids] for ids in prompts]
        tokens = [(row, place, token) for row, ids in enumerate(prompts) for place, token in enumerate(ids)]
        for _ in range(num_new_tokens):
            for first in range(0, len(tokens), _MOST_TOKENS):
                part = tokens[first : first + _MOST_TOKENS]
                ends = self._decode(part, lengths=[*map(len, texts)])
                for place in ends:
                    row = part[place][0]
                    texts[row].append(library.llama_sampler_sample(chain, self._context, place))
            tokens = [(row, len(text) - 1, text[-1]) for row, text in enumerate(texts)]
        seconds = time.perf_counter() - started
        library.llama_sampler_free(chain)
        return len(prompts) * num_new_tokens / seconds

    def _decode(self, tokens: Sequence[tuple[int, int, int]], *, lengths: Sequence[int]) -> list[int]:
        """Read tokens (row, position, id); returns the places of those that end the text of a row."""
        batch, ends = self._batch, []
        batch.n_tokens = len(tokens)
        for place, (row, position, token) in enumerate(tokens):
            is_last = position == lengths[row] - 1
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, is_last
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            ends += [place] if is_last else []
        if failed := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        return ends


def write(folder: Path, file: Path, form: str, *, vocabulary: bool = False) -> None:
    """Write the checkpoint of a Llama; matrices are in the number format `form`, such as `BF16`, norms in fp32."""
    gguf, load_file = import_module("gguf"), import_module("safetensors.torch").load_file
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    for add, name in _SIZES.items():
        getattr(writer, f"add_{add}")(config[name])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if vocabulary:
        _write_vocabulary(writer, gguf, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    else:
        writer.add_tokenizer_model("none")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[form]
    for name, stored in load_file(folder / "model.safetensors").items():
        layer, _, inside = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        known = f"blk.{layer}.{_PARTS[inside]}" if layer.isdecimal() else _PARTS[name.removesuffix(".weight")]
        if stored.ndim == 1:
            writer.add_tensor(f"{known}.weight", stored.float().numpy())
            continue
        values_OI = stored.float()
        if num_heads := heads.get(inside.partition(".")[2]):  # it turns neighbours, transformers a head's two halves
            values_OI = values_OI.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{known}.weight", gguf.quants.quantize(values_OI.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any, gguf: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:  # noqa: ANN401
    """The tokens of a byte-level BPE; prompts are given as ids, so that its pre-tokenizer does not matter."""
    ids = {**tokenizer["model"]["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
    added, kinds = {one["id"] for one in tokenizer["added_tokens"]}, gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=lambda token: ids[token]))
    writer.add_token_types([kinds.CONTROL if token in added else kinds.NORMAL for token in sorted(ids.values())])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
