"""Short convolutions for SGLang on a CPU, where its kernels are Triton's: a plugin of SGLang.

With these, models whose layers keep the inputs of a convolution as their state (LFM2) run.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

_LOOKED_UP = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")
"""Kernels for other models, which are not called."""


def install() -> None:
    """Put the functions in the kernels' places."""
    from sglang.srt.layers.attention.mamba import causal_conv1d

    for name in _LOOKED_UP:
        torch.library.define(f"sgl_kernel::{name}", "() -> ()")
    causal_conv1d._causal_conv1d_fn_triton = prefill
    causal_conv1d._causal_conv1d_update_triton = decode


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    **options: object,
) -> torch.Tensor:
    """Convolve several sequences ``[channel, token]``, each behind its state, which is updated."""
    result = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        state = conv_states[int(cache_indices[number])]
        before = state if bool(has_initial_state[number]) else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, start:stop]], dim=1)
        result[:, start:stop] = functional.conv1d(
            inputs[None].float(), weight[:, None].float(), bias, groups=x.shape[0]
        )[0].to(x.dtype)
        state.copy_(inputs[:, -state.shape[1] :].clone())
    return result


def decode(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    conv_state_indices: Any = None,
    **options: object,
) -> torch.Tensor:
    """Convolve one token ``[sequence, channel]`` of each sequence."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots], x[:, :, None]], dim=2)
    conv_state[slots] = inputs[:, :, 1:]
    return (inputs.float() * weight.float()).sum(-1).to(x.dtype)
