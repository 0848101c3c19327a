"""KV of one layout is never mistaken for KV of another, wherever and however long it is kept."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster, heads_first_kv, joined_kv, load_by_layer, running_cluster
from engine_memory import EngineMemory
from stores import missing, s3_server
from test_faults import until
from test_remote_tier import until_it_stores

from flexcache import CacheConfig, KVManager, KVStatus, KVTPClient, ModelConfig
from flexcache.errors import RegistrationError
from flexcache.protocol.endpoints import is_served, private_endpoint
from flexcache.storage.pool_directory import PoolDirectory

MODEL = ModelConfig("test", 3, 4, 32, torch.bfloat16)
TOKENS = np.arange(24 * 16)
BLOCKS = list(range(24))
NHD = r"3xbfloat16\[2@1\]\[16@2\]\[4@3\]\[32@4\]"
HND = r"3xbfloat16\[2@1\]\[4@2\]\[16@3\]\[32@4\]"
STORE: dict[str, Any] = {
    "remote_lookup_timeout_s": 30.0, "remote_timeout_s": 30.0, "server_timeout_s": 120.0,
    "skip_slow_loads": False, "num_cpu_blocks": 192,
}  # fmt: skip


@contextmanager
def cluster_at_store(**settings: Any) -> Iterator[Cluster]:
    """Run a cluster whose remote tier takes part."""
    with running_cluster(**{**STORE, **settings}) as cluster:
        until_it_stores(cluster)
        yield cluster


def put_and_get_back(cluster: Cluster) -> list[bytes]:
    expected = cluster.read(BLOCKS)
    assert cluster.put(TOKENS, BLOCKS).mask.all()
    get_back(cluster, expected)
    return expected


def get_back(cluster: Cluster, expected: list[bytes]) -> None:
    cluster.wipe(BLOCKS)
    assert cluster.get(TOKENS, BLOCKS).mask.all()
    assert cluster.read(BLOCKS) == expected


def test_a_directory_of_another_layout_is_refused_with_both_named_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    with running_cluster([tmp_path], model=MODEL) as cluster:
        expected = put_and_get_back(cluster)
    with (
        pytest.raises(RegistrationError, match=rf"24 blocks .*{NHD}.*this engine.*{HND}"),
        running_cluster([tmp_path], model=MODEL, make_kv=heads_first_kv),
    ):
        pass
    with running_cluster([tmp_path], model=MODEL) as cluster:
        get_back(cluster, expected)


def test_an_engine_whose_layout_was_refused_hits_nothing(tmp_path: Path) -> None:
    with running_cluster([tmp_path], model=MODEL) as cluster:
        put_and_get_back(cluster)
    config = CacheConfig(num_cpu_blocks=48, num_ssd_blocks=96, ssd_cache_dirs=[str(tmp_path)])
    cluster = Cluster(MODEL, config, heads_first_kv)
    try:
        with pytest.raises(RegistrationError):
            cluster.start()
        before = cluster.read(BLOCKS)
        assert cluster.get(TOKENS, BLOCKS).status is not KVStatus.SUCCESS
        assert cluster.read(BLOCKS) == before
        assert cluster.put(TOKENS, BLOCKS).status is not KVStatus.SUCCESS
        cluster.manager.check()
    finally:
        cluster.stop()


def test_a_directory_of_another_layout_is_cleared_where_that_was_asked_for(tmp_path: Path) -> None:
    with running_cluster([tmp_path], model=MODEL) as cluster:
        put_and_get_back(cluster)
    clear = {"make_kv": heads_first_kv, "ssd_on_mismatch": "clear"}
    with running_cluster([tmp_path], model=MODEL, **clear) as cluster:  # type: ignore[arg-type]
        assert not cluster.manager.get_match(TOKENS)[1].any()
        ssd = cluster.manager.stats()["tiers"]["SSD"]
        until(lambda: cluster.manager.stats()["tiers"]["SSD"]["free"] == ssd["capacity"])
        expected = put_and_get_back(cluster)
    with running_cluster([tmp_path], model=MODEL, make_kv=heads_first_kv) as cluster:
        get_back(cluster, expected)
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 24


def test_another_model_of_another_layout_shares_the_directory_and_no_block(tmp_path: Path) -> None:
    with running_cluster([tmp_path], model=MODEL) as cluster:
        expected = put_and_get_back(cluster)
    other = ModelConfig("another", 3, 4, 32, torch.bfloat16)
    with running_cluster([tmp_path], model=other, make_kv=heads_first_kv) as cluster:
        assert not cluster.manager.get_match(TOKENS)[1].any()
        put_and_get_back(cluster)
    with running_cluster([tmp_path], model=MODEL) as cluster:
        get_back(cluster, expected)


@pytest.fixture(
    params=[
        "file",
        pytest.param("s3", marks=pytest.mark.skipif(bool(missing("obstore", "weed")), reason="s3")),
    ]
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "file":
        with tempfile.TemporaryDirectory(prefix="fc-store-") as directory:
            yield f"file://{directory}"
    else:
        with s3_server() as server:
            yield server.url


@pytest.mark.whole
def test_a_store_keeps_the_blocks_of_each_layout_apart(url: str) -> None:
    settings: dict[str, Any] = {"model": MODEL, "remote_url": url}
    with cluster_at_store(**settings) as cluster:
        tokens_first = put_and_get_back(cluster)
    with cluster_at_store(make_kv=heads_first_kv, **settings) as cluster:
        assert not cluster.manager.get_match(TOKENS)[1].any()
        heads_first = put_and_get_back(cluster)
    for make_kv, expected in ((joined_kv, tokens_first), (heads_first_kv, heads_first)):
        with cluster_at_store(make_kv=make_kv, **settings) as cluster:
            get_back(cluster, expected)
            assert cluster.manager.stats()["engine"]["hit_blocks"] == {"REMOTE": 24}


def square_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    """Make tensors with as many heads as tokens, so that shapes do not show which is which."""
    assert model.num_kv_heads == tokens
    return joined_kv(model, tokens)


def test_the_engines_description_distinguishes_layouts_of_equal_shape(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": ModelConfig("square", 2, 16, 8, torch.bfloat16),
        "make_kv": square_kv,
        "remote_url": f"file://{tmp_path}",
    }
    with cluster_at_store(layout_description="NHD", **settings) as cluster:
        expected = put_and_get_back(cluster)
    with cluster_at_store(layout_description="HND", **settings) as cluster:
        assert not cluster.manager.get_match(TOKENS)[1].any()
    with cluster_at_store(layout_description="NHD", **settings) as cluster:
        get_back(cluster, expected)


def kv_in(order: str) -> Callable[[ModelConfig, int], dict[str, torch.Tensor]]:
    """Make tensors shaped as `joined_kv`'s, views of one buffer with its dimensions in this order:
    layers, blocks, K and V, tokens, heads, content."""

    def make_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
        apart = joined_kv(model, tokens)
        logical = torch.stack(list(apart.values()))
        places = ["LBKNHC".index(dim) for dim in order]
        buffer = logical.permute(places).contiguous()
        views = buffer.permute([order.index(dim) for dim in "LBKNHC"])
        return dict(zip(apart, views.unbind(0), strict=True))

    return make_kv


@pytest.mark.parametrize(
    "order",
    [
        "BHLKNC",
        pytest.param("BLKNHC", marks=pytest.mark.whole),
        pytest.param("BLKHNC", marks=pytest.mark.whole),
    ],
)
def test_blocks_in_one_piece_come_back_from_every_tier_and_by_layer(
    order: str, memory: EngineMemory, tmp_path: Path
) -> None:
    blocks = BLOCKS[:12]
    with running_cluster([tmp_path], make_kv=kv_in(order), memory=memory) as cluster:
        tokens, expected = TOKENS[: 12 * 16], cluster.read(blocks)
        assert cluster.put(tokens, blocks).mask.all()
        for tier in ("CPU", "SSD"):
            cluster.wipe(blocks)
            if tier == "SSD":
                cluster.manager.clear("CPU")
            assert cluster.get(tokens, blocks[::-1]).mask.all()
            assert cluster.read(blocks[::-1]) == expected
        cluster.wipe(blocks)
        assert load_by_layer(cluster, tokens, blocks) == expected


def test_blocks_in_one_piece_are_those_of_layers_apart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": MODEL, "remote_url": f"file://{tmp_path}"}
    with cluster_at_store(**settings) as cluster:
        expected = put_and_get_back(cluster)
    with cluster_at_store(make_kv=kv_in("BLKNHC"), **settings) as cluster:
        get_back(cluster, expected)
    with cluster_at_store(make_kv=kv_in("BLKHNC"), **settings) as cluster:
        assert not cluster.manager.get_match(TOKENS)[1].any()


def reversed_kv(model: ModelConfig, tokens: int) -> dict[str, torch.Tensor]:
    return dict(reversed(joined_kv(model, tokens).items()))


def test_layers_in_another_order_are_another_layout(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": MODEL, "remote_url": f"file://{tmp_path}"}
    with cluster_at_store(**settings) as cluster:
        put_and_get_back(cluster)
    with cluster_at_store(make_kv=reversed_kv, **settings) as cluster:
        assert not cluster.manager.get_match(TOKENS)[1].any()


class Engine:
    """An engine at a shared server."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        make_kv: Callable[[ModelConfig, int], dict[str, torch.Tensor]],
    ) -> None:
        config = CacheConfig(num_cpu_blocks=64, endpoint=endpoint)
        self.manager = KVManager(MODEL, config, engine_id=name)
        self.manager.start()
        self.client = KVTPClient(self.manager.endpoint, engine_id=name)
        self.client.register_kv_caches(make_kv(MODEL, 16))

    def close(self) -> None:
        self.client.close()
        self.manager.shutdown()


