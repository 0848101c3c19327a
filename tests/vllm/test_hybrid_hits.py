"""Hits in models with windows and states: where prompts part, and behind what the GPU has left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driven_engine import running
from engines import make_prompt
from probe_connector import compare_probes
from test_group_engines import SAME_STATES, assert_all_free, engine_of
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from flexcache.config import CacheConfig
from flexcache.config.model import KVGroup
from flexcache.ids import TierName
from flexcache.integration.adapter import LayerwiseRule
from flexcache.integration.vllm.calls import Get
from flexcache.integration.vllm.connector import FlexCacheConnectorV1
from flexcache.integration.vllm.gets import Gets
from flexcache.integration.vllm.groups import TELLS_GROUPS, BlockTables
from flexcache.integration.vllm.weights import Names

pytestmark = pytest.mark.skipif(not TELLS_GROUPS, reason="this vLLM keeps one group only")
POSITION = 32
FULL = KVGroup("full", POSITION)
STATE = KVGroup("state", POSITION)
WINDOW = KVGroup("window", POSITION, 2 * POSITION)


class Lookups:
    """vLLM's scheduler as it looks a request up, beside a cache with a tail at ``tail``.

    Args:
        hits: Tokens that each group has on the GPU.
        num_shared: Tokens of the prompt that the cache has.
    """

    def __init__(
        self, *groups: KVGroup, hits: tuple[int, ...] = (0, 0), tail: int = 0, num_shared: int = 0,
        has_siblings: bool = False,
    ) -> None:  # fmt: skip
        self.tail, self.num_shared = tail, num_shared
        self.asked: list[int] = []
        self.names = Names(lambda: 0, can_lose_loads=True)
        cache = SimpleNamespace(names=self.names, match=self._match, cancel=lambda _: None)
        tables = BlockTables(groups, range(len(groups)), POSITION)
        config, rule = CacheConfig(num_cpu_blocks=8), LayerwiseRule("auto", "it has groups")
        gets = Gets(cache, POSITION, tables, rule, None, config, has_siblings)  # type: ignore[arg-type]
        self.connector: Any = object.__new__(FlexCacheConnectorV1)
        self.connector._scheduler = SimpleNamespace(gets=gets)
        coordinator = SimpleNamespace(
            full_attention_group_id=groups.index(FULL) if FULL in groups else None,
            find_longest_cache_hit_per_group=lambda keys, stop: ((), hits),
        )
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator)
        self.request = SimpleNamespace(
            request_id="r", num_tokens=8 * POSITION + 1, block_hashes=[b"key"] * 8,
            lora_request=None, kv_transfer_params={}, shared_prefix_boundary=0,
        )  # fmt: skip

    def _match(self, request: Any, num_computed: int, num_tokens: int, *terms: Any) -> Get:
        self.asked.append(num_computed)
        found = max(0, self.tail - num_computed)
        name, forever_s = self.names.of(request), float("inf")
        sources = {TierName.CPU: found} if found else {}
        return Get(1, num_computed, found, sources, forever_s, name, self.num_shared)

    def look_up(self, request: Any, connector: Any = None) -> bool:
        connector = self.connector if connector is None else connector
        return bool(connector.supports_divergent_local_hybrid_hits)

    def ask(self, num_computed: int) -> int | None:
        num_found, _ = self.connector.get_num_new_matched_tokens(self.request, num_computed)
        return int(num_found)


def test_a_load_completes_what_the_gpu_has_left_of_full_attention() -> None:
    vllm = Lookups(FULL, STATE, hits=(64, 0), tail=128)
    assert vllm.look_up(vllm.request)
    assert vllm.ask(64) == 64
    assert vllm.look_up(vllm.request)  # while it waits for room
    assert vllm.ask(64) == 64
    assert vllm.asked == [64]


@pytest.mark.parametrize("tail", [0, 32, 64])
def test_a_load_that_ends_before_leaves_the_hit_to_vllm(tail: int) -> None:
    vllm = Lookups(FULL, STATE, hits=(64, 0), tail=tail)
    for _ in range(2):
        assert not vllm.look_up(vllm.request)
        assert vllm.ask(0) == tail
    assert vllm.asked == [64, 0]


@pytest.mark.parametrize("hits", [(64, 64), (64, 96), (0, 0), (40, 32)])
def test_the_cache_is_asked_once_where_states_are_not_behind(hits: tuple[int, int]) -> None:
    vllm = Lookups(FULL, STATE, hits=hits, tail=128)
    assert not vllm.look_up(vllm.request)
    assert vllm.asked == []


def test_windows_are_left_to_vllm() -> None:
    vllm = Lookups(FULL, STATE, WINDOW, hits=(64, 0, 64), tail=128)
    assert not vllm.look_up(vllm.request)
    assert not Lookups(STATE, hits=(0,), tail=128).look_up(vllm.request)


def test_nothing_is_answered_outside_of_a_look_up() -> None:
    vllm = Lookups(FULL, STATE, hits=(64, 0), tail=128)
    assert not vllm.connector.supports_divergent_local_hybrid_hits


@pytest.mark.parametrize(
    ("groups", "params", "expected"),
    [
        ((FULL, STATE), {"do_remote_prefill": True}, True),
        ((FULL, STATE), {}, False),
        ((FULL, WINDOW), {}, True),
        ((), {}, True),
    ],
)
def test_a_sibling_that_brings_states_keeps_its_own(
    groups: tuple[KVGroup, ...], params: dict[str, Any], expected: bool
) -> None:
    vllm = Lookups(*groups, hits=(64, 0), tail=64, has_siblings=True)
    vllm.request.kv_transfer_params = params
    sibling = SimpleNamespace(supports_divergent_local_hybrid_hits=True)
    both = object.__new__(MultiConnector)
    both._connectors = [sibling, vllm.connector]
    assert vllm.look_up(vllm.request, both) is expected


def test_vllm_hears_where_prompts_part() -> None:
    vllm = Lookups(FULL, STATE, tail=64, num_shared=128)
    for noticed, expected in ((0, 128), (96, 128), (160, 160)):
        vllm.request.shared_prefix_boundary = noticed
        assert vllm.ask(0) == 64
        assert vllm.request.shared_prefix_boundary == expected
    vllm = Lookups(FULL, STATE, tail=128, num_shared=128)
    vllm.ask(0)
    assert vllm.request.shared_prefix_boundary == 0


# -- real engines ----------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.newest
@pytest.mark.parametrize(("model", "hit"), [("gemma3", 640), ("nemotronh", 512)])
def test_the_second_prompt_that_parts_from_another_leaves_a_tail_there(
    model: str, hit: int, tmp_path: Path
) -> None:
    long = make_prompt(1400, 1)
    second, third = (long[:700] + make_prompt(300, seed) for seed in (2, 3))
    config = {"cpu_cache_gb": 0.4, "skip_slow_loads": False}
    with running(engine_of(model, tmp_path, config, **SAME_STATES)) as engine:
        alone = engine.answers([second, third], 8, without="cache")
        engine.forget("GPU")
        engine.generate(long)
        for number, (prompt, cached) in enumerate(((second, 0), (third, hit))):
            engine.forget("GPU")
            assert engine.generate(prompt) == (alone[number], cached)
        engine.settle()
        assert_all_free(engine)
    assert compare_probes(tmp_path)["different"] == []


@pytest.mark.whole
@pytest.mark.newest
def test_blocks_that_the_gpu_has_left_are_not_loaded_again(tmp_path: Path) -> None:
    longer, config = make_prompt(1800, 1), {"cpu_cache_gb": 0.4, "skip_slow_loads": False}
    prompt, private = longer[:1200], make_prompt(900, 4)
    with running(engine_of("nemotronh", tmp_path, config, **SAME_STATES)) as engine:
        cold, _ = engine.generate(longer)
        engine.generate(private)
        engine.forget("GPU")
        engine.generate(prompt)
        engine.forget("states")
        before = engine.stats()["hit_blocks"].get("CPU", 0)
        assert engine.generate(longer) == (cold, 1792)
        assert engine.stats()["hit_blocks"]["CPU"] - before == (1792 - 1024) // 256

        engine.generate(private)
        engine.forget("states")
        before = engine.stats()["hit_blocks"]["CPU"]
        assert engine.generate(private)[1] == 768  # its states are no further than its blocks
        assert engine.stats()["hit_blocks"]["CPU"] - before == 768 // 256
        engine.settle()
        assert_all_free(engine)
    assert compare_probes(tmp_path)["different"] == []
