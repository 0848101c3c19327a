"""A rank's context on its GPU, and streams of its own there.

torch hands out 32 streams in turn: one of those would sooner or later be the engine's too, and our
copies would wait for its work, or be captured into its graph.

Each direction has a stream, so that both directions of the link are used at once, and loads by
layer have one, so that they do not come behind loads between steps. Its priority helps kernels
only: copy engines take the copies of all streams in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from flexcache.errors import DeviceLostError
from flexcache.transfer.workers.copy_driver import CudaDriver
from flexcache.transfer.workers.lane import Lane


class CudaStreams:
    """Streams of one device, one per lane. Used by one thread at a time, after `bind`.

    Raises:
        RuntimeError: The driver refused; nothing is left.
    """

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self.device = device
        self._driver = driver
        self._handles: list[int] = []
        self._lanes: dict[Lane, torch.cuda.ExternalStream] = {}
        self._context = driver.open_context(device.index)
        try:
            self.bind()
            for lane in Lane:
                handle = driver.make_stream(is_urgent=lane is Lane.LAYERS)
                self._handles.append(handle)
                self._lanes[lane] = torch.cuda.ExternalStream(handle, device)
        except BaseException:
            for step in self.closing_steps():
                step()
            raise

    def __getitem__(self, lane: Lane) -> torch.cuda.ExternalStream:
        return self._lanes[lane]

    def bind(self) -> None:
        """Set the calling thread's device for torch, and its context for the driver.

        A thread starts on device 0, and torch returns to it after each use of another device: that
        would make a context there, of some hundred MB, in which later calls would run.
        """
        torch.cuda.set_device(self.device)
        self._driver.bind(self._context)

    def settle(self, lane: Lane) -> None:
        """Wait until no copy of a lane is in flight.

        Raises:
            DeviceLostError: The device no longer works.
        """
        try:
            self._lanes[lane].synchronize()
        except Exception as error:
            raise DeviceLostError(f"{self.device} no longer works: {error}") from error

    def synchronizing_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the calls that wait for all copies; each may raise."""
        for stream in self._lanes.values():
            yield stream.synchronize

    def closing_steps(self) -> Iterator[Callable[[], None]]:
        """Yield the calls that give everything back once copies have ended; each may raise."""
        for handle in self._handles:
            yield partial(self._driver.destroy_stream, handle)
        yield partial(self._driver.close_context, self.device.index)
