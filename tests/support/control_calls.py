"""Calls about what is cached, of a manager or by command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from flexcache import Pin
from flexcache.cli import app

_OPTIONS = {"session_id": "--session", "namespace": "--namespace"}


class ControlCalls:
    """Looks up, pins and deletes.

    Args:
        manager: Called without a ``port``.
        port: Of the cache's HTTP endpoint, which `flexcache cache` asks.
    """

    def __init__(self, manager: Any, port: int | None = None) -> None:
        self._manager = manager
        self._port = port

    def lookup(self, tokens: Sequence[int]) -> dict[str, int]:
        found: dict[str, int]
        if self._port is None:
            found = self._manager.lookup(tokens)
        else:
            found = self._command("lookup", tokens=tokens)["tokens"]
        return found

    def pin(self, tokens: Sequence[int] | None = None, **options: Any) -> Pin | None:
        if self._port is None:
            pin: Pin | None = self._manager.pin(tokens, **options)
            return pin
        ttl = str(options.pop("ttl_s"))
        pinned = self._command("pin", "--ttl", ttl, *_named(options), tokens=tokens)["pin"]
        return None if pinned is None else Pin(**pinned)

    def unpin(self, pin_id: str) -> bool:
        if self._port is None:
            return bool(self._manager.unpin(pin_id))
        return bool(self._command("unpin", pin_id)["unpinned"])

    def delete(self, tokens: Sequence[int] | None = None, **options: Any) -> dict[str, int]:
        deleted: dict[str, int]
        if self._port is None:
            deleted = self._manager.delete(tokens, **options)
            return deleted
        deleted = self._command("delete", *_named(options), tokens=tokens)["deleted_blocks"]
        return deleted

    def _command(self, call: str, *options: str, tokens: Sequence[int] | None = None) -> Any:
        arguments = ["cache", call, "--json", "--endpoint", str(self._port), *options]
        text = ""
        if tokens is not None:
            arguments += ["--tokens", "-"]
            text = json.dumps([int(token) for token in tokens])
        done = CliRunner().invoke(app, arguments, input=text)
        assert done.exit_code in (0, 3), done.output
        return json.loads(done.stdout)


def _named(options: dict[str, str]) -> list[str]:
    """Return the options of the command for those of the manager, with their values."""
    return [word for name, value in options.items() for word in (_OPTIONS[name], value)]
