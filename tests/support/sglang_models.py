"""Small random models with several pools that SGLang runs on a CPU, and models with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from make_models import make_draft, make_model
from paths import MODELS
from safetensors.torch import load_file, save_file

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


def drafting(algorithm: str, directory: str) -> dict[str, Any]:
    """Likewise of a model with a draft of three tokens.

    Args:
        algorithm: "STANDALONE": the draft is the model itself, of which much is accepted.
            "EAGLE": a layer that takes the model's hidden states. "NEXTN": one in the model's
            checkpoint.
        directory: Where checkpoints may be written.
    """
    path = MODELS / "tiny"
    if algorithm == "STANDALONE":
        draft = path
    elif algorithm == "EAGLE":
        draft = _eagle(Path(directory) / "eagle")
    else:
        draft = path = _mtp(Path(directory) / "mtp")
    make_model(MODELS, "tiny")
    return {
        "path": str(path), "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft), "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
        # What SGLang drafts and verifies with on a CPU, in tests by the functions in `sgl_kernel`.
        "decode_attention_backend": "intel_amx", "speculative_attention_mode": "decode",
        "speculative_draft_attention_backend": "intel_amx",
    }  # fmt: skip


def _eagle(target: Path) -> Path:
    """Write the draft of the other engine's tests, by SGLang's names."""
    draft = make_draft(MODELS)
    weights = load_file(draft / "model.safetensors")
    size = weights["fc.weight"].shape[0]
    bias = torch.zeros(size, dtype=torch.bfloat16)
    return _write(draft, target, "LlamaForCausalLMEagle", {**weights, "fc.bias": bias})


def _mtp(target: Path) -> Path:
    """Write a model with a layer that predicts the token after the next one (MiMo)."""
    config = _configs.Qwen2Config(**{**_BASE, "num_hidden_layers": 2})
    model = make_model(MODELS, "sglang-qwen2", config)
    weights = load_file(model / "model.safetensors")
    layer = {
        name.replace("model.layers.1.", "model.mtp_layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith("model.layers.1.")
    }
    size = config.hidden_size
    torch.manual_seed(1)
    joint = torch.randn(size, 2 * size, dtype=torch.bfloat16) / size**0.5
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    parts = {f"{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name in norms}
    parts["input_proj.weight"] = joint
    layer.update({f"model.mtp_layers.0.{name}": part for name, part in parts.items()})
    config_fields = {"num_nextn_predict_layers": 1}
    return _write(model, target, "MiMoForCausalLM", {**weights, **layer}, **config_fields)


def _write(
    source: Path, target: Path, architecture: str, weights: dict[str, torch.Tensor], **fields: Any
) -> Path:
    """Write a checkpoint with the settings of another one."""
    target.mkdir()
    for part in source.glob("*.json"):
        (target / part.name).write_bytes(part.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config.update(architectures=[architecture], **fields)
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors")
    return target
