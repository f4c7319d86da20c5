"""Recurrent layers of transformers on our states: gated delta rule, Mamba 2 and short convolutions.

A mixer keeps its modules; with our cache, its forward is the one of this module, which takes any number of tokens,
reads and keeps states by position, and passes over tokens that do not count. Without a cache it is the library's.

Shapes: B sequences, T tokens, E hidden size, C channels, H heads, N width of a key, P width of a value.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from llama_ssp.kernels.recurrence import Steps, recur
from llama_ssp.models.states import LayerState, StateView

_Mix = Callable[[Any, Tensor, StateView], Tensor]
_SAME_PARTS = ("norm", "o_norm"), ("out_proj", "o_proj")
"""Names of the norm and of the last product, in families of either kind."""


def adapt(model: PreTrainedModel) -> None:
    """Let every recurrent layer of a model compute by this module."""
    for mixer in mixers_of(model):
        mixer.forward = partial(_forward, mixer, mixer.forward)


def mixers_of(model: nn.Module) -> Iterator[Any]:
    """All recurrent layers, in order; those of a model that `adapt` has changed."""
    return (module for module in model.modules() if isinstance(_convolution_of(module), nn.Conv1d))


def state_of(mixer: Any) -> LayerState:  # noqa: ANN401 - of transformers
    """The sizes of a layer's state on this rank."""
    weight_C1W = _convolution_of(mixer).weight
    shape: tuple[int, ...] = ()
    if _is_delta(mixer):
        shape = (_num_heads(mixer), *_widths(mixer))
    elif hasattr(mixer, "ssm_state_size"):
        shape = (len(mixer.A_log), mixer.ssm_state_size, mixer.head_dim)
    return LayerState(mixer.layer_idx, len(weight_C1W), weight_C1W.shape[-1], shape, weight_C1W.device)


def shared_heads(mixer: Any) -> int:  # noqa: ANN401 - of transformers
    """Key heads of a delta rule, which ranks share; 0 for other layers."""
    return (getattr(mixer, "num_k_heads", 0) or mixer.num_heads) if _is_delta(mixer) else 0


def _is_delta(mixer: Any) -> bool:  # noqa: ANN401 - of transformers
    return hasattr(mixer, "head_v_dim") or hasattr(mixer, "forget_gate")


def _num_heads(mixer: Any) -> int:  # noqa: ANN401 - of transformers
    """Value heads of a delta rule on this rank."""
    return getattr(mixer, "num_v_heads", 0) or mixer.num_heads


def _widths(mixer: Any) -> tuple[int, int]:  # noqa: ANN401 - of transformers
    """The widths of a key and of a value of a delta rule."""
    return (mixer.head_k_dim, mixer.head_v_dim) if hasattr(mixer, "head_v_dim") else (mixer.head_dim,) * 2


def _convolution_of(mixer: Any) -> Any:  # noqa: ANN401 - of transformers
    return getattr(mixer, "conv1d", None) or getattr(mixer, "conv", None)


