"""FlexCache's KV cache connector for TensorRT-LLM 1.2 and later.

``kv_connector_config``: ``connector_module="flexcache.integration.tensorrt_llm"``,
``connector_scheduler_class="FlexCacheConnectorScheduler"``,
``connector_worker_class="FlexCacheConnectorWorker"``.
"""

try:
    from flexcache.integration.tensorrt_llm.scheduler import FlexCacheConnectorScheduler
    from flexcache.integration.tensorrt_llm.worker import FlexCacheConnectorWorker
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "tensorrt_llm":
        raise
    from flexcache.errors import MissingDependencyError

    raise MissingDependencyError(
        "flexcache.integration.tensorrt_llm needs TensorRT-LLM 1.2 or later"
    ) from error

__all__ = ["FlexCacheConnectorScheduler", "FlexCacheConnectorWorker"]
