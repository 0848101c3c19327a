"""Blocks that must not be stored: KV is still on its way to them, or vLLM has let go of them. Needs
no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_puts_life import BLOCK, FULL, WINDOW, FakeCache, FakePool, FakeRequest

from flexcache.config.model import KVGroup
from flexcache.integration.vllm.groups import BlockTables
from flexcache.integration.vllm.puts import PutPoints, Puts

NUM_BLOCKS = 10


class Engine:
    """Puts of an engine with one request, whose blocks are 1 to 10 in the first group."""

    def __init__(self, *groups: KVGroup) -> None:
        self.cache, self.pool = FakeCache(groups or (FULL,)), FakePool()
        self.offered: list[range] = []
        match_put = self.cache.match_put

        def note(request: Any, first: int, stop: int, has_tail: bool) -> Any:
            self.offered.append(range(first, stop))
            return match_put(request, first, stop, has_tail)

        self.cache.match_put = note  # type: ignore[method-assign]
        numbers = range(max(1, len(groups)))
        tables = BlockTables(groups, numbers, BLOCK)
        points = PutPoints(BLOCK, 3 * BLOCK if tables.has_tails else 0)
        self.puts = Puts(self.cache, tables, points)  # type: ignore[arg-type]
        self.puts.bind(self.pool)
        blocks = [[NUM_BLOCKS * n + i for i in range(1, NUM_BLOCKS + 1)] for n in numbers]
        self.request = FakeRequest("mine", NUM_BLOCKS * BLOCK, blocks)

    def step(self, num_tokens: int) -> None:
        request = self.request
        request.num_certain = request.num_computed_tokens + num_tokens
        self.puts.scheduled(
            SimpleNamespace(
                num_scheduled_tokens={request.request_id: num_tokens},
                scheduled_spec_decode_tokens={},
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids=lambda _: request.all_blocks, boundary_state_offloads={}
                ),
            )
        )
        request.num_computed_tokens = request.num_certain

    def end(self) -> None:
        self.puts.launch()
        self.cache.launched.clear()
        self.puts.release()
        self.puts.check_idle()
        assert not any(self.pool.pins.values())


@pytest.mark.parametrize("groups", [(), (FULL, WINDOW)], ids=["one group", "window"])
def test_a_request_aborted_while_another_connector_loads_it(groups: tuple[KVGroup, ...]) -> None:
    engine = Engine(*groups)
    request = engine.request
    engine.puts.admitted(request)
    # vLLM counts these as computed as soon as it has allocated their blocks.
    request.num_computed_tokens = request.num_certain = 8 * BLOCK
    engine.puts.finished(request, request.all_blocks)
    assert engine.offered == []
    engine.end()


def test_a_request_preempted_then_aborted_while_another_connector_loads_it() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    engine.step(4 * BLOCK)
    request.num_computed_tokens = 0  # it is preempted
    engine.puts.admitted(request)
    request.num_computed_tokens = request.num_certain = 8 * BLOCK
    engine.puts.finished(request, request.all_blocks)
    assert engine.offered == []
    engine.end()


def test_what_another_connector_has_loaded_is_stored() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    request.num_computed_tokens = 8 * BLOCK
    engine.puts.admitted(request)  # it has arrived
    engine.step(2 * BLOCK)
    assert engine.offered == [range(NUM_BLOCKS)]
    engine.puts.finished(request, request.all_blocks)
    engine.end()


def test_blocks_between_a_prompt_and_the_window_of_its_answer_are_gone() -> None:
    engine = Engine()
    request = engine.request
    engine.puts.admitted(request)
    engine.step(NUM_BLOCKS * BLOCK)
    engine.puts.launch()
    answer = [NUM_BLOCKS + i for i in range(1, 6)]
    request.all_blocks = [request.all_blocks[0] + answer]
    request.num_tokens = (NUM_BLOCKS + 5) * BLOCK + 1
    engine.step(5 * BLOCK)
    engine.puts.finished(request, [[*request.all_blocks[0][:NUM_BLOCKS], 0, 0, 0, 14, 15]])
    assert not engine.puts._matched
    assert engine.pool.pins[0] == 0
    engine.cache.matched.clear()
    engine.end()
