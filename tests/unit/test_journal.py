"""The journal matches the index: a reader that applies its changes knows what can be found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
from builders import ROOT, get_of, key_of, keys_of, make_cache, put_of, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexcache.cache.block_keys import EngineBlockKeys, PromptContent
from flexcache.cache.journal import (
    MEDIUM_OF,
    WITH_LOCALITY,
    Change,
    Cleared,
    Medium,
    Removed,
    Stored,
)
from flexcache.cache.plan import Plan, PlannerSettings
from flexcache.cache.prefix_index import RestoredRun
from flexcache.cache.tier import Tier
from flexcache.cache.tiered_cache import TieredCache
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_back import DirtyQueue
from flexcache.events import held_blocks
from flexcache.events.held_blocks import HeldBlocks
from flexcache.ids import BlockKey, RequestInfo, TierName

LENGTH = 4
SIZE = 2
WORDS = [word for length in range(1, LENGTH + 1) for word in words("ab", length)]
some_word = st.sampled_from(WORDS)


def tokens_of(word: str) -> list[int]:
    """Return two tokens per block, each of which identifies its block."""
    return [ord(letter) * 10 + i for letter in word for i in range(SIZE)]


def described(word: str, as_array: bool = False) -> EngineBlockKeys:
    tokens = tokens_of(word)
    content = PromptContent(
        np.array(tokens) if as_array else tokens,
        RequestInfo(lora_name="an-adapter", extra_keys=[(letter,) for letter in word]),
    )
    return EngineBlockKeys(ROOT, keys_of(word), len(word), content)


class Reader:
    """Applies changes, and is strict about what may follow what."""

    def __init__(self) -> None:
        self.blocks: dict[Medium, set[BlockKey]] = {medium: set() for medium in Medium}

    def read(self, changes: list[Stored | Removed | Cleared]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                for blocks in self.blocks.values():
                    blocks.clear()
                continue
            there, keys = self.blocks[change.medium], set(change.keys)
            assert keys and len(keys) == len(change.keys)
            if isinstance(change, Removed):
                assert keys <= there, "what was not there cannot go"
                there -= keys
            else:
                assert not keys & there, "what is there is not stored again"
                assert change.parent is None or change.parent in there
                self._check_content(change)
                there |= keys

    @staticmethod
    def _check_content(stored: Stored) -> None:
        word = stored.keys[-1].decode()
        first = len(word) - len(stored.keys)
        assert stored.keys == keys_of(word, first)
        assert stored.parent == (key_of(word[:first]) if first else None)
        if stored.token_ids:  # else they are not known
            assert list(stored.token_ids) == tokens_of(word[first:])
            assert stored.extra_keys == [(letter,) for letter in word[first:]]
            assert stored.info.lora_name == "an-adapter"


class RunReader:
    """Applies changes by runs of two blocks."""

    def __init__(self) -> None:
        self.blocks: dict[Medium, set[BlockKey]] = {medium: set() for medium in Medium}
        self.runs: dict[Medium, set[BlockKey]] = {medium: set() for medium in Medium}

    def read(self, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Cleared():
                    self.__init__()  # type: ignore[misc]
                case Removed():
                    blocks, runs = self.blocks[change.medium], self.runs[change.medium]
                    assert set(change.keys) <= blocks | runs, "what was not told cannot go"
                    blocks.difference_update(change.keys)
                    runs.difference_update(change.keys)
                case Stored(run_blocks=length):
                    self._stored(change, length)

    def _stored(self, stored: Stored, length: int) -> None:
        told = (self.blocks if length == 1 else self.runs)[stored.medium]
        assert length in (1, 2) and not told & set(stored.keys)
        assert stored.parent is None or stored.parent in told
        first = stored.keys[0].decode()[:-length]
        assert stored.parent == (key_of(first) if first else None)
        last = stored.keys[-1].decode()
        assert [len(key) for key in stored.keys] == [
            *range(len(first) + length, len(last) + 1, length)
        ]
        if stored.token_ids:
            assert list(stored.token_ids) == tokens_of(last[len(first) :])
            assert stored.extra_keys == [(letter,) for letter in last[len(first) :]]
        told |= set(stored.keys)


class JournalMachine(RuleBasedStateMachine):
    """Puts, gets, evictions, bad blocks and clearing over three tiers."""

    write_back = False
    by_runs = False
    max_tokens = 12
    medium_of = MEDIUM_OF

    def __init__(self) -> None:
        super().__init__()
        policy = "write_back" if self.write_back else "write_through"
        self.cache = make_cache(
            6, 5, 7, policy=policy, tokens_per_block=SIZE,
            tells_locality=self.medium_of is WITH_LOCALITY,
        )  # fmt: skip
        self.reader = Reader()
        self.held = HeldBlocks(max_tokens=self.max_tokens, by_runs=self.by_runs)
        self.told = RunReader()
        self.patch = mock.patch.object(held_blocks, "BLOCKS_A_RUN", 2)
        self.patch.start()
        self.plans: list[tuple[Plan, str]] = []

    @rule(word=some_word, as_array=st.booleans())
    def put(self, word: str, as_array: bool) -> None:
        plan = self.cache.stores.plan_put(put_of(described(word, as_array)))
        self.plans.append((plan, word))

    @rule(word=some_word, prefetch=st.booleans())
    def load(self, word: str, prefetch: bool) -> None:
        loads = self.cache.loads
        plan_load = loads.plan_prefetch if prefetch else loads.plan_get
        self.plans.append((plan_load(get_of(described(word))), word))

    @rule(position=st.integers(0, 9), share=st.sampled_from([0.0, 0.5, 1.0]), stores=st.booleans())
    def end_a_plan(self, position: int, share: float, stores: bool) -> None:
        if not self.plans:
            return
        plan, _ = self.plans.pop(position % len(self.plans))
        if plan.staging is not None:
            self.cache.publish_staging(plan, int(share * len(plan.staging)))
        if stores:
            for name, lease in plan.stores.items():
                self.cache.publish_store(plan, name, int(share * len(lease)))
        self.cache.finish(plan)

    @rule()
    def write_what_is_dirty(self) -> None:
        while (plan := self.cache.stores.plan_write_back()) is not None:
            for name, lease in plan.stores.items():
                self.cache.publish_store(plan, name, len(lease))
            self.cache.finish(plan)

    @rule(word=some_word)
    def learn(self, word: str) -> None:
        remote = self.cache.tiers.remote
        assert remote is not None
        remote.learn(ROOT, None, keys_of(word), 0, described(word).content)

    @rule(word=some_word, tier=st.integers(0, 2))
    def lose_a_block(self, word: str, tier: int) -> None:
        list(self.cache.tiers)[tier].discard(ROOT, key_of(word))

    @rule(tier=st.sampled_from(["CPU", "SSD", "REMOTE", None]))
    def clear(self, tier: str | None) -> None:
        self.cache.tiers.clear(tier)

    @invariant()
    def the_reader_knows_what_can_be_found(self) -> None:
        assert self.cache.tiers.journal is not None
        changes = self.cache.tiers.journal.take()
        self.reader.read(changes)
        self.told.read(self.held.apply(changes))
        self.held.check()
        for medium in Medium:
            found = {
                key_of(word)
                for tier in self.cache.tiers
                if self.medium_of[tier.name] is medium
                for word in WORDS
                if tier.index.contains(ROOT, key_of(word))
            }
            assert self.reader.blocks[medium] == found
            if self.by_runs and medium not in (Medium.CPU, Medium.LOCAL_CPU):
                assert self.told.runs[medium] == {key for key in found if len(key) % 2 == 0}
                assert not self.told.blocks[medium]
            else:
                assert self.told.blocks[medium] == found

    @invariant()
    def a_snapshot_has_what_can_be_found(self) -> None:
        late = RunReader()
        late.read(list(all_pages(self.held)))
        assert (late.blocks, late.runs) == (self.told.blocks, self.told.runs)

    def teardown(self) -> None:
        self.patch.stop()


def all_pages(held: HeldBlocks) -> Iterator[Stored]:
    cursor: int | None = 0
    while cursor is not None:
        stored, cursor = held.page(cursor)
        yield from stored


class WriteBackJournalMachine(JournalMachine):
    write_back = True


class JournalWithLocalityMachine(JournalMachine):
    medium_of = WITH_LOCALITY


class JournalByRunsMachine(JournalMachine):
    by_runs = True
    max_tokens = 1000


class ShortOfTokensMachine(WriteBackJournalMachine):
    by_runs = True
    medium_of = WITH_LOCALITY


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(stateful_step_count=30)
TestWriteBackJournal = WriteBackJournalMachine.TestCase
TestWriteBackJournal.settings = settings(stateful_step_count=30)
TestJournalWithLocality = JournalWithLocalityMachine.TestCase
TestJournalWithLocality.settings = settings(stateful_step_count=30)
TestJournalByRuns = JournalByRunsMachine.TestCase
TestJournalByRuns.settings = settings(stateful_step_count=30)
TestShortOfTokens = ShortOfTokensMachine.TestCase
TestShortOfTokens.settings = settings(stateful_step_count=30)


def test_restored_blocks_are_recorded_without_tokens() -> None:
    cache = make_cache(4, 4, tokens_per_block=SIZE)
    ssd, slots = cache.tiers.by_name[TierName.SSD], np.array([0, 1])
    ssd.expect(slots)
    ssd.restore([RestoredRun(ROOT, None, keys_of("ab"), slots)])
    assert cache.tiers.journal is not None
    assert cache.tiers.journal.take() == [
        Stored(Medium.STORAGE, ROOT, None, keys_of("ab"), block_size=SIZE)
    ]


def test_clearing_every_tier_is_recorded_as_one_change() -> None:
    cache = make_cache(4, tokens_per_block=SIZE)
    plan = cache.stores.plan_put(put_of(described("ab")))
    cache.publish_staging(plan, 2)
    cache.finish(plan)
    assert cache.tiers.journal is not None
    cache.tiers.journal.take()
    cache.tiers.clear(None)
    assert cache.tiers.journal.take() == [Cleared()]


def test_blocks_written_back_are_recorded_with_their_tokens_and_no_others_are_kept() -> None:
    dirty = DirtyQueue(2)
    tiers = [Tier(TierName.CPU, 6), Tier(TierName.SSD, 6)]
    settings = PlannerSettings(
        chunk_blocks=2, max_store_backlog=100, write_back={TierName.SSD: dirty}
    )
    cache = TieredCache(Tiers(tiers), settings)
    cache.keep_journal(SIZE)
    for word in ("a", "ab", "aba"):  # one conversation, that goes on
        plan = cache.stores.plan_put(put_of(described(word)))
        cache.publish_staging(plan, plan.num_blocks)
        cache.finish(plan)
    contents = [prompt.content for prompt in dirty._prompts]
    assert [len(content.token_ids) for content in contents if content] == [SIZE, SIZE, SIZE]
    reader = Reader()
    while (store := cache.stores.plan_write_back()) is not None:
        cache.publish_store(store, TierName.SSD, len(store.stores[TierName.SSD]))
        cache.finish(store)
    assert cache.tiers.journal is not None
    changes = cache.tiers.journal.take()
    reader.read(changes)
    written = [change for change in changes if change.medium is Medium.STORAGE]  # type: ignore[union-attr]
    assert written and all(isinstance(change, Stored) and change.token_ids for change in written)
