"""Admission: decides which blocks are worth writing to a tier below the host.

    Selective     blocks seen for the second time; old sightings do not count
    ReuseWatch    every block, except while nothing that is written comes back

A tier without an admission is written through: it gets every block, at once.

A key stands for a whole prefix, and seeing a prompt means seeing all its prefixes: the number of
sightings never grows along a prompt. The blocks seen often enough are therefore a prefix too, and
past prompts are remembered like a tier's contents: in a prefix index in LRU order, searched by
bisection. Its bound acts as the decay: a block not seen again while this many others were seen
starts from zero.

A large tier is judged by a *sample*, every ``stride``-th block of each prompt, which keeps prefixes
prefixes and takes far less memory than the tier's own index. (Sampling whole prompts by a hash of
their first key fails: all prompts with the same system prompt have the same first key.)

Pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

from typing import Protocol

from flexcache.cache.block_keys import BlockKeys, PromptKeys, SampledKeys
from flexcache.cache.plan import Plan
from flexcache.cache.prefix_index import Shadow
from flexcache.cache.tiers import Tiers
from flexcache.ids import TierName

SAMPLED_BLOCKS = 4096
"""A tier of this many blocks is judged whole; a larger one by a sample of at least as many."""
MAX_STRIDE = 32
SIGHTINGS_PER_BLOCK = 4
"""Blocks whose sightings are remembered, per block of the tier: for a small tier it helps to know
which blocks came back after several times its size."""


class Admission(Protocol):
    """Decides, prompt by prompt, what is written to a tier."""

    @property
    def why_refused(self) -> str | None:
        """The reason for which refused blocks count as dropped; None: they do not."""

    def admit(self, keys: BlockKeys, stop: int, start: int = 0, retain_s: float = 0.0) -> int:
        """Record that a prompt's first ``stop`` blocks were seen; return how many to write.

        Each block counts as seen once per call, except for those before ``start``: an earlier call
        for the same request has recorded them and admitted what it would.

        Args:
            retain_s: As in `Tier.reserve`.
        """

    def stats(self) -> dict[str, int]:
        """Return counters since construction."""


class Selective:
    """Admits blocks that are seen for the second time.

    Prompts are sampled: the blocks between two sampled ones count as seen if the first does, and a
    prompt too short to have one is admitted.

    Args:
        capacity: Blocks of the tier.
    """

    why_refused = None

    def __init__(self, capacity: int) -> None:
        self._stride = stride_for(capacity)
        self._seen = Shadow(SIGHTINGS_PER_BLOCK * (capacity // self._stride))
        self._seen_blocks = 0
        self._refused_blocks = 0

    def admit(self, keys: BlockKeys, stop: int, start: int = 0, retain_s: float = 0.0) -> int:
        sample = sample_of(keys, stop, self._stride)
        num_before = len(range(sample.positions.start, start, self._stride))
        num_proven = self._seen.see(sample, sample.num_blocks)
        if num_before and num_proven <= num_before:
            num_proven = 0  # those before were counted by the request's earlier put
        admitted = stop  # a sampled block stands for those up to the next one
        if num_proven < sample.num_blocks:
            admitted = sample.positions[num_proven] if num_proven else 0
        self._seen_blocks += stop - start
        self._refused_blocks += stop - max(start, admitted)
        return admitted

    def stats(self) -> dict[str, int]:
        return {"seen_blocks": self._seen_blocks, "refused_blocks": self._refused_blocks}


def sample_of(keys: BlockKeys, stop: int, stride: int) -> SampledKeys:
    """Return every ``stride``-th of a prompt's first blocks, from half a stride on."""
    return SampledKeys(keys, range(stride // 2, stop, stride))


def stride_for(capacity: int) -> int:
    """Return the distance between sampled blocks of a tier."""
    return min(max(1, capacity // SAMPLED_BLOCKS), MAX_STRIDE)


MIN_MISSED_BLOCKS = 8192
"""Fewer blocks than these, asked for in vain, say nothing about the traffic."""
_MORE_REPLACEMENTS, _MOST_REPLACEMENTS = 4, 64


class ReuseWatch:
    """An `Admission` to the SSD tier below a host tier that stores everything.

    writes ------ nothing found while the tier was replaced as a whole ------> only notes prompts
      ^                                                                               |
      +-- a prompt is found in any tier or in the engine, or one that was noted comes back

    Prompts that never repeat, as of a batch job, wear a device and gain nothing. Once the SSD tier
    has evicted as much as it holds since a prompt was last found, whatever comes back comes later
    than it is kept. DRAM goes on to store all prompts, so one that returns soon is found there, and
    ends this. Of what is not written the keys are noted, for as many blocks as the tier holds, and
    forgotten once the tier has been replaced since: a noted prompt that comes back would have been
    found on SSD. After a pause that cost such a return, the tier must be replaced four times as
    often before the next one, so traffic with rare returns loses few of them; after one that cost
    none, as often as before that.
    """

    why_refused = "ssd_nothing_returns"

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tier = tiers.by_name[TierName.SSD]
        self._stride = stride_for(self._tier.capacity)
        self._is_paused = False
        self._noted: Shadow | None = None
        """What the last pause left out, while the tier would have it."""
        self._has_cost = False
        """Whether any of that has come back."""
        self._num_missed = 0
        self._num_replacements = 1
        self._evicted_before = 0
        """Blocks, when the first was missed since a prompt was found."""
        self._evicted_at_end = 0
        """Likewise when the last pause ended."""
        self._num_returns = 0

    def looked_up(self, keys: PromptKeys, plan: Plan, stop: int) -> None:
        """Record how an engine's request for some of a prompt's first ``stop`` blocks was planned.

        What the engine has already, or continues, was there before.
        """
        self._forget_old_notes()
        if plan.stop or keys.parent_key is not None or self._is_cached(keys):
            self._go_on()
        elif self._has_noted(keys, stop):
            self._num_returns += 1
            self._has_cost = True
            self._go_on()
        else:
            # Counted from the first miss: what was evicted while prompts were found says nothing.
            if not self._num_missed:
                self._evicted_before = self._tier.counters.evicted_blocks
            self._num_missed += stop

    def admit(self, keys: BlockKeys, stop: int, start: int = 0, retain_s: float = 0.0) -> int:
        """Return how many of a prompt's first ``stop`` blocks to write; note what is not written.

        What is to be kept for a while is written, and so is what needs no other's room.
        """
        self._forget_old_notes()
        if retain_s > 0 or self._tier.pool.num_free >= stop - start or not self._is_useless():
            return stop
        sample = sample_of(keys, stop, self._stride)
        if not sample.num_blocks:
            return stop  # too short to be noted
        # Only the SSD pauses: a DRAM store is cheap and keeps all that returns soon. When DRAM
        # paused too, traffic behind a batch job lost every first return, and a namespace its
        # quota's room. To write every eighth put instead costs an eighth and loses seven of eight
        # first returns.
        if self._noted is None:
            self._noted = Shadow(self._tier.capacity // self._stride)
        self._is_paused = True
        self._noted.see(sample, sample.num_blocks)
        return 0

    def stats(self) -> dict[str, int]:
        return {"writes_paused": int(self._is_paused), "refused_returns": self._num_returns}

    def _go_on(self) -> None:
        self._num_missed = 0
        if self._is_paused:
            self._is_paused = False
            self._evicted_at_end = self._tier.counters.evicted_blocks

    def _is_useless(self) -> bool:
        """Whether nothing was found while the tier was replaced often enough."""
        if self._is_paused:
            return True
        num_evicted = self._tier.counters.evicted_blocks - self._evicted_before
        return (
            self._num_missed >= MIN_MISSED_BLOCKS
            and num_evicted >= self._num_replacements * self._tier.capacity
        )

    def _forget_old_notes(self) -> None:
        """Once the tier was replaced since a pause, learn from what that has cost."""
        if self._noted is None or self._is_paused:
            return
        if self._tier.counters.evicted_blocks - self._evicted_at_end < self._tier.capacity:
            return
        if self._has_cost:
            more = _MORE_REPLACEMENTS * self._num_replacements
            self._num_replacements = min(more, _MOST_REPLACEMENTS)
        else:
            self._num_replacements = max(1, self._num_replacements // _MORE_REPLACEMENTS)
        self._noted, self._has_cost = None, False

    def _has_noted(self, keys: BlockKeys, stop: int) -> bool:
        """Whether the beginning of a prompt was noted; it is then no longer."""
        sample = sample_of(keys, stop, self._stride)
        if self._noted is None or not sample.num_blocks:
            return False
        if not self._noted.index.contains(sample.root, sample.key(0)):
            return False
        self._noted.index.discard(sample.root, sample.key(0))
        return True

    def _is_cached(self, keys: BlockKeys) -> bool:
        """Whether a tier has the beginning of a prompt: it may not be worth loading."""
        key = keys.key(0)
        return any(tier.index.contains(keys.root, key) for tier in self._tiers)