@contextmanager
def engines_of_two_layouts() -> Iterator[tuple[Engine, Engine]]:
    """Run two engines at one server; the second was refused because the first serves."""
    endpoint = private_endpoint("layouts")
    one = Engine(endpoint, "one", joined_kv)
    try:
        one.manager.wait_ready(60)
        two = Engine(endpoint, "two", heads_first_kv)
        try:
            with pytest.raises(RegistrationError, match=rf"{HND}.* differs .*{NHD}"):
                two.manager.wait_ready(60)
            yield one, two
        finally:
            two.close()
    finally:
        one.close()
        until(lambda: not is_served(endpoint))


def stores(engine: Engine) -> bool:
    task, _ = engine.manager.put_async(TOKENS, np.arange(len(TOKENS)))
    return engine.manager.wait([task], 60)[task].status is KVStatus.SUCCESS


def test_engines_of_one_server_agree_on_a_layout() -> None:
    with engines_of_two_layouts() as (one, two):
        two.close()
        assert stores(one)


def test_an_engine_of_another_layout_is_served_once_the_others_have_left() -> None:
    with engines_of_two_layouts() as (one, two):
        one.client.close()
        until(two.manager.is_ready)
        assert stores(two)


def test_a_header_that_cannot_be_written_costs_no_rank_and_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with running_cluster([tmp_path], model=MODEL) as cluster:
        put_and_get_back(cluster)
    monkeypatch.setattr(PoolDirectory, "adopt", fail)
    clear = {"make_kv": heads_first_kv, "ssd_on_mismatch": "clear"}
    with running_cluster([tmp_path], model=MODEL, **clear) as cluster:  # type: ignore[arg-type]
        assert "ssd_layout_not_recorded" in caplog.text
        until(lambda: cluster.manager.stats()["tiers"]["SSD"]["free"] == 96)
        put_and_get_back(cluster)
        assert cluster.manager.stats()["tiers"]["SSD"]["indexed"] == 24


