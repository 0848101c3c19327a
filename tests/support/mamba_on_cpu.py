"""Lets vLLM's Mamba-2 layers run on a CPU with prefix caching. Import before the engine starts.

They ask for states within a prefill, which the CPU's scan does not return.
"""

from __future__ import annotations

from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

MambaMixer2.get_kv_cache_spec = super(MambaMixer2, MambaMixer2).get_kv_cache_spec


class WholePrefills:
    """Adds nothing to a worker, but has it import this module before it loads the model."""
