"""Small random models with several pools that SGLang runs on a CPU."""

from __future__ import annotations

from typing import Any

import transformers

_configs: Any = transformers  # whose classes do not name all that they take
WINDOW = 64
_BASE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.2, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def windows() -> dict[str, Any]:
    """Return a model of sliding windows and full attention in turn, as arguments of an engine."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    kinds = ("sliding_attention", "full_attention")
    config = _configs.MellumConfig(
        **_BASE, head_dim=64, sliding_window=WINDOW, layer_types=[*kinds, *kinds],
        mlp_layer_types=["dense"] * 4, moe_intermediate_size=64, num_experts=2,
        num_experts_per_tok=1, rope_parameters=dict.fromkeys(kinds, rope),
    )  # fmt: skip
    return {"model": "sglang-windows", "config": config}


def states() -> dict[str, Any]:
    """Likewise of short convolutions, which keep a state, and full attention in turn."""
    config = _configs.Lfm2Config(
        **_BASE, conv_L_cache=3, conv_bias=False, layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    return {"model": "sglang-states", "config": config}