def test_a_rank_that_left_does_not_keep_out_a_rank_of_another_layout() -> None:
    with running_cluster(model=MODEL) as cluster:
        tokens_first = put_and_get_back(cluster)
        tokens_first_kv = cluster.kv[0]
        pending, _ = cluster.manager.get_match(TOKENS)
        cluster.clients.pop().close()

        cluster.kv[0] = heads_first_kv(MODEL, 16)
        cluster.add_client(0, cluster.kv[0]).wait_registered(60)
        before = cluster.read(BLOCKS)
        cluster.manager.launch([pending], [cluster.slots(BLOCKS)])
        assert cluster.manager.wait([pending], 60)[pending].status is KVStatus.CANCELLED
        assert not cluster.manager.get_match(TOKENS)[1].any()
        assert cluster.read(BLOCKS) == before
        heads_first = cluster.read(BLOCKS)
        assert cluster.put(TOKENS, BLOCKS).mask.all()
        get_back(cluster, heads_first)

        cluster.clients.pop().close()
        cluster.kv[0] = tokens_first_kv
        cluster.add_client(0, tokens_first_kv).wait_registered(60)
        cluster.wipe(BLOCKS)
        found = int(cluster.get(TOKENS, BLOCKS).mask.sum()) // 16
        wanted = [
            data
            for layer in range(MODEL.num_layers)
            for data in tokens_first[layer * 24 : layer * 24 + found]
        ]
        assert cluster.read(BLOCKS[:found]) == wanted
