"""The identity of KV in time, against a plain model: what an engine loads is what it would compute
now, whatever changed since it was stored; and what is stored under the present name is found.

Two engines share a server with DRAM and SSD, a third has its own cache; all share a remote store.
"""

from __future__ import annotations

import contextlib
import tempfile
from itertools import count
from pathlib import Path

import pytest
from cluster import PATIENCE_S, until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from weighted_engine import (
    NUM_GPU_BLOCKS,
    TOKENS_PER_BLOCK,
    WeightedEngine,
    digest_of,
    slots,
    tokens_of,
)

from flexcache import CacheConfig, KVStatus
from flexcache.protocol.endpoints import private_endpoint
from flexcache.server.outbox import withdraw_lines
from flexcache.server.server import KVServer

pytestmark = pytest.mark.whole


SHARED = ("a", "b")
OWN = "c"
SIZES = {"num_cpu_blocks": 512, "tokens_per_block": TOKENS_PER_BLOCK}

some_engine = st.sampled_from([*SHARED, OWN])
some_word = st.sampled_from(["x", "xy", "xyx", "yxyx"])
some_version = st.none() | st.sampled_from(["v1", "v2"])
some_adapter = st.sampled_from(["", "", "p", "q"])

Name = tuple[str, str]
"""What an engine's weights are called: given, or one of its own."""
Stored = tuple[Name, str, str]
"""A name, an adapter, and a prompt."""


class WeightsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.engines: dict[str, WeightedEngine] = {}
        self.names: dict[str, Name] = {}
        self.sure: dict[str, set[Stored]] = {"server": set(), OWN: set()}
        self.numbers = count()
        self.lost: set[str] = set()

    @initialize(has_lines=st.booleans())
    def begin(self, has_lines: bool) -> None:
        self.has_lines = has_lines
        self.path = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        (self.path / "store").mkdir()
        self.store = f"file://{self.path / 'store'}"
        self.endpoint = private_endpoint("weights-machine")
        self.start_server()
        for name in (*SHARED, OWN):
            self.start_engine(name)

    def start_server(self) -> None:
        config = CacheConfig(
            **SIZES,  # type: ignore[arg-type]
            num_ssd_blocks=1024,
            ssd_cache_dirs=[str(self.path / "ssd")],
            remote_url=self.store,
        )
        self.server = KVServer(config, self.endpoint)
        self.server.start()
        if not self.has_lines:
            withdraw_lines(self.server.endpoint, self.server)

    def start_engine(self, name: str) -> None:
        if name == OWN:
            config = CacheConfig(**SIZES, remote_url=self.store)  # type: ignore[arg-type]
            self.sure[OWN] = set()
        else:
            config = CacheConfig(endpoint=self.endpoint, tokens_per_block=TOKENS_PER_BLOCK)
        self.engines[name] = engine = WeightedEngine(config, name)
        engine.wait_ready()
        self.names[name] = ("", "")
        self.lost.discard(name)

    # -- the model -------------------------------------------------------------------------------

    def sure_of(self, name: str) -> set[Stored]:
        return self.sure[OWN if name == OWN else "server"]

    def renamed(self, name: str, version: str | None) -> None:
        """An engine's weights are others: those of the version, or of a run of its own."""
        engine = self.engines[name]
        self.names[name] = ("given", version) if version else ("own", f"{next(self.numbers)}")
        engine.weights = repr(self.names[name])

    def settle(self, name: str) -> None:
        """Wait until the scheduler has heard what its ranks have told."""
        if name == OWN:
            return
        manager = self.engines[name].manager
        until(
            lambda: (
                self.server.hub.state.weights.of(f"{name}/dp0").generation
                == manager.weights_generation
            )
        )

    def note(self, name: str, adapter: str, word: str) -> None:
        self.sure_of(name).update(
            (self.names[name], adapter, word[:length]) for length in range(1, len(word) + 1)
        )

    # -- what engines do -------------------------------------------------------------------------

    @rule(name=some_engine, word=some_word, adapter=some_adapter)
    def put(self, name: str, word: str, adapter: str) -> None:
        engine = self.engines[name]
        _, answer = engine.put(word, adapter)
        is_held = not adapter or adapter in engine.adapters
        if name in self.lost:
            assert answer.status is KVStatus.NOT_FOUND
        elif is_held:
            assert answer.status in (KVStatus.SUCCESS, KVStatus.NOT_FOUND), answer
            self.note(name, adapter, word)
        else:
            assert answer.status in (KVStatus.FAILED, KVStatus.NOT_FOUND), answer

    @rule(name=some_engine, word=some_word, adapter=some_adapter)
    def get(self, name: str, word: str, adapter: str) -> None:
        engine = self.engines[name]
        found = engine.get(word, adapter, start=8)
        if name in self.lost or (adapter and adapter not in engine.adapters):
            assert found == 0
        elif (self.names[name], adapter, word) in self.sure_of(name):
            assert found == len(word)

    @rule(name=some_engine, adapters=st.sets(st.sampled_from(["p", "q"])))
    def load_adapters(self, name: str, adapters: set[str]) -> None:
        self.engines[name].adapters = adapters

    @rule(
        name=some_engine,
        version=some_version,
        told_by=st.sampled_from([(0, 1), (0,), (1,)]),
        order=st.permutations([0, 1]),
        hasty=some_word,
    )
    def update(
        self, name: str, version: str | None, told_by: tuple[int, ...], order: list[int], hasty: str
    ) -> None:
        """Ranks load other weights, whose name some of them know."""
        engine = self.engines[name]
        for rank in order:
            engine.clients[rank].weights_changed(version if rank in told_by else None)
        self.renamed(name, version)
        engine.get(hasty)
        self.settle(name)

    @rule(name=some_engine, version=some_version, is_noticed=st.booleans())
    def name_weights(self, name: str, version: str | None, is_noticed: bool) -> None:
        """The trainer names the weights, which the ranks may have noticed or not."""
        engine = self.engines[name]
        if is_noticed:
            for client in engine.clients:
                client.weights_changed()
            self.settle(name)
        engine.manager.new_weights(version)
        self.renamed(name, version)

    @rule(
        name=some_engine, word=some_word, adapter=some_adapter, is_put=st.booleans(),
        change=st.sampled_from(["ranks", "manager", "reset", "adapter"]), version=some_version,
    )  # fmt: skip
    def change_in_flight(
        self, name: str, word: str, adapter: str, is_put: bool, change: str, version: str | None
    ) -> None:
        """Weights or adapters change while an op waits for its gate."""
        if change == "manager" and self.names[name] == ("given", version):
            version = None  # the name that they have already changes nothing
        engine = self.engines[name]
        manager, blocks = engine.manager, range(16, 16 + len(word))
        match = manager.put_match if is_put else manager.get_match
        engine.compute(word, blocks, adapter)
        before = engine.manager.weights_generation
        task_id, mask = match(tokens_of(word), adapter=digest_of(adapter), weights=before)
        if mask.any():
            manager.launch([task_id], [slots(blocks)[mask]], gated=True)
        if change == "adapter":
            engine.adapters = set()
        elif change == "ranks":
            for client in engine.clients:
                client.weights_changed(version)
            self.renamed(name, version)
        elif change == "manager":
            manager.new_weights(version)
            self.renamed(name, version)
        else:
            self.reset(name)
        is_other = change != "adapter" or bool(adapter)
        if is_other:
            engine.compute("wrong", range(16, 21))
        held = engine.snapshot()
        for client in engine.clients:
            client.open_gates([task_id])
        if mask.any():
            answer = manager.wait([task_id], PATIENCE_S, completely=True)[task_id]
            if is_other:
                assert not answer.mask.any()
                assert engine.snapshot() == held
        else:
            manager.cancel([task_id])
        self.settle(name)
        if change != "adapter":
            assert not manager.put_match(tokens_of(word), weights=before)[1].any()

    @rule(name=some_engine)
    def reset(self, name: str) -> None:
        self.engines[name].manager.reset()
        self.sure_of(name).clear()
        self.renamed(name, None)

    @rule(name=some_engine)
    def lose_track(self, name: str) -> None:
        engine = self.engines[name]
        engine.clients[0].weights_unknown("a test")
        self.renamed(name, None)
        self.lost.add(name)
        self.settle(name)

    # -- what starts again -----------------------------------------------------------------------

    @rule(name=some_engine)
    def restart_engine(self, name: str) -> None:
        self.engines[name].close()
        self.start_engine(name)

    @rule(away=st.sampled_from(["", "ranks", "manager"]), name=st.sampled_from(SHARED),
          version=some_version)  # fmt: skip
    def restart_server(self, away: str, name: str, version: str | None) -> None:
        """Its SSD tier comes back. An engine may get other weights meanwhile."""
        self.server.shutdown()
        if away == "ranks":
            for client in self.engines[name].clients:
                client.weights_changed(version)
        elif away:
            self.engines[name].manager.new_weights(version)
        if away:
            self.renamed(name, version)
        self.start_server()
        for each in SHARED:
            self.engines[each].wait_ready()
            self.settle(each)

    def teardown(self) -> None:
        with self.stack:
            for engine in self.engines.values():
                engine.manager.check()
                engine.close()
            if hasattr(self, "server"):
                self.server.shutdown()


assert NUM_GPU_BLOCKS >= 21
WeightsMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
TestWeightsMachine = WeightsMachine.TestCase
