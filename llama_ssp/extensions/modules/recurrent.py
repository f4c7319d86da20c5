"""Recurrent layers of transformers on our states: gated delta rule, Mamba 2 and short convolutions.

A mixer keeps its modules; with our cache, its forward is the one of this module, which takes any number of tokens,
reads and keeps states by position, and passes over tokens that do not count. Without a cache it is the library's.

Shapes: B sequences, T tokens, E hidden size, C channels, H heads, N width of a key, P width of a value.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from llama_ssp.kernels.recurrence import HeadLayout, Steps, recur
from llama_ssp.models.states import LayerState, StateView
from llama_ssp.registry import operators
from llama_ssp.types import LibraryPart

_Mix = Callable[[Any, Tensor, StateView], Tensor]
_SAME_PARTS = ("norm", "o_norm"), ("out_proj", "o_proj")
"""Names of the norm and of the last product, in families of either kind."""


def adapt(model: PreTrainedModel) -> None:
    """Let every recurrent layer of a model compute by this module."""
    for mixer in mixers_of(model):
        mixer.forward = partial(_forward, mixer, mixer.forward)


def mixers_of(model: nn.Module) -> Iterator[Any]:
    """All recurrent layers, in order, of a model that `adapt` has changed."""
    return (module for module in model.modules() if isinstance(convolution_of(module), nn.Conv1d))


def state_of(mixer: LibraryPart) -> LayerState:
    """The sizes of a layer's state on this rank."""
    weight_C1W = convolution_of(mixer).weight
    shape: tuple[int, ...] = ()
    if _is_delta(mixer):
        widths = (mixer.head_k_dim, mixer.head_v_dim) if hasattr(mixer, "head_v_dim") else (mixer.head_dim,) * 2
        shape = (getattr(mixer, "num_v_heads", 0) or mixer.num_heads, *widths)
    elif hasattr(mixer, "ssm_state_size"):
        shape = (len(mixer.A_log), mixer.ssm_state_size, mixer.head_dim)
    return LayerState(mixer.layer_idx, len(weight_C1W), weight_C1W.shape[-1], shape, weight_C1W.device)


def shared_heads(mixer: LibraryPart) -> int:
    """Key heads of a delta rule, which ranks share; 0 for other layers."""
    return (getattr(mixer, "num_k_heads", 0) or mixer.num_heads) if _is_delta(mixer) else 0


def _is_delta(mixer: LibraryPart) -> bool:
    return hasattr(mixer, "head_v_dim") or hasattr(mixer, "forget_gate")


def convolution_of(mixer: LibraryPart) -> LibraryPart:
    """The convolution of a layer; None of other modules."""
    return getattr(mixer, "conv1d", None) or getattr(mixer, "conv", None)


