"""Where an engine's cache is: in its own process, or at a server that it shares."""

from __future__ import annotations

from flexcache.client.client import EngineClient
from flexcache.client.local import LocalTransport
from flexcache.client.remote import RemoteTransport
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.values import server_of
from flexcache.protocol.names import engine_name, new_engine_id
from flexcache.protocol.runtime import check_endpoint, private_endpoint

_OTHERS_START_AFTER_S = 5.0


def local_endpoint(engine_id: str) -> str:
    """Where the ranks of an engine that keeps its own cache find it."""
    return private_endpoint(f"engine-{engine_id}" if engine_id else None)


def open_client(
    model: ModelConfig, config: CacheConfig, address: str | None, engine_id: str, dp_rank: int
) -> tuple[EngineClient, str]:
    """A client that is not started yet, and the engine id it goes by.

    The cache is shared if there is an ``address`` or more than one data-parallel rank.
    """
    if address is None and model.dp_size == 1:
        name = engine_name(engine_id, dp_rank)
        local = LocalTransport(local_endpoint(engine_id), model, config, name)
        return EngineClient(local, model.num_ranks), engine_id
    if address is None:
        group = engine_id or model.fingerprint(config.tokens_per_block)
        endpoint = private_endpoint(f"group-{group}")
    else:
        endpoint = server_of(address)
    check_endpoint(endpoint, has_keys=config.curve_keys is not None)
    engine_id = engine_id or new_engine_id()
    name = engine_name(engine_id, dp_rank)
    patience_s = 0.0 if dp_rank == 0 else _OTHERS_START_AFTER_S
    remote = RemoteTransport(endpoint, model, config, name, patience_s)
    return EngineClient(remote, model.num_ranks), engine_id
