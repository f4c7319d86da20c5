"""A model of transformers as a `Runner`, with the static cache. No forward reads a value back to the host.

Shapes: B sequences, T positions, R rows that get logits, S slots, V vocabulary, E embedding width.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llama_ssp.architectures.family import OTHER, record_of
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.modules.building import layers_of
from llama_ssp.extensions.modules.cache import LibraryCache
from llama_ssp.extensions.modules.experts import ExpertCounter, OwnExperts
from llama_ssp.extensions.modules.families import mask_argument
from llama_ssp.extensions.modules.latents import attend_kept
from llama_ssp.extensions.modules.recurrent import mixers_of, state_of, use_own_kernels
from llama_ssp.extensions.modules.tensor_parallel import GatheredLinear
from llama_ssp.kernels.parts import rows_of
from llama_ssp.models.cache import CachedRunner, StaticCache, Taps
from llama_ssp.models.runner import TreePlaces, masks_of
from llama_ssp.models.stages import entering, leaving
from llama_ssp.models.vocabulary import own_part
from llama_ssp.ranks.comms import Comm, Reads, best_of
from llama_ssp.ranks.stages import WHOLE_MODEL, ModelStage
from llama_ssp.storage.formats import OWN_DTYPE
from llama_ssp.types import LibraryPart, Values

_COMPARED_TOKENS, _COMPARED_PIECE, _COMPARED_WINDOW = 24, 8, 6
_WINDOWS = "sliding_window", "attention_chunk_size"
"""Fields of a config that say how many positions a layer sees."""
_MOST_APART = {True: 1e-3, False: 0.1}
"""Relative difference of the logits, in fp32 and in 16 bits."""
_MOST_LETTERS = 200


class ModuleRunner(CachedRunner):
    """The modules of transformers with the static cache; supports every family that passes `check_servable`.

    Only the requested rows reach the output head. The rest of the forward is unchanged, such as a family's scaling of
    the logits.

    Args:
        model: the model in evaluation mode, with parameters without gradients.
        comm: the ranks that share the model, or its layers of a stage.
        cache_dtype: the format of the cache.
        stage: the stage of this rank, whose modules the model has (`stages`).
    """

    # transformers may choose operators by the values of its inputs.
    repeats_operators = False
    _is_lent = False

    def __init__(
        self, model: PreTrainedModel, *, comm: Comm, cache_dtype: str = OWN_DTYPE, stage: ModelStage = WHOLE_MODEL
    ) -> None:
        # The embedding, whose device takes the ids and returns the logits, or zeros in place of it.
        values = next(model.parameters()) if stage.is_first else next(model.get_input_embeddings().buffers())
        super().__init__(model.config, values, layers=stage.layers or None)
        self.comm = comm
        self._model, self._stage = model, stage
        self._width, self._like = int(model.config.hidden_size), values.new_empty(0)
        layers: Any = layers_of(model)[1]
        self._entry = layers[stage.layers.start - 1] if stage.layers.start else None
        self._exit = layers[stage.layers.stop] if 0 < stage.layers.stop < len(layers) else None
        self._windows = record_of(model.config.model_type).windows_of(model.config)  # a forward makes masks of all
        self._library_cache = LibraryCache(self._slot_layers, of_latents=attend_kept(model, self._kept))
        if record_of(model.config.model_type).recurrent:
            self.layer_states = [*map(state_of, mixers_of(model))]
        kinds: Any = getattr(model.config, "layer_types", None) or ()
        of_others = {*record_of(model.config.model_type).recurrent} & {*kinds} if stage.num_stages > 1 else ()
        self.is_recurrent = bool(self.layer_states or of_others)
        if self.layer_states:
            use_own_kernels(model, self.device)
        self._rows_BR: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep_wanted_rows)
        self._counter = ExpertCounter(model, self.device)
        self._experts = [module for module in model.modules() if isinstance(module, OwnExperts)]
        if self._counter.num_experts:
            self.experts_read_3 = self._counter.sums_3
        is_copy = not (stage.is_first or self._entry)  # layers that another model runs
        if not (is_copy or record_of(model.config.model_type).is_written):
            self._compare()
        self._cache, self._states, self._saved = None, None, None
        self._kept = rows_of(cache_dtype, self.dtype)
        attend_kept(model, self._kept)

    @property
    def tables(self) -> tuple[nn.Module, nn.Module]:
        """The embedding and the output."""
        return self._model.get_input_embeddings(), self._model.get_output_embeddings()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that are not in linear layers of ours, by name."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    @property
    def num_layers(self) -> int:
        """The number of the model's layers."""
        return len(layers_of(self._model)[1])

    def part(self, numbers: Sequence[int], *, of: "ModuleRunner | None" = None) -> "ModulePart":
        """A runner of some layers, in order, between the same embedding and output; see `LeanRunner.part`."""
        layers = [*layers_of(self._model)[1]]
        left_out = [layer for number, layer in enumerate(layers) if number not in numbers]
        if of is None:
            return ModulePart(self, left_out)
        of._counter.share(self._counter)
        others: Any = layers_of(of._model)[1]
        return ModulePart(self, left_out, [(layers[number], others[number]) for number in numbers])

    def make_buffers(self, cache: StaticCache, layers: Collection[int]) -> None:
        """Make the buffers of some layers in a cache of this model's, as in its own, which a forward may have to make.

        Layers that read the keys of others get them all.
        """
        if not cache.is_complete:
            if not self.cache.is_complete:
                none_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
                with torch.inference_mode():
                    self.forward(none_11, none_11, bucket=1, cache_rows_B=none_11[0])
            have_own = len(self._slot_layers) == self.num_layers
            cache.make_like(self.cache, layers if have_own else range(self.num_layers))

    @contextmanager
    def lent(self, cache: StaticCache, reads: Reads) -> Iterator[None]:
        """Let forwards meanwhile read and write another cache, and return what their caller reads."""
        before = self._cache, self.reads
        self._cache, self.reads, self._is_lent = cache, reads, True
        try:
            yield
        finally:
            self._cache, self.reads, self._is_lent = *before, False

    @torch.inference_mode()
    def _compare(self) -> None:
        """Raise ConfigError unless two short texts have the logits that they have without this cache and these masks.

        A window is shortened meanwhile, so that the text is longer. Each piece is read once before, with other tokens:
        states must forget them.
        """
        config: Any = self._model.config
        stage, self._stage = self._stage, WHOLE_MODEL
        windows, own = self._windows, {name: size for name in _WINDOWS if (size := getattr(config, name, None))}
        positions_BT = torch.arange(_COMPARED_TOKENS, device=self.device).repeat(2, 1)
        ids_BT = torch.stack([7 * positions_BT[0], 5 * positions_BT[1]]) % self.vocab_size
        if self._entry:  # hidden states
            ids_BT = torch.sin(ids_BT[..., None] + torch.arange(self._width, device=self.device)).to(self.dtype)
        try:
            if own:
                config.update(dict.fromkeys(own, _COMPARED_WINDOW))
                self._windows = record_of(config.model_type).windows_of(config)
            wanted_BTV = self._called(self._model, ids_BT, use_cache=False).float()
            self.allocate(batch_size=2, capacity=_COMPARED_TOKENS, num_rolled_back=_COMPARED_PIECE)
            found = []
            for ids, positions in zip(
                *(each.split(_COMPARED_PIECE, 1) for each in (ids_BT, positions_BT)), strict=True
            ):
                for read in [ids.flip(1), ids] if self.is_recurrent else [ids]:
                    logits_BTV = self.forward(read, positions, bucket=_COMPARED_TOKENS)
                found.append(logits_BTV)
            apart = float((torch.cat(found, 1) - wanted_BTV).norm() / wanted_BTV.norm())
        except Exception as error:  # of any family's code
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_LETTERS]
            raise ConfigError(
                f"{config.model_type} models do not run with the static cache ({reason}): {OTHER}"
            ) from error
        finally:
            config.update(own)
            self._windows, self._cache, self._stage = windows, None, stage
        if not apart < _MOST_APART[self.dtype is torch.float32]:
            raise ConfigError(
                f"{config.model_type} models have other logits with the static cache than in transformers ({apart:.1%} "
                f"apart on {_COMPARED_TOKENS} tokens): {OTHER}"
            )

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
        taps: Taps | None = None,
        tree: TreePlaces | None = None,
        taken_B: Tensor | None = None,
        part: LibraryPart | None = None,
        **_others: object,
    ) -> Tensor:
        """See `Runner.forward`; embeddings (B, T, E) may stand in place of ids. Masks show any positions.

        A round computes a few positions beyond the context, whose tokens are never kept: they get its last position,
        since some models have a table of positions. `part` is a model of some of the layers, which runs in place of
        all.
        """
        assert self._cache is not None, "allocate comes first"
        self._rows_BR = score_positions_BR
        cache = self._library_cache
        slots_BT = tree.slots_BT if tree else positions_BT
        kept = self._states
        cache.show(
            self._cache.view(slots_BT, bucket=bucket, cache_rows_B=cache_rows_B),
            kept.view(positions_BT, taken_B=taken_B, cache_rows_B=cache_rows_B) if kept else None,
        )
        # Every layer would convert a boolean mask to this form again.
        if tree:
            masks = {
                window: mask_BTU[:, None]
                for window, mask_BTU in masks_of(tree, self._windows, dtype=self.dtype).items()
            }
        else:
            masks = self._masks.rows(positions_BT, bucket=bucket)
        mask = mask_argument(self._model.config, masks)
        in_round = score_positions_BR is None or cache_rows_B is None
        self._counter.begin()
        for experts in self._experts:
            experts.expect(in_round=in_round)
        head: Any = self._model.get_output_embeddings()
        head = getattr(head, "shared", None) or head
        if is_cut := isinstance(head, GatheredLinear):
            head.gather(is_wanted=self.reads is Reads.all)
        slots_M = taps.slots(slots_BT, cache_rows_B) if taps else None
        if self._entry and self._stage.before:
            states_ME = entering(
                self._stage, ids_BT.numel(), taps, slots_M, width=self._width, comm=self.comm, like=self._like
            )
            self._entry.hand(states_ME.view(*ids_BT.shape, -1))
        with self._tapped(taps, slots_M):
            logits_BRV = self._called(
                part or self._model,
                ids_BT,
                attention_mask=mask,
                position_ids=positions_BT.clamp(max=self.max_position_embeddings - 1),
                past_key_values=cache,
                use_cache=True,
            )
        if self._stage.behind:
            self._stage.send(leaving(logits_BRV.flatten(0, 1), self._stage, taps, slots_M), comm=self.comm)
            scored = positions_BT if score_positions_BR is None else score_positions_BR
            logits_BRV = logits_BRV.new_empty(*scored.shape, 0)
        # A verification scores all of several tokens; a prompt's forward does not.
        if score_positions_BR is None and not self._is_lent and positions_BT.shape[1] > 1:
            self._counter.count()
        if self._exit:
            return logits_BRV.float()
        if self.reads is Reads.best:  # what a family does to logits, it does to each of them alone
            return best_of(logits_BRV, first=head.first, comm=self.comm) if is_cut else best_of(logits_BRV)
        is_own = self.reads is Reads.own
        return (own_part(logits_BRV, self.vocab_size, self.comm) if is_own else logits_BRV).float()

    def _called(self, model: LibraryPart, ids_BT: Tensor, **options: object) -> Tensor:
        """The logits of a forward of the library, or the hidden states after the last layer of an earlier stage."""
        ids = {"inputs_embeds" if ids_BT.is_floating_point() else "input_ids": ids_BT}
        found_BRV: Tensor = model(**ids, **options).logits
        if self._entry is not None:
            self._entry.hand(None)
        if self._exit is not None:
            found_BRV = self._exit.taken()
        return found_BRV

    @contextmanager
    def _tapped(self, taps: Taps | None, slots_M: Any) -> Iterator[None]:  # noqa: ANN401 - None without taps
        """Keep the inputs of this stage's tapped layers, or of the output after them, in a forward."""
        if taps is None:
            yield
            return
        layers = [*layers_of(self._model)[1], self._model.get_output_embeddings()]

        def keep(layer: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
            active_BTE = args[0][(0,) * (args[0].dim() - 3)]  # the first of the streams that Gemma 3n has
            taps.write(layer, active_BTE.flatten(0, 1), slots_M)

        def keep_output(module: nn.Module, _args: object, output: Values) -> None:
            keep(len(layers), module, output if isinstance(output, tuple) else (output,))

        hooks = [
            layers[-2].register_forward_hook(keep_output)
            if layer == len(layers)
            else layers[layer].register_forward_pre_hook(partial(keep, layer), prepend=True)
            for layer in taps.layers
            if self._stage.has_input(layer)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_wanted_rows(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output head: keep only the hidden states (B, R, E) of the requested rows."""
        if self._rows_BR is None:
            return None
        (hidden_BTE,) = args
        rows_BR1 = self._rows_BR[..., None].to(hidden_BTE.device)
        return (hidden_BTE.gather(1, rows_BR1.expand(-1, -1, hidden_BTE.shape[-1])),)


class ModulePart:
    """Some layers of a `ModuleRunner`, whose other layers a forward of it passes over; it shares all weights.

    Layers that keep states read and write the whole model's states. A layer may be `copied`, and computes with the
    weights of its copy.
    """

    def __init__(
        self,
        whole: ModuleRunner,
        left_out: Sequence[nn.Module],
        copied: Sequence[tuple[nn.Module, nn.Module]] = (),
    ) -> None:
        self._whole, self._left_out, self._copied, self._reads = whole, left_out, copied, Reads.all
        self._cache: StaticCache | None = None
        self._num_others: int | None = None  # of what a layer returns beside its output; None if that is no tuple
        for layer in left_out[:1]:
            hook = layer.register_forward_hook(lambda _layer, _args, output: self._see(output))
            self._forget_hook = hook.remove

    def _see(self, output: object) -> None:
        """Learn from the whole model's first forward what a layer returns."""
        self._num_others = len(output) - 1 if isinstance(output, tuple) else None
        self._forget_hook()

    def follow(self, whole: ModuleRunner, cache: StaticCache | None, *, reads: Reads) -> None:
        """Read and write a cache, or the whole model's; see `LeanRunner.follow`."""
        self._whole, self._cache, self._reads = whole, cache, reads

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, **how: Any) -> Tensor:
        """See `Runner.forward`."""
        others = [(layer, self._pass_over) for layer in self._left_out]
        others += [(layer, copied.forward) for layer, copied in self._copied]
        kept = [vars(layer).get("forward") for layer, _ in others]
        try:
            for layer, forward in others:
                layer.forward = forward
            with self._whole.lent(self._cache or self._whole.cache, self._reads):
                return self._whole.forward(ids_BT, positions_BT, **how)
        finally:
            for (layer, _), own in zip(others, kept, strict=True):
                del layer.forward
                if own:
                    layer.forward = own

    def _pass_over(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the layers of a family
        x: Tensor = args[0] if args else options["hidden_states"]
        return x if self._num_others is None else (x, *self._num_others * [None])
