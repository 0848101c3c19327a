"""TieredCache: the tiers of one model, and the plans that move blocks between them.

A plan is a graph of ops and the leases and pins that keep its blocks in place. It is made by
`TieredCache.loads` or `TieredCache.stores`; the task engine executes it, publishes what arrived,
and ends it with `finish`.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from flexcache.cache.admission import Admission
from flexcache.cache.block_keys import BlockKeys, EngineBlockKeys
from flexcache.cache.direct_stores import DirectStores
from flexcache.cache.early_loads import EarlyLoads
from flexcache.cache.load_cost import LoadCost
from flexcache.cache.load_plan import LoadPlanner
from flexcache.cache.load_ways import LoadWays
from flexcache.cache.plan import Plan
from flexcache.cache.prompt_sessions import PromptSessions
from flexcache.cache.quotas import NO_ROOT
from flexcache.cache.remote_tier import RemoteTier
from flexcache.cache.restore import Records, Restoration, RestoreReport, Seconds
from flexcache.cache.reuse_watch import ReuseWatch
from flexcache.cache.store_plan import StorePlanner
from flexcache.cache.tail_index import TAIL_FIRST, last_tail_key
from flexcache.cache.tier import BlockIds
from flexcache.cache.tiers import Tiers
from flexcache.cache.write_back import DirtyQueue
from flexcache.cache.write_budget import WriteBudget
from flexcache.config.model import UnitShape
from flexcache.errors import InternalError
from flexcache.ids import OpId, TaskKind, TierName

_RESTORED_AT_ONCE = 1 << 16
"""Blocks of a restart that are found from the start; fewer if their prompts are short."""
_RESTORED_A_TURN, _RESTORE_PAUSE_S = 1 << 11, 0.008
"""Blocks that follow at a time, which takes 2 to 4 ms, and the time from one turn to the next."""


def number_ops() -> Iterator[OpId]:
    """Number the ops of one server, from 1."""
    return map(OpId, itertools.count(1))


class TieredCache:
    """Tiers and the planners over them. `build_cache` wires one from a config.

    Args:
        chunk_blocks: Blocks per op if one tier feeds another, so that both work at once.
        max_store_backlog: Host blocks that may wait to be written below; blocks of a put beyond it
            stay on the host tier only.
        admissions: Policies of the tiers that do not take every block.
        write_back: Queues of the tiers with write-back.
        ways: Chooses between loads through DRAM and past it.
        load_cost: Estimates which loads would take longer than recomputing; None to load all.
        shape: How the blocks of several groups fill its units; None for a single group.
        early_load_share: Share of the host tier that early loads may take.
        early_load_ttl_s: How long their blocks wait for the requests that need them.
        keeps_on_host: Whether the host tier is a cache; else it only stages.
        write_budgets: Those of the tiers whose writes per second are limited.
        reuse: The SSD tier's admission, if that depends on which prompts come back.
        op_ids: Numbers the ops.

    Attributes:
        remake: Makes an empty cache of the same kind, whose ops have other numbers.
    """

    def __init__(
        self,
        tiers: Tiers,
        chunk_blocks: int,
        max_store_backlog: int,
        admissions: Mapping[TierName, Admission] | None = None,
        write_back: Mapping[TierName, DirtyQueue] | None = None,
        ways: LoadWays | None = None,
        load_cost: LoadCost | None = None,
        shape: UnitShape | None = None,
        early_load_share: float = 0.5,
        early_load_ttl_s: float = 120.0,
        keeps_on_host: bool = True,
        write_budgets: Mapping[TierName, WriteBudget] | None = None,
        reuse: ReuseWatch | None = None,
        op_ids: Iterator[OpId] | None = None,
    ) -> None:
        op_ids = number_ops() if op_ids is None else op_ids
        chunk_blocks = max(1, chunk_blocks)
        self.tiers = tiers
        self.remake: Callable[[], TieredCache] | None = None
        self._write_budgets = write_budgets or {}
        self.loads = LoadPlanner(tiers, op_ids, chunk_blocks, ways or LoadWays(), load_cost, shape)
        self.stores = StorePlanner(
            tiers, op_ids, chunk_blocks, max_store_backlog, write_budgets or {}, admissions or {},
            write_back or {}, shape,
        )  # fmt: skip
        self.sessions = PromptSessions(tiers, load_cost)
        self.early = EarlyLoads(tiers.host, early_load_share, early_load_ttl_s)
        self.reuse = reuse
        self._restoration: Restoration | None = None
        self._restore_at = 0.0
        self.direct_stores: DirectStores | None = None
        """Plans puts past the host tier, if that only stages."""
        if not keeps_on_host:
            admission = (admissions or {}).get(TierName.SSD)
            budget = self._write_budgets.get(TierName.SSD)
            self.direct_stores = DirectStores(tiers, op_ids, chunk_blocks, admission, budget)

    def successor(self, busy: Mapping[TierName, BlockIds]) -> tuple[TieredCache, Plan]:
        """Return an empty cache in place of this one, which an error has left in doubt.

        As after a reset nothing that it had can be found, and another era of the SSD tier begins.

        Args:
            busy: Blocks that executors are still reading or writing.

        Returns:
            The cache, and a plan that keeps the busy blocks until it is finished.
        """
        if self.remake is None:
            raise InternalError("a cache that `build_cache` has not made cannot be replaced")
        cache = self.remake()
        cache.tiers.succeed(self.tiers)
        cache.stores.era = self.stores.era + 1
        plan = cache.plan_nothing(TaskKind.STORE, EngineBlockKeys(NO_ROOT, (), 0), 0, 0, "")
        for name, blocks in busy.items():
            plan.stores[name] = cache.tiers.by_name[name].reserve_exactly(blocks)
        return cache, plan

    def keep_journal(self, tokens_per_block: int) -> None:
        """Record, from now on, what every tier stores and loses."""
        self.tiers.keep_journal(tokens_per_block)
        self.stores.keep_content(tokens_per_block)

    def plan_nothing(
        self, kind: TaskKind, keys: BlockKeys, start: int, stop: int, reason: str
    ) -> Plan:
        """Plan a get that must be a miss, or a put that is dropped, for ``reason``."""
        plan = Plan(kind, keys.root, start, start)
        self.tiers.num_holders += 1
        if kind is TaskKind.PUT and stop > start:
            plan.dropped[reason] = stop - start
        return plan

    def publish_staging(self, plan: Plan, num_ok: int, num_units_ok: int = 0) -> None:
        """Make the first ``num_ok`` staged blocks findable, and the tail if all its units are
        there: they hold their bytes."""
        if plan.staging is not None:
            self.tiers.host.publish(plan.staging, num_ok)
        if plan.tail is not None and plan.tail.staging is not None:
            self.tiers.host.publish(plan.tail.staging, num_units_ok)

    def publish_store(self, plan: Plan, name: TierName, num_ok: int, num_units_ok: int = 0) -> None:
        """Likewise for what was written to a lower tier."""
        tier = self.tiers.by_name[name]
        if isinstance(tier, RemoteTier) and tier.root_at_store(plan.root) != plan.remote_root:
            num_ok = num_units_ok = 0  # the tier was cleared meanwhile and now uses other names
        if self.tiers.is_retired(plan.root):
            num_ok = num_units_ok = 0  # it would count as used now, before what is of use
        if name in plan.stores:
            lease = plan.stores[name]
            tier.publish(lease, num_ok)
            lease.is_given_up = plan.has_failed and not plan.is_put_off
        if plan.tail is not None and name in plan.tail.stores:
            tier.publish(plan.tail.stores[name], num_units_ok)

    def discard_bad_block(self, plan: Plan, name: TierName, position: int) -> None:
        """Drop the task's block ``position`` from a tier where reading it failed, or the tail."""
        tier = self.tiers.by_name[name]
        if plan.tail is not None and position >= TAIL_FIRST:
            tier.discard_tail(plan.root, plan.tail.key)
            key = last_tail_key(plan.tail.key, len(plan.tail.units))
        else:
            key = plan.load_keys[position - plan.load_start]
            tier.discard(plan.root, key)
        if isinstance(tier, RemoteTier):
            tier.learn_absent(plan.root, key, self.tiers.now)

    def finish(self, plan: Plan) -> None:
        """End the plan and free all that it held: every op has ended or was never started."""
        plan.let_go(self.tiers.host)
        if plan.num_reserved or plan.stores:  # else it writes nothing below
            self.stores.release(plan)
        self.tiers.num_holders -= 1

    def restore(self, records: Records, ages_s: Seconds, now: float) -> RestoreReport:
        """Index the blocks of SSD slots that outlived the last process (`Restoration`).

        Those used last are found at once; the others follow in `catch_up`.

        Args:
            ages_s: How long ago each record was written; it is dropped if that was too long.
        """
        ssd = self.tiers.by_name[TierName.SSD]
        self.tiers.advance(now)
        restoration = Restoration(ssd, records, now - ages_s, _RESTORED_AT_ONCE)
        ssd.expire_all(now)
        self._restoration = None if restoration.is_over else restoration
        self._restore_at = now + _RESTORE_PAUSE_S
        return restoration.report

    def catch_up(self, now: float) -> None:
        """Do what no answer waits for: record look-ups, and index more blocks of a restart."""
        self.tiers.settle()
        if self._restoration is None or now < self._restore_at:
            return
        self._restoration.go_on(_RESTORED_A_TURN)
        self._restore_at = now + _RESTORE_PAUSE_S
        if self._restoration.is_over:
            self._restoration = None

    def clear(self, tier: str | None) -> int:
        """Clear a tier, or all (`Tiers.clear`); return how many unheld blocks were dropped.

        Raises:
            ValueError: There is no such tier.
        """
        self.early.forget()
        num_dropped = sum(len(blocks) for blocks in self.tiers.clear(tier).values())
        self.early.settle(self.tiers.now)  # what they waited for may not come any more
        return num_dropped

    def tick(self, now: float) -> None:
        """Let time pass: blocks expire, and budgets of writes grow."""
        self.tiers.advance(now)
        expiry_s = self.tiers.host.next_expiry
        self.tiers.expire(now)
        if expiry_s is not None and expiry_s <= now:
            self.early.let_go_expired(now)

    def next_deadline(self) -> float | None:
        """When something is due: to `tick`, to `catch_up`, or for `stores` to write back."""
        times = [tier.next_expiry for tier in self.tiers]
        times += [self.stores.throttled_until(tier.name) for tier in self.tiers.lower]
        if self._restoration is not None:
            times.append(self._restore_at)
        return min((time for time in times if time is not None), default=None)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return occupancy and counters of each tier."""
        return {
            tier.name.value: {
                **tier.stats(),
                "available": int(tier.name not in self.tiers.unavailable),
                **self.stores.stats_of(tier.name),
                **self._write_limit(tier.name),
            }
            for tier in self.tiers
        }

    def _write_limit(self, name: TierName) -> dict[str, int]:
        budget = self._write_budgets.get(name)
        return {} if budget is None else {"write_limit_bytes_per_s": int(budget.bytes_per_s)}

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold. O(capacity)."""
        self.tiers.check()
        self.sessions.check()
        self.early.check()
        self.loads.ways.check()
        for budget in self._write_budgets.values():
            budget.check()
        if not self.tiers.num_holders and self.stores.backlog:
            raise InternalError(f"backlog without a plan: {self.stores.backlog} blocks")
