"""Checks of what callers pass to `KVManager` and `KVTPClient`.

Each raises a `ValueError` that names the argument, its value and what is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from operator import index
from typing import Any

from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.values import split_address
from flexcache.errors import ConfigError
from flexcache.ids import TierName
from flexcache.protocol.messages import MAX_NAME_LENGTH, engine_name

_FOREVER_S = 1e9  # locks and sockets of the system overflow a little above
_MAX_RANKS = 65_536
_MAX_SHOWN = 100
_TIERS = tuple(tier.value for tier in TierName if tier is not TierName.GPU)


def refusal(name: str, value: object, allowed: str) -> ValueError:
    """Make the error that refuses an argument."""
    try:
        shown = repr(value)
    except Exception:  # an integer of too many digits, or a caller's own class
        shown = f"a value of type {type(value).__name__}"
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return ValueError(f"{name} = {shown}: {allowed}")


# -- of both -------------------------------------------------------------------------------------


def wait_s(timeout: float | None) -> float | None:
    """Return a ``timeout`` in seconds, 0 if its deadline has passed; None for no limit."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, (float, int, Real)) and not isinstance(timeout, bool)
    if not is_number or timeout != timeout:
        raise refusal("timeout", timeout, "must be None or a number of seconds")
    return max(timeout, 0.0) if timeout < _FOREVER_S else None


def positive(name: str, value: float) -> float:
    """Return a finite number above 0."""
    is_number = isinstance(value, (float, int, Real)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise refusal(name, value, "must be a finite number greater than 0")
    return float(value)


def check_flag(name: str, value: object) -> None:
    """Check that a switch is on or off."""
    if not isinstance(value, bool):
        raise refusal(name, value, "must be True or False")


def count_from(lowest: int, below: int, name: str, value: int, why: str = "") -> int:
    """Return an integer that is within bounds."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not lowest <= value < below:
        raise refusal(name, value, f"must be an integer, at least {lowest} and below {below}{why}")
    return int(value)


def _check_engine_id(engine_id: object, dp_rank: int) -> None:
    """Check that an engine of this id fits the messages in which it is named."""
    longest = MAX_NAME_LENGTH - len(engine_name("-", dp_rank)) + 1
    if not isinstance(engine_id, str) or len(engine_id) > longest:
        raise refusal("engine_id", engine_id, f"must be a string of at most {longest} characters")
    try:
        engine_id.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise refusal("engine_id", engine_id, error.reason) from None


def _check_endpoint_type(endpoint: object) -> None:
    if not isinstance(endpoint, str):
        raise refusal("endpoint", endpoint, "must be ipc://PATH or tcp://127.0.0.1:PORT")


# -- of a KVManager ------------------------------------------------------------------------------


def check_manager(
    model: object, config: object, endpoint: object, dp_rank: int, engine_id: object
) -> None:
    """Check what makes a `KVManager`.

    A group that shares an endpoint may have more ranks than its engines know of: vLLM tells each
    rank of a dense model that it is the only one.
    """
    for name, value, kind in (
        ("model_config", model, ModelConfig), ("cache_config", config, CacheConfig),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise ConfigError(f"{name}: must be a {kind.__name__}, not {type(value).__name__}")
    assert isinstance(model, ModelConfig) and isinstance(config, CacheConfig)
    if endpoint is not None:
        _check_endpoint_type(endpoint)
    is_shared = bool(endpoint or config.endpoint)
    size, why = model.dp_size, ", the model's dp_size"
    if is_shared and size == 1:
        size, why = _MAX_RANKS, ""
    _check_engine_id(engine_id, count_from(0, size, "dp_rank", dp_rank, why))


def ids_of(task_ids: Iterable[int]) -> list[int]:
    """Return task ids as plain integers, which messages can hold."""
    try:
        return list(map(index, task_ids))
    except TypeError:
        pass
    raise refusal("task_ids", task_ids, "must be a list of the integers that name tasks")


def check_tier(name: object) -> None:
    """Check that this is the name of a tier, if not one that the cache has."""
    if not isinstance(name, str) or name not in _TIERS:
        raise refusal("tier", name, f"must be one of {', '.join(_TIERS)}")


def check_look_up(look_up: object, awaits_loads: object) -> None:
    """Check how `KVManager.get_match_by_tier` is to look a prompt up."""
    if not isinstance(look_up, bool) and look_up != "only":
        raise refusal("look_up", look_up, "must be True, False or 'only'")
    check_flag("awaits_loads", awaits_loads)


# -- of a KVTPClient -----------------------------------------------------------------------------


def server_and_engine(endpoint: str, engine_id: str, dp_rank: int) -> tuple[str, str]:
    """Return the server's endpoint and the name of the engine there."""
    _check_endpoint_type(endpoint)
    dp_rank = count_from(0, _MAX_RANKS, "dp_rank", dp_rank)
    _check_engine_id(engine_id, dp_rank)
    endpoint, engine_id = split_address(endpoint, engine_id)
    _check_engine_id(engine_id, dp_rank)  # the one in the address
    return endpoint, engine_name(engine_id, dp_rank)


def place_of(rank: int | None, tp_rank: int) -> int:
    """Return a rank's place in its engine."""
    place = count_from(0, _MAX_RANKS, "tp_rank", tp_rank)
    return place if rank is None else count_from(0, _MAX_RANKS, "rank", rank)


def check_kv_caches(
    kv_caches: object, block_dim: object, description: object, num_blocks: Any,
    kv_replicas: int | None,
) -> None:  # fmt: skip
    """Check what describes KV tensors; `LentTensors` reads the tensors themselves."""
    if not isinstance(kv_caches, Mapping) or not all(isinstance(name, str) for name in kv_caches):
        shown = list(kv_caches) if isinstance(kv_caches, Mapping) else kv_caches
        raise refusal("kv_caches", shown, "must be a dict from names of layers to tensors")
    if not isinstance(block_dim, Integral) or isinstance(block_dim, bool):
        raise refusal("block_dim", block_dim, "must be the number of a dimension")
    if not isinstance(description, str):
        raise refusal("layout_description", description, "must be a string")
    counts = num_blocks if isinstance(num_blocks, (list, tuple)) else [num_blocks]
    for count in () if num_blocks is None else counts:
        count_from(1, 2**63, "num_blocks", count)
    if kv_replicas is not None:
        count_from(1, _MAX_RANKS, "kv_replicas", kv_replicas)
