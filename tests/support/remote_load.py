"""A cache with a remote store under a load that checks every byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster import Cluster, running_cluster, until
from load import LoadEngine, make_kv, make_model

SETTINGS: dict[str, Any] = {
    "num_cpu_blocks": 192,  # an eighth of it less, a quarter of the rest may wait for the store
    "server_timeout_s": 6.0,
    "remote_lookup_timeout_s": 2.0,  # a busy machine is no slow store
    "skip_slow_loads": False,
}


def breaker(cluster: Cluster) -> str:
    return str(cluster.manager.stats()["remote"]["breaker"]["state"])


def remote(cluster: Cluster, counter: str) -> int:
    return int(cluster.manager.stats()["tiers"]["REMOTE"][counter])


class Loaded:
    """A cache of 128 blocks under a load of 700, each byte of which is checked."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.engine = LoadEngine(cluster.manager, cluster.kv[0], seed, cluster.clients[0])

    def work_until(self, condition: str) -> None:
        def is_so() -> bool:
            self.engine.step()
            return breaker(self.cluster) == condition

        until(is_so)

    def work_until_it_grows(self, *counters: str) -> None:
        """Work until the store has supplied blocks again."""
        before = {name: remote(self.cluster, name) for name in counters}

        def has_grown() -> bool:
            self.engine.step()
            return all(remote(self.cluster, name) > before[name] for name in counters)

        until(has_grown)


@contextmanager
def under_load(url: str) -> Iterator[Loaded]:
    with running_cluster(
        model=make_model(dp_size=1), make_kv=lambda model, _: make_kv(model),
        remote_url=url, transfer_chunk_mb=1, **{**SETTINGS, "num_cpu_blocks": 128},
    ) as cluster:  # fmt: skip
        yield Loaded(cluster, seed=7)
        until(lambda: not any(cluster.manager.stats()["tasks"][s] for s in ("ready", "running")))
        assert cluster.num_leased() == 0
