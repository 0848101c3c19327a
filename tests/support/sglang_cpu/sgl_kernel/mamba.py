"""Stands in for SGLang's compiled kernels for Mamba, which it imports on a CPU whatever the model.

`short_conv_on_cpu` has those that a model of the tests calls.
"""

from __future__ import annotations

from sgl_kernel import __getattr__  # noqa: F401
