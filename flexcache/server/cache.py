"""Cache of a server, for one model: the task engine, and the store beneath its tiers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from flexcache.cache.control import CacheCall, Pin
from flexcache.cache.tier import Lease
from flexcache.cache.tiered_cache import CacheSizes, build_cache
from flexcache.config import CacheConfig, ModelConfig
from flexcache.config.model import UnitShape
from flexcache.errors import ConfigError, FlexCacheError, StorageError
from flexcache.events.held_blocks import PublishedNames
from flexcache.ids import SessionId, TierName
from flexcache.logs import log_event
from flexcache.protocol.messages import HelloRank
from flexcache.server.outbox import BackgroundJob, Outbox
from flexcache.server.store import CacheStore, other_layout
from flexcache.storage.compression import Codec, open_compressor
from flexcache.storage.disk_pool import DiskPool
from flexcache.storage.machine import check_pool_fits
from flexcache.storage.pool_directory import DirectFilesRef
from flexcache.storage.remote import check_packages
from flexcache.storage.shards import KVIdentity, ShardLayouts, Shards, digest
from flexcache.storage.slot_index import Records, ages_s
from flexcache.tasks.engine import KVTaskEngine
from flexcache.tasks.model import TaskLimits
from flexcache.transfer.messages import NoteLayout
from flexcache.transfer.scheduler import BlockIds

logger = logging.getLogger(__name__)

_REPLACE_AFTER_S = 1.0  # a remote worker that has not said by then that its store is late


Told = TypeVar("Told")


@dataclass(slots=True)
class Clearing(Generic[Told]):
    """Blocks that were cleared or deleted, and what of them is still recorded on SSD.

    Free slots with such records, also those of blocks evicted before, are withheld until the
    records are gone. Tasks go on reading slots without one: their ops have the checksums. Only a
    new disk worker could not: of compressed slots it would see a checksum that differs, a miss.

    Attributes:
        answer: Of the call that has cleared them.
    """

    answer: Told
    _tasks: KVTaskEngine | None = None
    _withheld: Lease | None = None
    _recorded: BlockIds | None = None
    """The withheld blocks and, of a delete, those that tasks read: they are erased once more when
    these end."""
    _pool: DiskPool | None = None
    _era: int | None = None
    """The one that begins with a reset."""
    _is_delete: bool = False

    @property
    def needs_work(self) -> bool:
        return self._pool is not None

    def work(self) -> None:
        """Erase the records for good: may take seconds, and needs no lock.

        After a reset those of slots in use are void too, and what is still written there of before.

        Raises:
            OSError: A restart may bring back what was cleared.
        """
        if self._pool is None or self._recorded is None:
            return
        try:
            if self._era is not None:
                self._pool.invalidate(self._era)
        finally:
            self._pool.erase(self._recorded, self._is_delete)

    def end(self, error: Exception | None) -> Told:
        """Return the answer. Must be called once, with the error of ``work``.

        Raises:
            StorageError: ``work`` failed.
        """
        if self._tasks is not None and self._withheld is not None:
            self._tasks.give_back(self._withheld, error is None)
        if error is not None:
            raise StorageError(
                "what was cleared on SSD is not found any more, but not gone for good: "
                f"its index cannot be written ({error})"
            )
        return self.answer


class ServedCache:
    """The cache of one model, sized by the config. Nothing is allocated before `open`.

    Args:
        shards: How a block is divided over the ranks of an engine.

    Attributes:
        tasks: Its task engine.
        store: Its memory and files.
        sizes: Capacities of its tiers, in blocks.
        shape: How the blocks of the model's groups fill the cache's.
        layouts: How the ranks that have registered lay out their shards.
        layout: How the ranks lay out the bytes of a block; None until it is known of all shards.
        published: What KV events call its blocks, where these may be asked for by name.

    Raises:
        ConfigError: A size does not fit the model or the machine.
        MissingDependencyError: The remote store or a compression needs a package that is not
            installed.
    """

    def __init__(self, model: ModelConfig, config: CacheConfig, shards: Shards) -> None:
        self.model = model
        self.config = config
        self.published: PublishedNames | None = None
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self.shape = UnitShape(model.groups, config.tokens_per_block)
        self.shards = shards
        self.layouts = ShardLayouts(len(shards.storing_ranks), shards.per_rank)
        self.sizes = CacheSizes.for_blocks(config, shards.block_bytes, shards.stored_bytes)
        if config.remote_url is not None:
            check_packages(config.remote_url, config.remote_compression)
        if config.ssd_compression != "none":
            open_compressor(Codec.of(config.ssd_compression))
        check_pool_fits(
            shards.stored_bytes * self.sizes.num_host_blocks,
            in_control_group=config.hugepages != "reserved",  # those are not counted there
        )
        try:
            self.tasks = self._make_engine()
        except MemoryError:
            raise ConfigError(
                f"{self.sizes.num_host_blocks} blocks in DRAM and {self.sizes.num_slots} on SSD: "
                "their index does not fit into memory; lower the sizes"
            ) from None
        self.store = CacheStore(config, shards, self.sizes)
        self.layout: str | None = None
        needed = self.shape.largest_tail_units
        if needed > self.sizes.num_host_blocks:
            log_event(
                logger, logging.WARNING, "tails_do_not_fit", blocks=self.sizes.num_host_blocks,
                blocks_of_a_tail=needed, effect="prompts as long as the window are not found again",
                remedy="a larger cpu_cache_gb",
            )  # fmt: skip

    def _make_engine(self) -> KVTaskEngine:
        config = self.config
        return KVTaskEngine(
            build_cache(config, self.sizes, self.shape if self.model.groups else None),
            TaskLimits(
                block_bytes=self.shards.block_bytes,
                load_ranks=range(self.shards.num_ranks),
                store_ranks=self.shards.storing_ranks,
                op_timeout_s=config.op_timeout_s,
                remote_timeout_s=config.remote_timeout_s + _REPLACE_AFTER_S,
                lookup_timeout_s=config.remote_lookup_timeout_s,
                match_ttl_s=config.match_ttl_s,
            ),
        )

    def open(self, store_opened: Callable[[], None] = lambda: None) -> None:
        """Open the store and index what the SSD files hold already.

        Args:
            store_opened: Called once the files have been read, before they are indexed: workers
                start meanwhile.

        Raises:
            ConfigError: A directory is another process's, cannot be used, or is refused.
        """
        self.store.open()
        try:
            pool, started = self.store.disk_pool, time.monotonic()
            if pool is not None:
                self.tasks.cache.stores.era = pool.era
            records = None if pool is None else self.store.load_slots()
            store_opened()
            if pool is not None and records is not None:
                self._restore(pool, records, started)
        except BaseException:
            self.store.close()
            raise

    def _restore(self, pool: DiskPool, records: Records, started: float) -> None:
        ages = ages_s(records["generation"], time.time())
        report = self.tasks.restore(records, ages, started)
        found = pool.identity
        if found is not None and report.num_restored and found.model == self.identity("").model:
            self.tasks.adopt_layout(found.layout, started)  # until a rank registers another one
        if report.num_restored or report.num_dropped:
            log_event(
                logger, logging.INFO, "ssd_restored", blocks=report.num_restored,
                useless_blocks=report.num_dropped, seconds=time.monotonic() - started,
                found_later=self.tasks.cache.tiers.by_name[TierName.SSD].num_expected,
            )  # fmt: skip

    def direct_files(self) -> DirectFilesRef | None:
        """Return the files that ranks may move blocks to and from past the host pool, if any."""
        pool, config = self.store.disk_pool, self.config
        if pool is None or config.ssd_past_dram == "never":
            return None
        # A rank that sees a part of a slot cannot verify it: the checksum is that of the whole.
        if len(self.shards.storing_ranks) > 1 or self.model.groups:
            return None
        # Nor has it a way past the padding between its shards.
        if self.shards.per_rank > 1 and self.shards.stored_bytes > self.shards.block_bytes:
            return None
        # Packed blocks are unpacked by the disk worker, into DRAM.
        if config.ssd_compression != "none" or self.store.has_packed_slots:
            return None
        has_dram = self.sizes.keeps_on_host
        is_choice = has_dram and config.ssd_past_dram == "auto"
        return DirectFilesRef.of(
            pool.data_fds, pool.slot_bytes, is_writable=not has_dram, is_choice=is_choice
        )

    def identity(self, layout: str) -> KVIdentity:
        """Return what blocks of this cache are in a layout."""
        return KVIdentity.of(self.fingerprint, layout)

    @property
    def kept(self) -> bytes:
        """What other hosts compare: digests of model and layout; empty until that is known."""
        if self.layout is None:
            return b""
        identity = self.identity(self.layout)
        return identity.model + identity.layout

    def adopt_layout(self, layout: str, now: float) -> Clearing[int] | None:
        """Keep blocks of this layout from now on; no rank of another one may be serving.

        Blocks of another layout are no longer found, until their layout is back.

        Returns:
            What is left to be done if the SSD tier was cleared of another layout's blocks.

        Raises:
            ConfigError: The SSD tier holds blocks of this model in another layout, and
                ``ssd_on_mismatch`` is ``refuse``.
        """
        # It is mixed into roots here, and engines do not know it: a scheduler makes a prompt's root
        # before its ranks have told. A match made just before a change would carry the old one.
        identity, clearing = self.identity(layout), None
        if layout == self.layout:
            return None
        pool = self.store.disk_pool
        if pool is not None and pool.identity != identity:
            clearing = self._give_ssd_to(identity, pool)
        self.tasks.adopt_layout(identity.layout, now)
        self.layout = layout
        return clearing

    def _give_ssd_to(self, identity: KVIdentity, pool: DiskPool) -> Clearing[int] | None:
        former, ssd = pool.identity, self.tasks.cache.tiers.by_name[TierName.SSD]
        num_blocks = ssd.num_indexed + ssd.num_expected
        if former is not None and (former.model != identity.model or not num_blocks):
            former = None  # another model's blocks leave as room is needed
        if former is not None and self.config.ssd_on_mismatch == "refuse":
            raise other_layout(self.config, num_blocks, former, identity)
        try:
            pool.adopt(identity)
        except OSError as error:  # the roots keep layouts apart; a restart finds what is recorded
            log_event(
                logger, logging.WARNING, "ssd_layout_not_recorded", error=error,
                effect="a restart may refuse this layout, or look for the former one first",
            )  # fmt: skip
        if former is None:
            return None
        log_event(
            logger, logging.WARNING, "ssd_layout_cleared", found=former.text, now=identity.text
        )
        return self.clear(ssd.name.value)

    def layouts_noted(self, others: Sequence[str]) -> None:
        """Note in which other layouts the remote store has the model."""
        if self.layout is None or not self.tasks.layouts_noted(len(others)):
            return
        own = self.identity(self.layout).text.split("|")
        for other in others:
            parts = [part for part in other.split("|") if part not in own]
            log_event(
                logger, logging.WARNING, "stored_for_another_layout", store="|".join(parts),
                here="|".join(part for part in own if part not in other.split("|")),
                effect="what the remote store has of this model in that layout is not found",
            )  # fmt: skip

    def control(self, call: CacheCall, session: SessionId | None, now: float) -> Clearing[Any]:
        """Carry out a user's call about what is cached.

        Args:
            session: Of the engine that calls; None if it is none.

        Returns:
            The answer as `KVManager` has it: of a look-up tokens by tier, of a pin a `Pin` or None,
            of a delete blocks by tier; and what is left to be done after a delete.

        Raises:
            ValueError: The call makes no sense.
        """
        size = self.config.tokens_per_block
        if self.model.has_states and call.name == "lookup":
            prompts = [prompt.before_last_token(size) for prompt in call.prompts]
            call = msgspec.structs.replace(call, prompts=prompts)
        outcome = self.tasks.control(call, now, session)
        by_tier = {tier.value: count for tier, count in outcome.blocks.items()}
        if call.name == "lookup":
            return Clearing({tier: count * size for tier, count in by_tier.items()})
        if call.name == "unpin":
            return Clearing(bool(outcome.pin_id))
        if call.name == "delete":
            log_event(logger, logging.INFO, "blocks_deleted", blocks=by_tier)
            return self.erase_deleted(by_tier)
        if not outcome.pin_id:
            return Clearing(None)
        ends_at = time.time() + outcome.expires_s - now
        return Clearing(Pin(outcome.pin_id, outcome.num_blocks * size, ends_at))

    def erase_deleted(self, answer: Told) -> Clearing[Told]:
        """Return what is left to be done where blocks were deleted."""
        pool = self.store.disk_pool
        if pool is None:
            return Clearing(answer)
        withheld = self.tasks.withhold_deleted(TierName.SSD)
        ssd = self.tasks.cache.tiers.by_name[TierName.SSD]
        recorded = np.concatenate((ssd.doomed.in_use(), withheld.blocks))
        if len(recorded):
            return Clearing(answer, self.tasks, withheld, recorded, pool, _is_delete=True)
        self.tasks.give_back(withheld)
        return Clearing(answer)

    def clear(self, tier: str | None) -> Clearing[int]:
        """Drop the blocks of one tier that are not in use, or all of all tiers (a reset).

        After a reset nothing that was stored before can be found, also where it is in use or being
        stored, and neither after a restart.

        Raises:
            ValueError: There is no such tier.
        """
        num_dropped = self.tasks.clear(tier)
        log_event(logger, logging.INFO, "tier_cleared", tier=tier or "all", blocks=num_dropped)
        return self.erase(tier, num_dropped)

    def erase(self, tier: str | None, num_dropped: int) -> Clearing[int]:
        """Return what is left to be done where a tier, or all, were emptied."""
        pool = self.store.disk_pool
        if pool is None or tier not in (None, TierName.SSD.value):
            return Clearing(num_dropped)
        withheld = self.tasks.withhold_free(TierName.SSD)
        era = self.tasks.cache.stores.era if tier is None else None
        return Clearing(num_dropped, self.tasks, withheld, withheld.blocks, pool, era)


OpenCache = Callable[[ModelConfig, int, Shards], ServedCache]

TOLD_TTL_S = 3.0
"""What a rank has told counts for this long. Waiting ranks repeat Hello every 0.2 s."""
_MAX_TOLD = 4096  # ranks


class CacheSlot:
    """Opens the cache when its model and the sizes of its blocks are known.

    no model --first engine, or the config--> waits for sizes --the engine's ranks greet--> open
                                       (skipped if the model tells them)

    Args:
        open_cache: Makes the tiers for a model, a number of tokens per block and its shards. Raises
            `ConfigError` if that is impossible, `RegistrationError` or `DirectoryInUseError` if it
            is for now.

    Attributes:
        awaited: What has to be known before the cache opens.
        failure: Why the cache that `expect` announced could not be opened.
    """

    def __init__(self, open_cache: OpenCache, outbox: Outbox) -> None:
        self._open_cache = open_cache
        self._outbox = outbox
        self._told: dict[tuple[str, int], tuple[int, float]] = {}
        """Bytes of a block of ranks that wait, by engine and rank, and when they said so."""
        self._expected: tuple[ModelConfig, int, str | None] | None = None
        """A model, tokens per block, and the engine whose ranks have the sizes; None: any."""
        self.cache: ServedCache | None = None
        self.awaited = ["a model"]
        self.failure: Exception | None = None

    @property
    def tasks(self) -> KVTaskEngine:
        assert self.cache is not None
        return self.cache.tasks

    def expect(self, model: ModelConfig, tokens_per_block: int, engine: str | None) -> None:
        """Open the cache of a model that is known before any engine greets, or once the ranks of
        the engine (None: of any) have told their sizes."""
        if model.sized_by_ranks:
            self._expected = model, tokens_per_block, engine
            self.awaited = [f"rank {rank}" for rank in range(model.num_ranks)]
        else:
            self.open(model, tokens_per_block, "", 0.0)

    def hear(self, hello: HelloRank, now: float) -> None:
        """A rank greets: its size may be what the cache waits for."""
        if self.cache is not None:
            return
        # To the end of the order, by which the oldest are forgotten.
        self._told.pop((hello.engine, hello.rank), None)
        self._told[hello.engine, hello.rank] = hello.block_bytes, now
        while len(self._told) > _MAX_TOLD:  # the oldest of too many are forgotten
            del self._told[next(iter(self._told))]
        if self._expected is None:
            return
        model, tokens_per_block, engine = self._expected
        if engine not in (None, hello.engine):
            return
        try:
            self.open(model, tokens_per_block, hello.engine, now)
        except (FlexCacheError, OSError) as error:
            self.failure, self._expected = error, None

    def open(
        self, model: ModelConfig, tokens_per_block: int, engine: str, now: float
    ) -> ServedCache | None:
        """The cache; the first call decides what it holds.

        Returns:
            None while the model leaves sizes to the ranks and those of the engine have not told
            them all.
        """
        if self.cache is None:
            shards = self._shards(model, tokens_per_block, engine, now)
            if shards is None:
                return None
            self.cache = self._open_cache(model, tokens_per_block, shards)
        return self.cache

    def _shards(
        self, model: ModelConfig, tokens_per_block: int, engine: str, now: float
    ) -> Shards | None:
        if not model.sized_by_ranks:
            return Shards.of_model(model, tokens_per_block)
        # A scheduler sees one stage's layers. An index that could be resized later would cost more
        # than the misses until then: nothing can be moved before the ranks are there.
        sizes: dict[int, int] = {}
        for rank in range(model.num_ranks):
            size, heard_s = self._told.get((engine, rank), (0, 0.0))
            if size and now < heard_s + TOLD_TTL_S:  # one that is silent has given up
                sizes[rank] = size
        self.awaited = [f"rank {rank}" for rank in range(model.num_ranks) if rank not in sizes]
        if self.awaited:
            return None
        per_unit = UnitShape(model.groups, tokens_per_block).blocks_per_unit
        return Shards.of_ranks(model, [per_unit * size for size in sizes.values()])

    def adopt_layout(self, rank: int, layout: str, is_first: bool, now: float) -> str | None:
        """Have the cache keep blocks of a rank's layout; returns why it cannot.

        Args:
            is_first: No other rank serves.
        """
        assert self.cache is not None
        layouts, place = self.cache.layouts, self.cache.shards.of_rank(rank)
        layouts.set(place, layout, is_first)
        if (whole := layouts.whole) is None:
            return None  # the engine does not move anything before all its ranks serve
        former = self.cache.layout
        try:
            clearing = self.cache.adopt_layout(whole, now)
        except FlexCacheError as error:
            # The rank is refused: what it said must not stand against the next one.
            layouts.forget(place)
            return str(error)
        if clearing is not None:  # what a restart may bring back is under its own layout
            self._carry_out(clearing)
        if former != whole:
            self.note_layout()
        return None

    def note_layout(self) -> None:
        """Have the store note which layout the cache keeps blocks in, once that is known."""
        cache = self.cache
        if cache is not None and cache.layout is not None and cache.config.remote_url is not None:
            model = digest(cache.model.model_id)
            self._outbox.instruct(NoteLayout(model, cache.identity(cache.layout).text))

    def erase_deleted(self) -> None:
        """Tasks have let go of blocks that were deleted: erase their records."""
        assert self.cache is not None
        self._carry_out(self.cache.erase_deleted(None))

    def forgotten(self) -> None:
        """The task engine has forgotten everything: make what is recorded on SSD void too."""
        assert self.cache is not None
        self._carry_out(self.cache.erase(None, 0))

    def _carry_out(self, clearing: Clearing[Any]) -> None:
        if clearing.needs_work:
            self._outbox.begin(BackgroundJob(clearing.work, partial(_cleared, clearing)))


def _cleared(clearing: Clearing[Any], error: Exception | None) -> None:
    try:
        clearing.end(error)
    except StorageError as failure:
        log_event(logger, logging.WARNING, "ssd_not_cleared_for_good", error=failure)
