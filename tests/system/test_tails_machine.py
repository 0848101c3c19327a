"""Models with window and state groups against a plain model of what is cached: bytes of each block
of each group, through puts, gets, cancellations, cleared tiers, kills and restarts.

A letter of a word is a position of 32 tokens. What a block holds depends on its group and on all
tokens up to its end, so each has a number of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cluster import until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tailed_engine import ALL_LIKE, PATIENCE_S, TailedEngine, tailed_engine

from flexcache import KVGroup, KVStatus
from flexcache.errors import FlexCacheError
from flexcache.protocol.endpoints import private_endpoint

POSITION = 32
some_word = st.text("ab", min_size=1, max_size=4)


def tokens_of(word: str) -> np.ndarray:
    return np.repeat(np.frombuffer(word.encode(), np.uint8), POSITION).astype(np.int64)


@dataclass
class Contents:
    """The number that fills each block."""

    numbers: dict[tuple[int, str, int], int] = field(default_factory=dict)

    def of(self, groups: tuple[KVGroup, ...], word: str, start: int, stop: int) -> list[list[int]]:
        """Return those of each group that a prompt needs to go from token ``start`` to ``stop``."""
        return [
            [
                self._number(number, word, (block + 1) * group.tokens_per_block)
                for block in range(
                    start // group.tokens_per_block if group.is_dense else group.first_needed(stop),
                    stop // group.tokens_per_block,
                )
            ]
            for number, group in enumerate(groups)
        ]

    def _number(self, group: int, word: str, end: int) -> int:
        prefix = word[: -(-end // POSITION)]
        return self.numbers.setdefault((group, prefix, end), 1 + len(self.numbers))


def fill(engine: TailedEngine, tables: list[list[int]], contents: list[list[int]]) -> None:
    for table, numbers in zip(tables, contents, strict=True):
        for block, number in zip(table, numbers, strict=True):
            for layer, tensor in enumerate(engine.kv.values()):
                tensor[block].fill_(number * 2 + layer)


def read(engine: TailedEngine, tables: list[list[int]]) -> list[list[set[float]]]:
    return [
        [
            {
                v - layer
                for layer, t in enumerate(engine.kv.values())
                for v in t[block].unique().tolist()
            }
            for block in table
        ]
        for table in tables
    ]


class TailsMachine(RuleBasedStateMachine):
    """``sure`` and ``possible`` have, by tier, the words whose tails are, or may be, cached."""

    @initialize(
        groups=st.sampled_from(ALL_LIKE),
        is_roomy=st.booleans(),
        is_shared=st.booleans(),
    )
    def make(self, groups: tuple[KVGroup, ...], is_roomy: bool, is_shared: bool) -> None:
        self.stack = contextlib.ExitStack()
        self.groups, self.is_roomy = groups, is_roomy
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.config: dict[str, Any] = {
            "num_cpu_blocks": 160 if is_roomy else 12,
            "num_ssd_blocks": 200 if is_roomy else 20,
            "ssd_cache_dirs": (directory,),
            "skip_slow_loads": False,
        }
        self.is_shared = is_shared
        if is_shared:
            self.config["endpoint"] = private_endpoint(os.path.basename(directory))
        self.contents = Contents()
        self.was_stopped = False
        """Once is enough: starting processes takes long, and longer after each kill."""
        self.sure: dict[str, set[str]] = {"CPU": set(), "SSD": set()}
        self.possible: dict[str, set[str]] = {"CPU": set(), "SSD": set()}
        self.start()

    def start(self) -> None:
        self.running = contextlib.ExitStack()
        self.engine = self.running.enter_context(tailed_engine(self.groups, **self.config))
        self.manager = self.engine.manager

    def match_put(self, word: str, with_tail: bool) -> tuple[int, list[list[int]]]:
        """Match a put, and return the GPU blocks that its launch needs, filled."""
        tokens = tokens_of(word)
        task, mask = self.manager.put_match(tokens, tail_at=len(tokens) if with_tail else None)
        offered = np.flatnonzero(mask)
        begin, end = (int(offered[0]), int(offered[-1]) + 1) if len(offered) else (0, 0)
        tables = self.engine.tables(len(tokens))
        fill(self.engine, tables, self.contents.of(self.groups, word, 0, len(tokens)))
        return task, [
            table[begin // group.tokens_per_block : end // group.tokens_per_block]
            if group.is_dense
            else table
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def may_have(self, *tiers: str, word: str) -> None:
        for tier in tiers:
            self.possible[tier].add(word)

    # -- rules -----------------------------------------------------------------------------------

    @rule(word=some_word, with_tail=st.booleans())
    def put(self, word: str, with_tail: bool) -> None:
        task, blocks = self.match_put(word, with_tail)
        self.manager.launch([task], group_blocks=[blocks])
        response = self.manager.wait([task], PATIENCE_S, completely=True)[task]
        assert response.status is not KVStatus.TIMEOUT
        self.engine.wipe()
        if with_tail:
            self.may_have("CPU", "SSD", word=word)
            if self.is_roomy:
                assert response.status in (KVStatus.SUCCESS, KVStatus.NOT_FOUND)
                self.sure["CPU"].add(word)
                self.is_written()
                self.sure["SSD"].add(word)

    def is_written(self) -> None:
        """Wait for what a put has begun without being asked to: what SSD lacked of it."""
        until(lambda: not sum(self.manager.stats()["tasks"].values()))

    @rule(word=some_word)
    def put_and_cancel(self, word: str) -> None:
        task, blocks = self.match_put(word, with_tail=True)
        self.manager.launch([task], group_blocks=[blocks])
        self.manager.cancel([task])
        assert self.manager.wait([task], PATIENCE_S, completely=True)[task]
        self.engine.wipe()
        self.may_have("CPU", "SSD", word=word)

    @rule(word=some_word)
    def match_and_cancel(self, word: str) -> None:
        task, _ = self.match_put(word, with_tail=True)
        self.manager.cancel([task])
        self.engine.wipe()
        task, _ = self.manager.get_match(tokens_of(word))
        self.manager.cancel([task])

    @rule(word=some_word, num_had=st.integers(0, 3), more=st.integers(0, 1))
    def get(self, word: str, num_had: int, more: int) -> None:
        """``more``: whether there is a token behind the word, so that all of it may be loaded."""
        tokens = np.append(tokens_of(word), np.full(more, 7))
        start = min(num_had, len(word)) * POSITION
        wanted = np.arange(len(tokens)) >= start
        task, mask = self.manager.get_match(tokens, wanted)
        found = np.flatnonzero(mask)
        stop = int(found[-1]) + 1 if len(found) else start
        self.check_hit(word, start, stop, len(tokens))
        if stop == start:
            return
        assert len(found) == stop - start
        tables = self.engine.tables(stop, start)
        self.manager.launch([task], group_blocks=[tables])
        response = self.manager.wait([task], PATIENCE_S, completely=True)[task]
        assert response.status is KVStatus.SUCCESS
        expected = self.contents.of(self.groups, word, start, stop)
        assert read(self.engine, tables) == [[{2.0 * n} for n in table] for table in expected]
        self.engine.wipe()
        self.may_have("CPU", word=word[: stop // POSITION])

    def check_hit(self, word: str, start: int, stop: int, num_tokens: int) -> None:
        """A hit ends at a tail that may be there, and at no lower one than what is there."""
        last = num_tokens - any(group.kind == "state" for group in self.groups)

        def longest(known: dict[str, set[str]]) -> int:
            ends = (len(w) * POSITION for w in known["CPU"] | known["SSD"] if word.startswith(w))
            return max((end for end in ends if start < end <= last), default=start)

        assert longest(self.sure) <= stop <= longest(self.possible)
        if stop > start:
            assert word[: stop // POSITION] in self.possible["CPU"] | self.possible["SSD"]

    @rule(word=some_word)
    def get_and_cancel(self, word: str) -> None:
        task, mask = self.manager.get_match(tokens_of(word))
        if mask.any():
            stop = int(np.flatnonzero(mask)[-1]) + 1
            self.manager.launch([task], group_blocks=[self.engine.tables(stop)])
            self.manager.cancel([task])
            assert self.manager.wait([task], PATIENCE_S, completely=True)[task]
            self.engine.wipe()
            self.may_have("CPU", word=word[: stop // POSITION])

    @rule(word=some_word)
    def prefetch(self, word: str) -> None:
        task = self.manager.prefetch_async(tokens_of(word))
        assert self.manager.wait([task], PATIENCE_S, completely=True)[task]
        for end in range(1, len(word) + 1):
            if word[:end] in self.possible["SSD"]:
                self.may_have("CPU", word=word[:end])

    @rule(tier=st.sampled_from(["CPU", "SSD"]))
    def clear(self, tier: str) -> None:
        self.is_written()  # what is held is not dropped
        self.manager.clear(tier)
        self.sure[tier], self.possible[tier] = set(), set()

    @precondition(lambda self: not self.was_stopped)
    @rule()
    def kill_the_disk_worker(self) -> None:
        self.was_stopped = True
        pid = self.manager.stats()["workers"]["disk"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.manager.stats()["workers"].get("disk", pid) != pid)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        def is_whole() -> bool:
            try:
                self.manager.wait_ready(PATIENCE_S)
                return all(t["available"] for t in self.manager.stats()["tiers"].values())
            except FlexCacheError:
                return False

        until(is_whole)

    @precondition(lambda self: not (self.is_shared or self.was_stopped))
    @rule()
    def restart(self) -> None:
        self.was_stopped = True
        self.running.close()
        self.forget_dram()
        self.start()

    @precondition(lambda self: self.is_shared and not self.was_stopped)
    @rule()
    def kill_the_server(self) -> None:
        self.was_stopped = True
        pid = self.manager.stats()["server_pid"]
        os.kill(pid, signal.SIGKILL)

        def is_another() -> bool:
            try:
                return bool(self.manager.stats()["server_pid"] != pid)
            except FlexCacheError:
                return False

        until(is_another)
        self.wait_until_whole()
        self.forget_dram()

    def forget_dram(self) -> None:
        self.sure["CPU"], self.possible["CPU"] = set(), set()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            with self.stack:
                self.running.close()


TailsMachine.TestCase.settings = settings(
    max_examples=6, stateful_step_count=25, report_multiple_bugs=False
)
TestTailsMachine = TailsMachine.TestCase
