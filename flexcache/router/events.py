"""KV events of all sources, as they are applied to the index. Pure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any

import msgspec

from flexcache.events.wire import (
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    low_64_bits,
)
from flexcache.logs import log_event
from flexcache.router.fleet import Tier
from flexcache.router.index import (
    BlockForm,
    Holder,
    IndexPart,
    KVIndexer,
    Space,
    chain_of,
    pack,
    pack_extra_keys,
)
from flexcache.router.names import DiskNames, NamedBlocks, NamedRun
from flexcache.router.waiting import OnceAMinute

logger = logging.getLogger(__name__)

TIER_OF: Mapping[str | None, Tier] = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.DRAM,
    "CPU_PINNED": Tier.DRAM,
    "CPU_TIER1": Tier.DRAM,
    "CPU_TIER2": Tier.DISK,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
    "FS": Tier.DISK,
}
"""Tiers of the media that vLLM, SGLang, TensorRT-LLM, Dynamo and FlexCache publish."""

_REMOTE = "REMOTE"
_HOST_POOL = "CPU_PINNED"
"""Medium of SGLang's HiCache, which it clears together with its GPU."""
_WHOLE_PREFIX = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache that need all blocks of a prefix. A group of another kind (sliding window, state)
publishes the same names for its own blocks."""
_UNNAMED_KINDS = frozenset({None, "unknown"})
_LOW_64_BITS = (1 << 64) - 1
_MAX_SIZES = 8
_CURSORS = 1 << 32  # for the blocks of one size
_MAX_MEDIA, _MAX_MEDIUM = 16, 32


class KnownSource(msgspec.Struct, frozen=True, array_like=True):
    """What a router knows of a source besides its blocks.

    Attributes:
        source: Its endpoint.
        places: Rank, medium, whether that is remote, and the tier that it stands for.
        groups: Which groups of layers need whole prefixes.
        form: Of its first blocks.
    """

    source: str
    places: list[tuple[int | None, str | None, bool, Tier]]
    groups: dict[int | None, bool]
    form: BlockForm | None


class EventApplier:
    """Keeps an index equal to what its sources publish.

    Args:
        index: Changed by this applier, and by others under other sources' names.

    Attributes:
        applied: Events, by kind: ``stored``, ``removed``, ``cleared``.
        blocks: Blocks in them, by kind.
        ignored: Events that were not applied, by reason: ``type`` or ``medium`` is unknown, the
            ``group`` is not one of full attention, there are too many ``block_size``s, or the
            event is ``malformed``.
        unknown_media: Media that were ignored.
        on_disk: What sources call their blocks below DRAM, where that is needed.
    """

    def __init__(self, index: KVIndexer) -> None:
        self.index = index
        self.applied: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.unknown_media: set[str] = set()
        self.on_disk = DiskNames()
        self._names: dict[BlockForm, NamedBlocks] = {}
        self._runs: set[BlockForm] = set()
        """Forms of runs that were told."""
        self._holders: dict[str, set[Holder]] = {}
        """By source."""
        self._groups: dict[str, dict[int | None, bool]] = {}
        """By source: which groups of layers need whole prefixes."""
        self._forms: dict[str, BlockForm] = {}
        """By source: the form of its first blocks."""
        self._crowded_out: set[str] = set()
        """Sources one of whose sizes was one too many."""
        self._places: dict[tuple[str, int | None, str | None, bool], Holder] = {}
        """By source, rank, medium and whether that is remote."""
        self._num_refused = 0
        """Those that were logged."""
        self._says_full = OnceAMinute()

    @property
    def forms(self) -> list[BlockForm]:
        """Forms of the blocks that may be found."""
        forms = [form for form, names in self._names.items() if names.num_names]
        return forms + [form for form in self._runs if form._replace(run_blocks=1) in forms]

    def form(self, source: str) -> BlockForm | None:
        """Return the form of a source's first blocks; None: it has published none."""
        return self._forms.get(source)

    @property
    def num_waiting(self) -> int:
        """Holdings whose tokens are not known yet."""
        return sum(names.waiting.num_holdings for names in self._names.values())

    @property
    def num_bytes(self) -> int:
        """Estimated memory of index and names."""
        names = sum(names.num_bytes for names in self._names.values())
        return self.index.num_bytes + names

    def holders(self, source: str) -> set[Holder]:
        """Return the holders of a source that published blocks."""
        return self._holders.get(source, set())

    # -- changes ---------------------------------------------------------------------------------

    def apply(self, source: str, batch: EventBatch) -> None:
        """Apply a batch that ``source`` published."""
        rank = batch.data_parallel_rank
        if batch.num_unknown:
            self.ignored["type"] += batch.num_unknown
        for place, events in groupby(batch.events, _place_of_removal):
            if place is not None:
                removals = [event for event in events if isinstance(event, BlockRemoved)]
                self._removed(source, rank, removals)
                continue
            for event in events:
                if isinstance(event, BlockStored):
                    self._stored(source, rank, event)
                else:
                    self._cleared(source, rank)
        if self.index.num_refused > self._num_refused and self._says_full.is_due():
            log_event(
                logger, logging.WARNING, "index_full", max_blocks=self.index.max_blocks,
                refused_blocks=self.index.num_refused - self._num_refused, publisher=source,
                effect="prompts go on without what engines stored since",
                remedy="raise max_blocks, 180 bytes each; or kv_events_runs = true at the caches",
            )  # fmt: skip
            self._num_refused = self.index.num_refused

    def forget(self, source: str) -> None:
        """Drop all blocks of a source: it restarted, its events were lost, or it is gone."""
        for holder in self._holders.pop(source, ()):
            self._forget(holder)
        self._groups.pop(source, None)
        self._forms.pop(source, None)
        self._crowded_out.discard(source)
        self._places = {place: each for place, each in self._places.items() if place[0] != source}

    def sweep(self, num_blocks: int) -> bool:
        """Free the memory of forgotten blocks, a slice at a time.

        Args:
            num_blocks: Visit about this many blocks.

        Returns:
            Whether there is more to do.
        """
        if self.index.sweep(num_blocks):
            return True
        return sum(names.sweep(num_blocks) for names in self._names.values()) > 0

    # -- takeover --------------------------------------------------------------------------------

    def known(self, sources: Iterable[str]) -> list[KnownSource]:
        """Return what is known of these sources."""
        places: dict[str, list[tuple[int | None, str | None, bool, Tier]]] = {}
        for (source, rank, medium, is_remote), holder in self._places.items():
            places.setdefault(source, []).append((rank, medium, is_remote, holder.tier))
        return [
            KnownSource(
                source, places.get(source, []), self._groups.get(source, {}),
                self._forms.get(source),
            )
            for source in sources
        ]  # fmt: skip

    @property
    def runs(self) -> list[BlockForm]:
        """Forms of runs that were told."""
        return list(self._runs)

    def begin(self, known: KnownSource, runs: Iterable[BlockForm]) -> None:
        """Note what another router knows of a source, and the forms of its runs; blocks follow."""
        self._runs.update(islice(runs, _MAX_SIZES))
        for rank, medium, is_remote, tier in known.places:
            holder = Holder(known.source, tier, rank, is_remote)
            self._places[known.source, rank, medium, is_remote] = holder
            self._holders.setdefault(known.source, set()).add(holder)
        self._groups[known.source] = dict(known.groups)
        if known.form is not None:
            self._forms[known.source] = known.form

    def part(self, cursor: int, sources: Container[str]) -> tuple[IndexPart | None, int | None]:
        """Return some blocks of these sources, and where the next ones begin.

        The blocks may change in between: all parts, and then all events since the first one, give
        what is held then.

        Args:
            cursor: 0, or what the call before returned.

        Returns:
            Blocks, if there are any here, and the cursor; None: these were the last.
        """
        number, at = divmod(cursor, _CURSORS)
        if number >= len(self._names):
            return None, None
        form, table = list(self._names.items())[number]
        part, following = table.part(at, sources, form)
        return part, number * _CURSORS + following if following else (number + 1) * _CURSORS

    def take(self, part: IndexPart, sources: Container[str]) -> Iterator[None]:
        """Note blocks of these sources that another router knows, a slice at a time.

        Raises:
            IndexError, ValueError: It makes no sense.
        """
        form = part.form
        if form is None or form.size < 1:
            raise ValueError("its blocks have no size")
        if form not in self._names and len(self._names) < _MAX_SIZES:
            self._names[form] = NamedBlocks(self.index, on_disk=self.on_disk)
        for holder in part.holders:
            if holder.source in sources:
                self._holders.setdefault(holder.source, set()).add(holder)
        if form in self._names:
            yield from self._names[form].take(part, sources)

    def _stored(self, source: str, rank: int | None, event: BlockStored) -> None:
        names = _low_64_bits(event.block_hashes)
        holder = self._holder(source, rank, event)
        if holder is None or not names:
            return
        if not self._is_wanted(source, event):
            self.ignored["group"] += 1
            return
        table = self._table(source, event)
        if table is None:
            return
        self.applied["stored"] += 1
        self.blocks["stored"] += len(names)
        run = self._run(event, names)
        if run is None:
            table.stored_by_name(holder, names)
        else:
            table.stored(holder, run)

    def _removed(self, source: str, rank: int | None, events: list[BlockRemoved]) -> None:
        """Apply consecutive removals from one place: vLLM sends one per block."""
        group = events[0].group_idx
        holder = self._holder(source, rank, events[0])
        if holder is None:
            return
        if not self._groups.get(source, {}).get(group, not group):
            self.ignored["group"] += len(events)
            return
        names = _low_64_bits([name for event in events for name in event.block_hashes])
        self.applied["removed"] += len(events)
        self.blocks["removed"] += len(names)
        for table in self._names.values():
            table.removed(holder, names)

    def _cleared(self, source: str, rank: int | None) -> None:
        """Forget a publisher's blocks.

        An engine means its own memory; the tiers below, reported in the same stream, keep their
        blocks. A source that is no engine means all.
        """
        self.applied["cleared"] += 1
        held = {holder for holder in self.holders(source) if holder.rank == rank}
        own = {holder for holder in held if holder.tier is Tier.GPU}
        own |= held & {self._places.get((source, rank, _HOST_POOL, False))}
        for holder in own or held:
            self.blocks["cleared"] += self.index.num_held(holder)
            self._forget(holder)

    def _forget(self, holder: Holder) -> None:
        self.index.forget(holder)
        for table in self._names.values():
            table.forget(holder)

    # -- reading events --------------------------------------------------------------------------

    def _holder(
        self, source: str, rank: int | None, event: BlockStored | BlockRemoved
    ) -> Holder | None:
        medium, is_remote = event.medium, event.locality == _REMOTE
        holder = self._places.get((source, rank, medium, is_remote))
        if holder is None:
            tier = TIER_OF.get(medium and medium.upper())
            if tier is None:
                self.ignored["medium"] += 1
                if len(self.unknown_media) < _MAX_MEDIA:
                    self.unknown_media.add(str(medium)[:_MAX_MEDIUM])
                return None
            holder = Holder(source, tier, rank, is_remote)
            self._places[source, rank, medium, is_remote] = holder
            self._holders.setdefault(source, set()).add(holder)
        return holder

    def _is_wanted(self, source: str, event: BlockStored) -> bool:
        """Return whether the blocks are of a group that needs whole prefixes.

        A group that no event describes needs them if it is the first. vLLM describes the groups of
        its GPU, and not those of its offloading, which are the same.
        """
        kind, group = event.kv_cache_spec_kind, event.group_idx
        groups = self._groups.setdefault(source, {})
        if kind not in _UNNAMED_KINDS:
            groups[group] = kind in _WHOLE_PREFIX
        return groups.get(group, not group)

    def _table(self, source: str, event: BlockStored) -> NamedBlocks | None:
        """Return the names of blocks of a form; None if there are too many forms.

        vLLM's offloading publishes some blocks with neither tokens nor size: these have the form
        of the source's other blocks.
        """
        lookahead = event.lookahead_token_ids
        form = BlockForm(event.block_size, len(lookahead[0]) if lookahead else 0)
        if not form.size:
            form = self._forms.get(source, form)
        table = self._names.get(form)
        if table is None:
            if len(self._names) >= _MAX_SIZES:
                self._names = {form: each for form, each in self._names.items() if each}
            if form.size < 1:
                self.ignored["malformed"] += 1
                return None
            if len(self._names) >= _MAX_SIZES:
                self.ignored["block_size"] += 1
                self._crowd_out(source, form.size)
                return None
            table = self._names[form] = NamedBlocks(self.index, on_disk=self.on_disk)
        self._forms.setdefault(source, form)
        if event.blocks_a_hash > 1 and len(self._runs) < _MAX_SIZES:
            self._runs.add(form._replace(run_blocks=event.blocks_a_hash))
        return table

    def _crowd_out(self, source: str, block_size: int) -> None:
        if source in self._crowded_out:
            return
        self._crowded_out.add(source)
        log_event(
            logger, logging.WARNING, "block_size_ignored", publisher=source, block_size=block_size,
            known=sorted({form.size for form in self._names}),
            effect="its blocks of this size are not found",
            remedy=f"a router knows blocks of {_MAX_SIZES} sizes at a time: end the publishers of "
            "sizes that no engine has, or give engines of other sizes a router of their own",
        )  # fmt: skip

    def _run(self, event: BlockStored, names: list[int]) -> NamedRun | None:
        """Return what the event says of its blocks' content; None unless it says all."""
        size, tokens, extra_keys = event.block_size, event.token_ids, event.extra_keys
        lookahead = event.lookahead_token_ids or [[]] * len(names)
        count = len(names) * event.blocks_a_hash
        if not tokens or len(tokens) != size * count:
            return None
        if extra_keys is not None and len(extra_keys) != count:
            return None
        width = len(lookahead[0])
        if len(lookahead) != len(names) or any(len(each) != width for each in lookahead):
            return None
        try:
            # That of any other block begins the next one.
            packed, extra = pack([*tokens, *lookahead[-1]]), pack_extra_keys(_own_keys(event))
        except ValueError:
            self.ignored["malformed"] += 1
            return None
        parent = event.parent_block_hash
        return NamedRun(
            chain=chain_of(Space(size, event.lora_name or event.lora_id, width)),
            names=names,
            parent=None if parent is None else low_64_bits(parent),
            packed=packed,
            extra_keys=extra,
            run_blocks=event.blocks_a_hash,
        )

    def check(self) -> None:
        """Raise `InternalError` if index and names disagree with themselves."""
        self.index.check()
        self.on_disk.check()
        for names in self._names.values():
            names.check()


def _place_of_removal(event: Event) -> tuple[str | None, str | None, int | None] | None:
    if not isinstance(event, BlockRemoved):
        return None
    return event.medium, event.locality, event.group_idx


def _low_64_bits(hashes: list[BlockHash]) -> list[int]:
    return [name & _LOW_64_BITS if type(name) is int else low_64_bits(name) for name in hashes]


def _own_keys(event: BlockStored) -> list[Any]:
    """Return what each block depends on besides its tokens and its space; empty: on nothing."""
    extra_keys = event.extra_keys
    if extra_keys is None and event.cache_salt and event.parent_block_hash is None:
        extra_keys = [[event.cache_salt]]
    own = [_without_adapter(keys, event.lora_name) for keys in extra_keys or ()]
    return own if any(own) else []


def _without_adapter(extra_keys: Any, adapter: str | None) -> Any:
    """Drop the adapter's name, which vLLM puts first in each block: it is part of the space."""
    if adapter is None or not isinstance(extra_keys, list | tuple):
        return extra_keys
    return extra_keys[1:] if extra_keys[:1] in ([adapter], (adapter,)) else extra_keys
