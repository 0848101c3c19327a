"""A linker of SGLang whose server is killed at a chosen moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster import kill
from sglang.srt.runtime_context import get_parallel

from flexcache.integration.sglang import FlexCacheLinker


class KillingLinker(FlexCacheLinker):
    """Kills the server of a rank when the file ``METHOD.RANK`` is beside the server's socket, just
    before it does what the method does."""

    def load(self, *arguments: Any) -> bool:
        self._kill("load")
        return super().load(*arguments)

    def start_layer_wise_loading(self) -> int:
        if self._queued:
            self._kill("start")
        return super().start_layer_wise_loading()

    def _kill(self, method: str) -> None:
        socket = Path(self.cache.manager.endpoint.removeprefix("ipc://").split("#")[0])
        order = socket.parent / f"{method}.{get_parallel().tp_rank}"
        if order.exists():
            order.unlink()
            kill(self.cache.manager.stats()["server_pid"])
