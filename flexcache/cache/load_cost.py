"""Load cost: whether to load or to recompute, by the recent speed of the loads from below DRAM.

A load is estimated to take `max(an op's usual time, blocks / rate)`: the first is the cost of the
store's latency, however few blocks are loaded, the second that of its bandwidth. The rate is that
of all loads of a kind together, over the time in which at least one was running. Both forget the
past with a half-life of a few ops. A kind without recent measurements counts as unknown, so that a
recovery is noticed.

A load past DRAM is given to a rank whole, behind the engine's gate. So each of its ops is measured
from the end of the one before, and the first is not.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from flexcache.errors import InternalError
from flexcache.ids import OpKind, TierName
from flexcache.stats import LoadCostStats

_KEEP = 0.9  # weight of the past, per op
_STALE_AFTER_S = 30.0
_MIN_OPS = 4
_MAX_LANES = 64
_NAMES = {
    OpKind.DISK2H: TierName.SSD.value, OpKind.PEER2H: TierName.PEER.value,
    OpKind.REMOTE2H: TierName.REMOTE.value, OpKind.DISK2D: "SSD past DRAM",
}  # fmt: skip
"""What the measured loads are called."""


def why_recomputed(tier: TierName) -> str:
    """Return the reason under which blocks that are cheaper to recompute are counted."""
    return f"{tier.value.lower()}_slower_than_recompute"


@dataclass(slots=True)
class _Lane:
    running: int = 0
    busy_since_s: float | None = None
    busy_s: float = 0.0
    blocks: float = 0.0
    op_s: float = 0.0
    ops: int = 0
    measured_s: float = 0.0


class LoadCost:
    """Measured costs of loads, by the kind of the ops that read from a tier, and by the peer that
    they read from."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[OpKind, str], _Lane] = {}
        self.blocks_ahead: Callable[[OpKind, bool], int] = lambda kind, is_early: 0
        """How many blocks are loaded before those of a new load by an op of this kind: of one that
        a request waits for, or of an early one."""

    def started(self, kind: OpKind, now: float, peer: str = "") -> None:
        """Record that an op has started."""
        if len(self._lanes) > _MAX_LANES:  # peers come and go
            self._lanes = {
                key: lane for key, lane in self._lanes.items()
                if lane.running or now - lane.measured_s < _STALE_AFTER_S
            }  # fmt: skip
        lane = self._lanes.setdefault((kind, peer), _Lane())
        if lane.running == 0:
            # A load past DRAM waits at its rank for a gate: when its first op began is not known.
            lane.busy_since_s = None if kind.is_direct else now
        lane.running += 1

    def ended(
        self, kind: OpKind, now: float, num_blocks: int, seconds: float, peer: str = ""
    ) -> None:
        """Record that an op ended after ``seconds`` with ``num_blocks`` moved."""
        # Over the time in which any was running: ops that overlap share the bandwidth.
        lane = self._lanes[kind, peer]
        lane.running -= 1
        since, lane.busy_since_s = lane.busy_since_s, now
        if since is None:
            return
        if kind.is_direct:
            seconds = now - since
        if now - lane.measured_s > _STALE_AFTER_S:  # start over: it may have recovered
            lane.busy_s = lane.blocks = lane.op_s = 0.0
            lane.ops = 0
        lane.busy_s = _KEEP * lane.busy_s + (now - since)
        lane.blocks = _KEEP * lane.blocks + num_blocks
        lane.op_s = seconds if lane.ops == 0 else _KEEP * lane.op_s + (1 - _KEEP) * seconds
        lane.ops += 1
        lane.measured_s = now

    def seconds(
        self, kind: OpKind, num_blocks: int, now: float, is_early: bool = False, peer: str = ""
    ) -> float | None:
        """Estimate how long it is until a new load of this many blocks ends; None if unknown."""
        lane = self._lanes.get((kind, peer))
        if lane is None or lane.ops < _MIN_OPS or now - lane.measured_s > _STALE_AFTER_S:
            return None
        if lane.blocks < 0.5:  # nothing arrives: the breaker handles that
            return None
        num_blocks += self.blocks_ahead(kind, is_early)
        return max(lane.op_s, num_blocks * lane.busy_s / lane.blocks)

    def pays(
        self, kind: OpKind, num_blocks: int, prefill_blocks_per_s: float, now: float,
        wait_s: float | None = None, peer: str = "",
    ) -> bool:  # fmt: skip
        """Whether the load is likely to be faster than recomputing the blocks.

        Args:
            prefill_blocks_per_s: Speed of the engine; 0 if unknown.
            wait_s: Of an early load: how long its request is likely to wait before it asks.
        """
        seconds = self.seconds(kind, num_blocks, now, wait_s is not None, peer)
        # Only a load can show how fast loads are.
        if seconds is None:
            return True
        return (seconds - (wait_s or 0.0)) * prefill_blocks_per_s <= num_blocks

    def stats(self) -> dict[str, LoadCostStats]:
        """Return the last measurements, by tier, and by peer."""
        return {
            f"{_NAMES[kind]} {peer}".rstrip(): LoadCostStats(
                blocks_per_s=lane.blocks / lane.busy_s if lane.busy_s > 0 else 0.0,
                seconds_per_op=lane.op_s,
            )
            for (kind, peer), lane in self._lanes.items()
            if lane.ops
        }


