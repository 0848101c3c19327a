"""Which greetings a server refuses by themselves, whatever else is connected."""

from __future__ import annotations

from collections import Counter

import msgspec

from flexcache.cache.prompt import MAX_VERSION_LENGTH
from flexcache.protocol.messages import (
    PROTOCOL_VERSION,
    Greeting,
    HelloEngine,
    HelloRank,
    Refused,
)
from flexcache.protocol.names import MAX_NAME_LENGTH, is_anonymous
from flexcache.server.guard import Buffer
from flexcache.storage.shards import Shards

_MAX_GENERATION = 1 << 62  # each change adds one, and it has to fit into 64 bits
_decoder = msgspec.msgpack.Decoder(Greeting)


def malformed_greeting(hello: HelloRank | HelloEngine) -> str | None:
    """What makes a greeting malformed."""
    if len(hello.engine) > MAX_NAME_LENGTH or len(hello.client) > MAX_NAME_LENGTH:
        return "a name is too long"
    if isinstance(hello, HelloEngine):
        weights = hello.weights
        if not 0 <= hello.heard <= weights.generation <= _MAX_GENERATION:
            return f"its weights are of generation {weights.generation}, it heard of {hello.heard}"
        if len(weights.version) > MAX_VERSION_LENGTH:
            return "the version of its weights is too long"
    return None


def misplaced(hello: HelloRank, shards: Shards) -> str | None:
    """Why a rank has no place among those that share a cache."""
    place = f"rank {hello.rank} of engine {hello.engine!r}"
    if not 0 <= hello.rank < shards.num_ranks:
        return f"{place} is not below the number of ranks, {shards.num_ranks}"
    if hello.kv_replicas % shards.num_replicas:
        return (
            f"{place} says that {hello.kv_replicas} ranks hold the same KV, but the engine's "
            f"scheduler that {shards.num_replicas} do"
        )
    return None


def refuse_version(version: int, counters: Counter[str]) -> Refused | None:
    """The answer to a client of another protocol version."""
    if version == PROTOCOL_VERSION:
        return None
    counters["rejected_version"] += 1
    return Refused(
        f"the client speaks protocol {version}, the server {PROTOCOL_VERSION}: run the same "
        "FlexCache version on both sides"
    )


def refuse_undecodable(frame: Buffer, counters: Counter[str]) -> Refused | None:
    """The answer to a frame that cannot be decoded, if it is a greeting of another version."""
    try:
        greeting = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not greeting.type.startswith("Hello"):
        return None
    return refuse_version(greeting.version, counters)


def name_problem(hello: HelloRank | HelloEngine, owner: str | None) -> str | None:
    """Why the engine's name is impossible here."""
    if owner is None and is_anonymous(hello.engine):
        return (
            "the client names no engine, and several share this server: connect to the "
            "KVManager.endpoint of its engine, or give KVManager and its KVTPClients the same "
            "engine_id"
        )
    if owner is not None and isinstance(hello, HelloRank) and hello.engine != owner:
        return (
            f"this cache is engine {owner!r}'s alone, the client says {hello.engine!r}: "
            "connect to the KVManager.endpoint of its engine, with the same dp_rank"
        )
    return None


def namespace_problem(hello: HelloRank | HelloEngine, ours: int) -> str | None:
    """Why the client could not open the server's memory, which it finds by the process's id."""
    theirs = hello.pid_namespace
    if not theirs or not ours or theirs == ours:
        return None
    return (
        f"the client runs in pid namespace {theirs}, the server in {ours}: run both in one (docker "
        "run --pid=host, or --pid=container:NAME; Kubernetes: shareProcessNamespace or hostPID)"
    )
