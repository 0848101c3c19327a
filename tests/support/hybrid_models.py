"""Configurations of small random models with several kinds of KV cache, for `make_models`.

Weights are large and embeddings untied, so that the output depends on every token of the context.
"""

from __future__ import annotations

from typing import Any

import transformers

_configs: Any = transformers  # whose classes do not name all that they take
_IDS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_BASE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "tie_word_embeddings": False, "dtype": "bfloat16", **_IDS,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 64,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64,
}  # fmt: skip
_WINDOW, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def hybrid_configs() -> dict[str, transformers.PretrainedConfig]:
    return {
        # Two layers with a sliding window to one of full attention.
        "gemma3": _configs.Gemma3TextConfig(
            num_hidden_layers=6, head_dim=64, sliding_window=256, query_pre_attn_scalar=64,
            layer_types=[_WINDOW, _WINDOW, _FULL] * 2, **_BASE,
        ),
        # Attention sinks; sliding window and full attention in turn; experts.
        "gptoss": _configs.GptOssConfig(
            **{**_BASE, "intermediate_size": 256}, num_hidden_layers=4, head_dim=64,
            sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
            layer_types=[_WINDOW, _FULL] * 2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
            },
        ),
        # Three layers of chunked local attention to one of full attention; experts.
        "llama4": _configs.Llama4TextConfig(
            **_BASE, num_hidden_layers=4, head_dim=64, intermediate_size_mlp=512,
            attention_chunk_size=256, num_local_experts=2, num_experts_per_tok=1,
            interleave_moe_layer_step=1, no_rope_layers=[1, 1, 1, 0],
            layer_types=["chunked_attention"] * 3 + [_FULL],
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
        # States only.
        "mamba2": _configs.Mamba2Config(
            hidden_size=256, num_hidden_layers=4, num_heads=8, head_dim=64, expand=2,
            state_size=64, n_groups=2, chunk_size=64, initializer_range=0.2,
            tie_word_embeddings=False, dtype="bfloat16", **_IDS,
        ),
        # States (Mamba-2) and full attention.
        "granite4": _configs.GraniteMoeHybridConfig(
            **_BASE, **_MAMBA2, num_hidden_layers=4, layer_types=["mamba", "attention"] * 2,
            num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=256,
        ),
        "nemotronh": _configs.NemotronHConfig(
            **_BASE, head_dim=64, layers_block_type=["mamba", "mlp", "attention", "mlp"] * 2,
            mamba_num_heads=8, mamba_head_dim=64, n_groups=2, ssm_state_size=64, conv_kernel=4,
            expand=2, chunk_size=64,
        ),
        "falconh1": _configs.FalconH1Config(
            **_BASE, **_MAMBA2, head_dim=64, num_hidden_layers=4, mamba_d_ssm=512
        ),
        # States (gated DeltaNet) and full attention; experts.
        "qwen3next": _configs.Qwen3NextConfig(
            **_BASE, head_dim=64, num_hidden_layers=4, layer_types=[_LINEAR, _FULL] * 2,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
            linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=128,
            shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
        ),
    }  # fmt: skip