_MIN_LOADS = 4
_GAIN = 1.25
_RETRY_EVERY = 32  # loads: the other way may have become faster

WayRule = Literal["auto", "always", "never"]


class LoadWay(Enum):
    """A way from SSD to the GPU."""

    STAGED = "through DRAM"
    DIRECT = "past DRAM"


@dataclass(slots=True)
class _Timed:
    loads: int = 0
    blocks: float = 0.0
    seconds: float = 0.0


class LoadWays:
    """How fast loads from SSD were lately, by their way.

    Both ways are timed, from the launch of a get to the end of its GPU side. A load past DRAM
    leaves nothing there for the next one, so it must be clearly faster. One that fails makes the
    next ones go through DRAM, until it is tried again.

    Args:
        rule: ``auto`` chooses by the times.
    """

    def __init__(self, rule: WayRule = "auto") -> None:
        self._rule = rule
        self._timed = {way: _Timed() for way in LoadWay}
        self._num_chosen = 0
        self._is_failing = False
        """Whether the last load past DRAM failed."""

    def choose(self) -> list[LoadWay]:
        """Return the way of the next load, if its engine's ranks can take either, then the other
        one if it may be taken instead.

        Until both were timed it is the one that was timed less.
        """
        if self._rule != "auto":
            return [LoadWay.DIRECT if self._rule == "always" else LoadWay.STAGED]
        self._num_chosen += 1
        is_retry = self._num_chosen % _RETRY_EVERY == 0
        if self._is_failing:
            return [LoadWay.DIRECT, LoadWay.STAGED] if is_retry else [LoadWay.STAGED]
        is_direct = self._is_direct_next(is_retry)
        return [LoadWay.DIRECT, LoadWay.STAGED] if is_direct else [LoadWay.STAGED, LoadWay.DIRECT]

    def _is_direct_next(self, is_retry: bool) -> bool:
        for way, timed in self._timed.items():
            if timed.loads < _MIN_LOADS:
                return way is LoadWay.DIRECT
        speed = self.blocks_per_s(LoadWay.DIRECT)
        return (speed > _GAIN * self.blocks_per_s(LoadWay.STAGED)) is not is_retry

    def ended(self, way: LoadWay, num_blocks: int, seconds: float) -> None:
        """Record a load of so many blocks from SSD, all of which arrived."""
        timed = self._timed[way]
        self._is_failing &= way is not LoadWay.DIRECT
        timed.loads += 1
        timed.blocks = _KEEP * timed.blocks + num_blocks
        timed.seconds = _KEEP * timed.seconds + seconds

    def failed(self) -> None:
        """Record that a load past DRAM failed, or that it hangs."""
        self._is_failing, self._num_chosen = True, 0

    def blocks_per_s(self, way: LoadWay) -> float:
        """Return the speed of a way; 0 if it was never timed."""
        timed = self._timed[way]
        return timed.blocks / timed.seconds if timed.seconds > 0 else 0.0

    def check(self) -> None:
        """Raise `InternalError` if an invariant does not hold."""
        for way, timed in self._timed.items():
            if timed.blocks < 0 or timed.seconds < 0 or bool(timed.loads) != bool(timed.blocks):
                raise InternalError(f"{way.value}: {timed}")