def _forward(mixer: LibraryPart, library: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:
    cache = options.pop("cache_params" if "cache_params" in options else "past_key_values", None)
    states: StateView | None = getattr(cache, "states", None)
    if states is None:
        return library(hidden_states, **options)
    return mix_of(mixer)(mixer, hidden_states, states)


def mix_of(mixer: LibraryPart) -> _Mix:
    """The forward of a layer on our states."""
    if _is_delta(mixer):
        return _gated_delta
    return _mamba2 if hasattr(mixer, "ssm_state_size") else _short_convolution


def _gated_delta(mixer: LibraryPart, x_BTE: Tensor, states: StateView) -> Tensor:
    own = _own_kernels(mixer, states)
    mixed_BTX, gates, rates, decays = _projected(mixer, x_BTE, is_whole=not own)
    factor = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    if own:
        read_BTHP = own.recur(
            mixed_BTX,
            decays,
            rates,
            _layout_of(mixer),
            states.places(mixer.layer_idx),
            mixer=mixer,
            dtype=x_BTE.dtype,
            rate_factor=factor,
        )
    else:
        steps = _steps_of_delta(
            mixer, _convolved(mixer, mixed_BTX, states), rates.flatten(2).sigmoid() * factor, decays
        )
        read_BTHP = _recurred(mixer, steps, states).to(x_BTE.dtype)
    norm, project = (getattr(mixer, new, None) or getattr(mixer, old) for new, old in _SAME_PARTS)
    normed_BTY = norm(read_BTHP.flatten(0, 2), gates.reshape(-1, read_BTHP.shape[-1])).view(*x_BTE.shape[:2], -1)
    mixed_BTE: Tensor = project(normed_BTY)
    return mixed_BTE


def _steps_of_delta(mixer: LibraryPart, mixed_BTC: Tensor, rates_BTH: Tensor, decays: Tensor) -> Steps:
    num_heads, key_dim, value_dim = state_of(mixer).shape
    value_width = num_heads * value_dim
    key_width = (mixed_BTC.shape[-1] - value_width) // 2
    queries, keys, values = mixed_BTC.split([key_width, key_width, value_width], -1)
    queries, keys = (_normed(_by_heads(part, key_dim, num_heads)) for part in (queries, keys))
    decay: LibraryPart = getattr(mixer, "forget_gate", mixer)
    times_BTHD = functional.softplus(decays.flatten(2).float() + decay.dt_bias).unflatten(-1, (num_heads, -1))
    log_decays_BTHD = -decay.A_log.float().exp().view(-1, 1) * times_BTHD
    return Steps(
        queries * key_dim**-0.5,
        keys,
        _by_heads(values, value_dim, num_heads),
        log_decays_BTHD.transpose(1, 2),
        rates_BTH.float().transpose(1, 2),
    )


def _projected(mixer: LibraryPart, x_BTE: Tensor, *, is_whole: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, gates, and rates and decays before their functions, these two by key heads.

    Unless the inputs must be `is_whole`, other numbers may stand between them; see `_layout_of`.
    """
    num_keys = shared_heads(mixer)
    if hasattr(mixer, "in_proj_qkvz"):
        x_BTX, rates_decays = mixer.in_proj_qkvz(x_BTE), mixer.in_proj_ba(x_BTE).unflatten(-1, (num_keys, -1))
        of_key, of_value = mixer.head_k_dim, mixer.value_dim // num_keys
        *mixed, gates = x_BTX.unflatten(-1, (num_keys, -1)).split([of_key, of_key, of_value, of_value], -1)
        if is_whole:
            x_BTX = torch.cat([part.flatten(2) for part in mixed], -1)
        return x_BTX, gates, *rates_decays.chunk(2, -1)
    if hasattr(mixer, "in_proj_qkv"):
        x_BTX, gates = mixer.in_proj_qkv(x_BTE), mixer.in_proj_z(x_BTE)
        rates, decays = mixer.in_proj_b(x_BTE), mixer.in_proj_a(x_BTE)
    else:
        x_BTX = torch.cat([mixer.q_proj(x_BTE), mixer.k_proj(x_BTE), mixer.v_proj(x_BTE)], -1)
        rates = mixer.b_proj(x_BTE)
        if hasattr(mixer, "forget_gate"):
            gates, forget = mixer.g_b_proj(mixer.g_a_proj(x_BTE)), mixer.forget_gate
            decays = forget.f_b_proj(forget.f_a_proj(x_BTE))
        else:
            gates, decays = mixer.g_proj(x_BTE), mixer.a_proj(x_BTE)
    return x_BTX, gates, rates.unflatten(-1, (num_keys, -1)), decays.unflatten(-1, (num_keys, -1))


def _layout_of(mixer: LibraryPart) -> HeadLayout:
    """The layout of a layer's queries, keys and values."""
    num_heads, key_dim, value_dim = state_of(mixer).shape
    if _is_delta(mixer):
        num_keys = shared_heads(mixer)
        of_values, key_width = num_heads // num_keys * value_dim, num_keys * key_dim
        channels = 0, key_width, 2 * key_width
        if hasattr(mixer, "in_proj_qkvz"):
            step = 2 * (key_dim + of_values)
            return HeadLayout((0, key_dim, 2 * key_dim), (step, step), channels, num_keys)
        return HeadLayout(channels, (key_dim, of_values), channels, num_keys)
    value_width = num_heads * value_dim
    num_keys = (len(mixer.conv1d.weight) - value_width) // (2 * key_dim)
    channels = value_width + num_keys * key_dim, value_width, 0  # after the gates
    first, second, third = (value_width + channel for channel in channels)
    return HeadLayout((first, second, third), (key_dim, value_width // num_keys), channels, num_keys)


def _mamba2(mixer: LibraryPart, x_BTE: Tensor, states: StateView) -> Tensor:
    projected = mixer.in_proj(x_BTE * mixer.ssm_in_multiplier if hasattr(mixer, "ssm_in_multiplier") else x_BTE)
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector
    num_heads, num_channels = len(mixer.A_log), len(mixer.conv1d.weight)
    value_width = num_heads * mixer.head_dim
    gates, mixed_BTC, times_BTH = projected.split([value_width, num_channels, num_heads], -1)
    if own := _own_kernels(mixer, states):
        layout, places = _layout_of(mixer), states.places(mixer.layer_idx)
        times = times_BTH.unflatten(-1, (layout.num_key_heads, -1))
        read_BTHP = own.recur(projected, times, None, layout, places, mixer=mixer, dtype=torch.float32)
    else:
        read_BTHP = _recurred_by_mamba2(mixer, _convolved(mixer, mixed_BTC, states), times_BTH, states)
    # Rows of tokens: the norms of some releases drop a dimension of one token.
    read_NC, gates_NC = read_BTHP.flatten(2).flatten(0, 1), gates.flatten(0, 1)
    has_norm = not isinstance(mixer.norm, nn.Identity)
    normed_NC = mixer.norm(read_NC, gates_NC) if has_norm else read_NC * functional.silu(gates_NC)
    mixed_BTE: Tensor = mixer.out_proj(normed_NC.to(x_BTE.dtype).unflatten(0, gates.shape[:2]))
    return mixed_BTE


def _recurred_by_mamba2(mixer: LibraryPart, mixed_BTC: Tensor, times_BTH: Tensor, states: StateView) -> Tensor:
    num_heads = len(mixer.A_log)
    value_width = num_heads * mixer.head_dim
    key_width = (mixed_BTC.shape[-1] - value_width) // 2
    values, keys, queries = mixed_BTC.split([value_width, key_width, key_width], -1)
    times_BTH = functional.softplus(times_BTH.float() + mixer.dt_bias.float()).clamp(*mixer.time_step_limit)
    queries, keys = (_by_heads(part, mixer.ssm_state_size, num_heads) for part in (queries, keys))
    values, times_BHT = _by_heads(values, mixer.head_dim, num_heads), times_BTH.transpose(1, 2)
    log_decays_BHT1 = (-mixer.A_log.float().exp()[:, None] * times_BHT)[..., None]
    read_BTHP = _recurred(mixer, Steps(queries, keys, values * times_BHT[..., None], log_decays_BHT1), states)
    skipped_BTHP: Tensor = values.transpose(1, 2) * mixer.D[:, None]
    return read_BTHP + skipped_BTHP


def _short_convolution(mixer: LibraryPart, x_BTE: Tensor, states: StateView) -> Tensor:
    inner, outer, values = mixer.in_proj(x_BTE).chunk(3, -1)
    mixed_BTE: Tensor = mixer.out_proj(outer * _convolved(mixer, inner * values, states))
    return mixed_BTE


def _own_kernels(mixer: LibraryPart, states: StateView) -> ModuleType | None:
    """Our kernels, if a layer has them and a forward keeps the states after all of its tokens."""
    return getattr(mixer, "own_kernels", None) if states.keeps_all else None


def use_own_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Let recurrent layers compute few tokens by the kernels of a device, if it has them; see `operators`."""
    mixers = [mixer for mixer in mixers_of(model) if getattr(mixer, "activation", "") == "silu"]
    if mixers:
        first, like = mixers[0], convolution_of(mixers[0]).weight
        found = operators.made(
            "recurrence",
            device.type,
            first,
            model.config.hidden_size,
            mix=mix_of(first),
            layer=state_of(first),
            like=like,
        )
        for mixer in mixers:  # layers of `accelerate` may be on other GPUs
            mixer.own_kernels = found if convolution_of(mixer).weight.device == like.device else None


def _convolved(mixer: LibraryPart, x_BTC: Tensor, states: StateView) -> Tensor:
    """Each channel's sum over the newest tokens, and its activation if it has one."""
    conv = convolution_of(mixer)
    x_BTC = states.with_inputs_before(mixer.layer_idx, x_BTC)
    y_BCT: Tensor = functional.conv1d(x_BTC.transpose(1, 2), conv.weight, conv.bias, groups=len(conv.weight))
    activation = getattr(mixer, "activation", None)
    return (ACT2FN[activation](y_BCT) if activation else y_BCT).transpose(1, 2)


def _recurred(mixer: LibraryPart, steps: Steps, states: StateView) -> Tensor:
    """Outputs (B, T, H, P) of the recurrence, whose states are kept."""
    number, takes_BT = mixer.layer_idx, states.takes.to(steps.keys.device)
    read_BHTP, kept = recur(states.state(number), steps.masked(takes_BT), keeps_all=states.keeps_all)
    states.keep(number, kept)
    return read_BHTP.transpose(1, 2)


def _by_heads(x_BTC: Tensor, width: int, num_heads: int) -> Tensor:
    """The parts of all heads (B, H, T, width) in fp32; heads may share a part."""
    x_BGTN: Tensor = x_BTC.unflatten(-1, (-1, width)).transpose(1, 2).float()
    return x_BGTN.repeat_interleave(num_heads // x_BGTN.shape[1], dim=1)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
