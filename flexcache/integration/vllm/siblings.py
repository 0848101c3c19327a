"""FlexCache as a child of vLLM's MultiConnector, beside other connectors.

MultiConnector gives each child a config of its own, while vLLM obeys MultiConnector's. It asks all
children about a request, takes the first that has something, and lets the request wait while any
of them does not know yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from flexcache.errors import ConfigError
from flexcache.integration.vllm.callers import locals_of_callers

_NAME = "FlexCacheConnectorV1"


def read_transfer_config(vllm_config: Any) -> Any:
    """Return the `KVTransferConfig` that vLLM obeys; not the connector's own if it is a child.

    Must be called while the connector is being constructed: nothing in a child's config refers to
    the parent, which is the caller then.
    """
    transfer = vllm_config.kv_transfer_config
    for names in locals_of_callers():
        caller = names.get("self")
        if isinstance(caller, MultiConnector):
            transfer = caller._vllm_config.kv_transfer_config  # the outermost one counts
    return transfer


def check_no_twin(vllm_config: Any) -> None:
    """Refuse a second FlexCache in one engine. Must be called as `read_transfer_config`.

    Raises:
        ConfigError: There is one: both would have the same name, files and memory.
    """
    extra = read_transfer_config(vllm_config).kv_connector_extra_config
    count = _count_ours(extra.get("connectors", ()))
    if count > 1:
        raise ConfigError(
            f"kv_connector_extra_config.connectors: {_NAME} is there {count} times; an engine has "
            "one: leave out the others, and give that one all tiers"
        )


def _count_ours(connectors: Iterable[Any]) -> int:
    count = 0
    for child in connectors:
        count += child.get("kv_connector") == _NAME
        count += _count_ours((child.get("kv_connector_extra_config") or {}).get("connectors", ()))
    return count


def is_among_siblings() -> bool:
    """Whether `MultiConnector` is asking, on behalf of all its children."""
    classes = (names.get("cls") for names in locals_of_callers())
    return any(isinstance(each, type) and issubclass(each, MultiConnector) for each in classes)


def is_served_by_sibling(request: Any) -> bool:
    """Return whether another connector brings the request's KV from the engine that computed it.

    False again once it has done so: a preempted request may be served by any connector.
    """
    params = getattr(request, "kv_transfer_params", None) or {}
    return bool(params.get("do_remote_prefill"))
