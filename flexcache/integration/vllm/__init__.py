"""FlexCache's KV connector for vLLM: ``kv_connector_module_path="flexcache.integration.vllm"``."""

import contextlib

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from flexcache.integration.vllm.connector import FlexCacheConnectorV1
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "vllm":
        raise
    from flexcache.errors import MissingDependencyError

    raise MissingDependencyError(
        "flexcache.integration.vllm needs vLLM 0.28 to 0.33 (extra vllm)"
    ) from error

with contextlib.suppress(ValueError):  # there already
    # MultiConnector finds the classes that its children's statistics belong to by their names.
    KVConnectorFactory.register_connector("FlexCacheConnectorV1", __name__, "FlexCacheConnectorV1")

__all__ = ["FlexCacheConnectorV1"]
