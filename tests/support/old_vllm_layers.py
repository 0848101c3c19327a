"""One tensor for all layers, as vLLM before 0.32 makes it; to be run with such a vLLM.

An attention backend decides the order of its memory, here Triton's, and nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from flexcache.integration.vllm.engine import preferred_layout, prefers_one_tensor, split_layers
from flexcache.storage.layout import bytes_per_block, describe_kv_caches

NUM_LAYERS, NUM_BLOCKS = 3, 4


def main() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    size = NUM_BLOCKS * spec.page_size_bytes
    names = [f"layer {i}" for i in range(NUM_LAYERS)]
    config = SimpleNamespace(
        kv_cache_tensors=[KVCacheTensor(size=size, shared_by=[name]) for name in names]
    )
    group = SimpleNamespace(kv_cache_spec=spec, backend=TritonAttentionBackend)
    vllm_config = VllmConfig()
    with set_current_vllm_config(vllm_config):
        theirs, whole, backend = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
            config, [[group]], "auto", torch.device("cpu"), [16]
        )
    ours = split_layers(whole, backend, vllm_config, config)
    assert list(ours) == list(theirs)
    for name, layer in ours.items():
        other = theirs[name]
        assert (layer.data_ptr(), layer.shape, layer.stride()) == (
            other.data_ptr(), other.shape, other.stride(),
        )  # fmt: skip
    layout = describe_kv_caches(ours, bytes_per_block(ours, NUM_BLOCKS), 0, "", NUM_BLOCKS)
    apart = {name: layer.clone(memory_format=torch.preserve_format) for name, layer in ours.items()}
    other = describe_kv_caches(apart, bytes_per_block(apart, NUM_BLOCKS), 0, "", NUM_BLOCKS)
    assert (len(layout.sizes), len(other.sizes)) == (1, NUM_LAYERS)
    assert layout.signature == other.signature

    vllm_config.model_config = SimpleNamespace(is_hybrid=False)
    assert preferred_layout(vllm_config) is None
    assert not prefers_one_tensor(vllm_config)  # on a CPU
    with patch.object(type(current_platform), "is_cuda_alike", lambda _: True):
        assert prefers_one_tensor(vllm_config)
        vllm_config.cache_config.user_specified_block_size = True
        assert not prefers_one_tensor(vllm_config)
    print("as expected")


if __name__ == "__main__":
    main()
