"""The cache of one engine, kept in its scheduler's own process."""

from __future__ import annotations

from typing import Any

from flexcache.cache.journal import Change
from flexcache.config import CacheConfig, ModelConfig
from flexcache.server.operator import open_http
from flexcache.server.server import KVServer
from flexcache.server.session_calls import SessionCalls


class LocalCache(SessionCalls):
    """The engine's session, and the life of the server that is its alone."""

    def __init__(
        self, endpoint: str | None, model: ModelConfig, config: CacheConfig, engine: str
    ) -> None:
        super().__init__(
            KVServer(config, endpoint, model=model, engine=engine, open_http=open_http)
        )
        self.fingerprint = model.fingerprint(config.tokens_per_block)
        self.wanted = config.wanted
        self._engine = engine

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def start(self) -> None:
        self.ids = self.server.start()

    def is_ready(self) -> bool:
        return not self.server.stopping and not self.server.missing(self._engine)

    def wait_ready(self, timeout: float | None) -> None:
        self.server.wait_ready(self._engine, timeout)

    def report_prefill(self, blocks_per_s: float) -> None:
        with self.server.session() as tasks:
            assert self.ids is not None
            tasks.sessions.report_prefill(self.ids.session, blocks_per_s)

    def take_changes(self) -> list[Change]:
        return self.server.take_changes()

    def stats(self) -> dict[str, Any]:
        assert self.ids is not None
        return self.server.stats(self.ids.session)

    def check(self) -> None:
        with self.server.session() as tasks:
            tasks.check()

    def shutdown(self) -> None:
        self.server.shutdown()
