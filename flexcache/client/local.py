"""The cache of one engine, kept in its scheduler's own process."""

from __future__ import annotations

from typing import Any

from flexcache.cache.journal import Change
from flexcache.client.tasks import ClientTasks
from flexcache.config import CacheConfig, ModelConfig
from flexcache.ids import PromptDetail
from flexcache.server.local_session import LocalSession
from flexcache.server.operator import open_http
from flexcache.server.server import KVServer
from flexcache.tasks.stats import to_plain


class LocalTransport(LocalSession):
    """The engine's session, and the life of the server that is its alone.

    Calls and answers are method calls under the server's lock.
    """

    def __init__(
        self, endpoint: str | None, model: ModelConfig, config: CacheConfig, engine: str
    ) -> None:
        super().__init__(
            KVServer(config, endpoint, model=model, engine=engine, open_http=open_http)
        )
        self.prompt_detail: PromptDetail = config.prompt_detail
        self._engine = engine

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def fence_path(self) -> str | None:
        return self.server.fence_path(self._engine)

    def start(self, tasks: ClientTasks) -> None:
        ids = self.server.start(tasks)
        assert ids is not None
        self.ids = ids
        with self.server.lock:  # later names come after this one
            weights = self.server.hub.weights.of(self._engine)
            tasks.renamed(weights.generation, weights.version)

    def is_ready(self) -> bool:
        return not self.server.stopping and not self.server.missing(self._engine)

    def wait_ready(self, timeout: float | None) -> None:
        self.server.wait_ready(self._engine, timeout)

    def take_changes(self) -> list[Change]:
        return self.server.take_changes()

    def clear(self, tier: str | None) -> int:
        return self.server.clear(tier, self._engine)

    def new_weights(self, version: str) -> None:
        self.server.new_weights(self._engine, version)

    def stats(self) -> dict[str, Any]:
        return to_plain(self.server.stats(self.ids.session))

    def check(self) -> None:
        if not self.server.is_open:
            return
        with self.server.lock, self.server.session() as tasks:
            tasks.check()

    def close(self) -> None:
        self.server.shutdown()
