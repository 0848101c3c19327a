"""FlexCache as a child of vLLM's MultiConnector, beside other connectors.

MultiConnector gives each child a config of its own, while vLLM obeys MultiConnector's. It asks all
children about a request, takes the first that has something, and lets the request wait while any
of them does not know yet.
"""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


def read_transfer_config(vllm_config: Any) -> Any:
    """Return the `KVTransferConfig` that vLLM obeys; not the connector's own if it is a child.

    Must be called while the connector is being constructed: nothing in a child's config refers to
    the parent, which is the caller then.
    """
    transfer = vllm_config.kv_transfer_config
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if isinstance(caller, MultiConnector):
            transfer = caller._vllm_config.kv_transfer_config  # the outermost one counts
    return transfer


def is_among_siblings() -> bool:
    """Whether `MultiConnector` is asking, on behalf of all its children."""
    callers = (
        frame.f_locals.get("cls") for frame, _ in traceback.walk_stack(inspect.currentframe())
    )
    return any(isinstance(each, type) and issubclass(each, MultiConnector) for each in callers)


def is_served_by_sibling(request: Any) -> bool:
    """Return whether another connector brings the request's KV from the engine that computed it.

    False again once it has done so: a preempted request may be served by any connector.
    """
    params = getattr(request, "kv_transfer_params", None) or {}
    return bool(params.get("do_remote_prefill"))
