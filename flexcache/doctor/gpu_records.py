"""Records of a GPU examination: what its child processes answer, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flexcache.storage.host_pool import SegmentRef

COPY_BYTES = (16 << 10, 64 << 10, 2 << 20)
"""Sizes of the copies that are timed: of a layer of a block, and of whole blocks."""

DIRECTIONS = ("H2D", "D2H")


class GpuFound(msgspec.Struct, frozen=True):
    """A GPU as CUDA numbers it.

    Attributes:
        bus_id: PCI address, "0000:3B:00.0".
        used_bytes: Memory used by all processes; None if it cannot be asked for.
    """

    name: str
    bus_id: str
    used_bytes: int | None


class DriverFound(msgspec.Struct, frozen=True):
    """The driver and its GPUs.

    Attributes:
        version: CUDA version that the driver library supports, 12080 for 12.8; None: no library.
        problem: Why the library cannot be loaded or reports no GPU.
    """

    version: int | None
    problem: str
    gpus: Sequence[GpuFound] = ()


class WayTried(msgspec.Struct, frozen=True):
    """A way of copying, between the GPU and memory of the pool's kind.

    Attributes:
        missing: Why it could not be tried; "" if it was.
        failures: What went wrong, by direction.
        rates: GB/s by direction, for each of `COPY_BYTES`; none for a way that failed.
    """

    way: str
    missing: str = ""
    failures: Mapping[str, str] = {}
    rates: Mapping[str, Sequence[float]] = {}

    @property
    def passed(self) -> bool:
        return not self.missing and not self.failures


class GpuTried(msgspec.Struct, frozen=True):
    """Outcome of trying a GPU.

    Attributes:
        refusal: Why a rank could not use it; "" if it could.
        used_bytes: Memory used on each GPU while the copies ran; empty if they did not.
        past_dram: Why there is no path past DRAM to each directory; "" if there is one.
    """

    ways: Sequence[WayTried] = ()
    is_pinned: bool = False
    refusal: str = ""
    used_bytes: Sequence[int | None] = ()
    past_dram: Mapping[str, str] = {}


class TrialRequest(msgspec.Struct, frozen=True):
    """What the child process shall try.

    Attributes:
        gpu: CUDA's number of the GPU.
        segment: Memory to copy from and to.
        directories: Of the SSD tier, where it may be used past DRAM.
    """

    gpu: int
    segment: SegmentRef
    directories: Sequence[str] = ()


def cuda_name(version: int) -> str:
    """Return "12.8" for 12080."""
    return f"{version // 1000}.{version % 1000 // 10}"