def _forward(mixer: Any, library: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    cache = options.pop("cache_params" if "cache_params" in options else "past_key_values", None)
    states: StateView | None = getattr(cache, "states", None)
    if states is None:
        return library(hidden_states, **options)
    mix: _Mix = _short_convolution
    if _is_delta(mixer):
        mix = _gated_delta
    elif hasattr(mixer, "ssm_state_size"):
        mix = _mamba2
    return mix(mixer, hidden_states, states)


def _gated_delta(mixer: Any, x_BTE: Tensor, states: StateView) -> Tensor:  # noqa: ANN401
    mixed_BTC, gates, rates, decays = _projected(mixer, x_BTE)
    mixed_BTC = _convolved(mixer, mixed_BTC, states)
    num_heads, (key_dim, value_dim) = _num_heads(mixer), _widths(mixer)
    key_width = (mixed_BTC.shape[-1] - num_heads * value_dim) // 2
    queries, keys, values = mixed_BTC.split([key_width, key_width, num_heads * value_dim], -1)
    queries, keys = (_normed(_by_heads(part, key_dim, num_heads)) for part in (queries, keys))
    if hasattr(mixer, "forget_gate"):
        log_decays_BTHD = mixer.forget_gate(x_BTE)
    else:
        log_decays_BTHD = -mixer.A_log.float().exp() * functional.softplus(decays.float() + mixer.dt_bias)
        log_decays_BTHD = log_decays_BTHD[..., None]
    rates = rates.sigmoid() * (2 if getattr(mixer, "allow_neg_eigval", False) else 1)
    steps = Steps(
        queries * key_dim**-0.5, keys, _by_heads(values, value_dim, num_heads),
        log_decays_BTHD.transpose(1, 2), rates.float().transpose(1, 2),
    )  # fmt: skip
    read_BTHP = _recurred(mixer, steps, states).to(x_BTE.dtype)
    norm, project = (getattr(mixer, new, None) or getattr(mixer, old) for new, old in _SAME_PARTS)
    mixed_BTE: Tensor = project(norm(read_BTHP.flatten(0, 2), gates.reshape(-1, value_dim)).view_as(read_BTHP).flatten(2))
    return mixed_BTE


def _projected(mixer: Any, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # noqa: ANN401
    """Inputs of the convolution, gates, and, before their functions, rates and decays, if no module makes these."""
    if hasattr(mixer, "in_proj_qkvz"):
        projected = mixer.in_proj_qkvz(x_BTE), mixer.in_proj_ba(x_BTE)
        *mixed, gates, rates, decays = mixer.fix_query_key_value_ordering(*projected)
        return torch.cat([part.flatten(2) for part in mixed], -1), gates, rates, decays
    if hasattr(mixer, "in_proj_qkv"):
        return mixer.in_proj_qkv(x_BTE), mixer.in_proj_z(x_BTE), mixer.in_proj_b(x_BTE), mixer.in_proj_a(x_BTE)
    mixed_BTC = torch.cat([mixer.q_proj(x_BTE), mixer.k_proj(x_BTE), mixer.v_proj(x_BTE)], -1)
    if hasattr(mixer, "forget_gate"):
        return mixed_BTC, mixer.g_b_proj(mixer.g_a_proj(x_BTE)), mixer.b_proj(x_BTE), None
    return mixed_BTC, mixer.g_proj(x_BTE), mixer.b_proj(x_BTE), mixer.a_proj(x_BTE)


def _mamba2(mixer: Any, x_BTE: Tensor, states: StateView) -> Tensor:  # noqa: ANN401
    projected = mixer.in_proj(x_BTE * getattr(mixer, "ssm_in_multiplier", 1.0))
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector
    num_heads, num_channels = len(mixer.A_log), len(mixer.conv1d.weight)
    value_width = num_heads * mixer.head_dim
    gates, mixed_BTC, times_BTH = projected.split([value_width, num_channels, num_heads], -1)
    mixed_BTC = _convolved(mixer, mixed_BTC, states)
    key_width = (num_channels - value_width) // 2
    values, keys, queries = mixed_BTC.split([value_width, key_width, key_width], -1)
    times_BTH = functional.softplus(times_BTH.float() + mixer.dt_bias.float()).clamp(*mixer.time_step_limit)
    queries, keys = (_by_heads(part, mixer.ssm_state_size, num_heads) for part in (queries, keys))
    values, times_BHT = _by_heads(values, mixer.head_dim, num_heads), times_BTH.transpose(1, 2)
    log_decays_BHT1 = (-mixer.A_log.float().exp()[:, None] * times_BHT)[..., None]
    read_BTHP = _recurred(mixer, Steps(queries, keys, values * times_BHT[..., None], log_decays_BHT1), states)
    read_BTC = (read_BTHP + values.transpose(1, 2) * mixer.D[:, None]).flatten(2)
    is_normed = not isinstance(mixer.norm, nn.Identity)
    read_BTC = mixer.norm(read_BTC, gates) if is_normed else read_BTC * functional.silu(gates)
    mixed_BTE: Tensor = mixer.out_proj(read_BTC.to(x_BTE.dtype))
    return mixed_BTE


def _short_convolution(mixer: Any, x_BTE: Tensor, states: StateView) -> Tensor:  # noqa: ANN401
    inner, outer, values = mixer.in_proj(x_BTE).chunk(3, -1)
    mixed_BTE: Tensor = mixer.out_proj(outer * _convolved(mixer, inner * values, states))
    return mixed_BTE


def _convolved(mixer: Any, x_BTC: Tensor, states: StateView) -> Tensor:  # noqa: ANN401
    """Each channel's sum over the newest tokens, and its activation if it has one."""
    conv = _convolution_of(mixer)
    x_BTC = states.with_inputs_before(mixer.layer_idx, x_BTC)
    y_BCT: Tensor = functional.conv1d(x_BTC.transpose(1, 2), conv.weight, conv.bias, groups=len(conv.weight))
    activation = getattr(mixer, "activation", None)
    return (ACT2FN[activation](y_BCT) if activation else y_BCT).transpose(1, 2)


def _recurred(mixer: Any, steps: Steps, states: StateView) -> Tensor:  # noqa: ANN401
    """Outputs (B, T, H, P) of the recurrence, whose states are kept."""
    number, takes_BT = mixer.layer_idx, states.takes_BT.to(steps.keys.device)
    read_BHTP, kept = recur(states.state(number), steps.masked(takes_BT), keeps_all=states.keeps_all)
    states.keep(number, kept)
    return read_BHTP.transpose(1, 2)


def _by_heads(x_BTC: Tensor, width: int, num_heads: int) -> Tensor:
    """The parts of all heads (B, H, T, width) in fp32; several heads may have one of them."""
    x_BGTN: Tensor = x_BTC.unflatten(-1, (-1, width)).transpose(1, 2).float()
    return x_BGTN.repeat_interleave(num_heads // x_BGTN.shape[1], dim=1)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
