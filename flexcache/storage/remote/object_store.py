"""Object stores (S3, GCS, Azure), through obstore.

An object appears whole or not at all: the store publishes it at the end of the upload. Every
request has the deadline of its batch. A late request is abandoned and cannot write to the caller's
memory any more: only this module's own copy does.

Each block is one request, whatever its size: splitting blocks into ranges or parts gained nothing
with several in flight (benchmarks/results/2026-11-figures.md).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from flexcache.config.remote_url import (
    OptionCheck,
    RemoteUrl,
    StoreKind,
    StoreLimits,
    endpoint_option,
    presentable,
    register,
    text_option,
)  # fmt: skip
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.storage.pieces import Parts, num_bytes_of, scatter
from flexcache.storage.remote.base import (
    MISSING,
    TOO_LATE,
    ObjectOutcome,
    RemoteStore,
    Status,
    StepwiseStore,
    StoreUnavailableError,
    failed,
    seconds_until,
    too_large,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_T = TypeVar("_T")
_CHUNK_BYTES = 1 << 20
_MOST_REASON = 300
_PROBE = "flexcache-probe"  # need not exist
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")  # of S3 and GCS, of Azure
_NO_BUCKET = "the bucket or container does not exist: create it, or correct remote_url"


def open_object_store(url: RemoteUrl, limits: StoreLimits) -> RemoteStore:
    """Open a cloud store and ask it for an object. The usual environment variables supply
    credentials.

    Raises:
        ConfigError: obstore refuses the settings.
        MissingDependencyError: obstore is not installed.
        StoreUnavailableError: It does not answer, or refuses.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise MissingDependencyError(
            "obstore is not installed; install the extra: pip install '.[object-store]'"
        ) from error
    limit = timedelta(seconds=limits.timeout_s)
    settings: dict[str, Any] = dict(url.options)
    if "account" in settings:
        settings["account_name"] = settings.pop("account")
    if url.scheme == "s3" and "endpoint" not in settings:
        settings |= _endpoint_of_environment()
    try:
        client = from_url(
            url.name,
            client_options={
                "timeout": limit,
                "connect_timeout": limit,
                "allow_http": settings.get("endpoint", "").startswith("http://"),
            },
            retry_config={"max_retries": 2, "retry_timeout": limit},
            **settings,
        )
    except BaseError as error:
        raise ConfigError(f"remote_url = {url.name!r}: {_first_line(error)}") from None
    store = ObjectStore(client, url.name, limits.concurrency)
    # The client has connected to nothing yet.
    [found] = store.look([_PROBE], time.monotonic() + limits.timeout_s)
    if found.status is Status.FAILED:
        raise StoreUnavailableError(found.reason)
    return store


def _endpoint_of_environment() -> dict[str, str]:
    # obstore reads these too, but then refuses plain http also on loopback.
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if value := os.environ.get(name):
            if problem := endpoint_option(value):
                raise ConfigError(f"{name} = {presentable(value)!r}: {problem}")
            return {"endpoint": value}
    return {}


class ObjectStore(StepwiseStore):
    """A store that sends up to ``concurrency`` requests at once for each batch."""

    def __init__(self, client: Client, name: str, concurrency: int) -> None:
        import obstore

        self._api = obstore
        self._client = client
        self._concurrency = concurrency
        self.name = name
        self._has_bucket = False
        """Whether the bucket is known to exist."""

    def read_into(
        self, names: Sequence[str], parts: Sequence[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        return self._each(self._read, list(zip(names, parts, strict=True)), deadline)

    def write_from(
        self, names: Sequence[str], parts: Iterable[Parts], deadline: float
    ) -> list[ObjectOutcome]:
        return self._each(self._write, list(zip(names, parts, strict=True)), deadline)

    def discard(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        return self._each(self._delete, [(name,) for name in names], deadline)

    def close(self) -> None:
        """Do nothing: connections close with the last reference."""

    def look(self, names: Sequence[str], deadline: float) -> list[ObjectOutcome]:
        return self._each(self._head, [(name,) for name in names], deadline)

    async def _head(self, name: str) -> ObjectOutcome:
        try:
            meta = await self._api.head_async(self._client, name)
        except FileNotFoundError:  # in a bucket that is missing, so is every object
            await self._require_bucket(name)
            raise
        self._has_bucket = True
        return ObjectOutcome(Status.OK, meta["size"])

    async def _require_bucket(self, name: str) -> None:
        """Raise `StoreUnavailableError` if the bucket does not exist: only the body of an answer,
        which one to HEAD lacks, tells that from an object that does not."""
        if self._has_bucket:
            return
        try:
            await self._api.get_async(self._client, name)
        except FileNotFoundError as error:
            if any(code in str(error) for code in _NO_BUCKET_CODES):
                raise StoreUnavailableError(_NO_BUCKET) from None
        self._has_bucket = True

    async def _read(self, name: str, parts: Parts) -> ObjectOutcome:
        room = num_bytes_of(parts)
        found = await self._api.get_async(self._client, name)
        _, size = found.range
        if size > room:
            return too_large(size, room)
        left = list(parts)
        count = 0
        stream = found.stream(min_chunk_size=_CHUNK_BYTES)
        # Not `async for`: this frame would be in the traceback of the exception that ends it. A
        # thread of the client keeps that until its next call, and the host pool with it.
        while (chunk := await anext(stream, None)) is not None:
            data = memoryview(chunk)
            count += len(data)
            if count > size:  # whatever the header said, the body need not end
                return too_large(count, size)
            left = scatter(data, left)
        return ObjectOutcome(Status.OK, count)

    async def _write(self, name: str, parts: Parts) -> ObjectOutcome:
        try:
            await self._api.put_async(self._client, name, iter(parts), use_multipart=False)
        except FileNotFoundError:
            self._has_bucket = False  # look-ups ask again whether there is one
            return failed(_NO_BUCKET)
        return ObjectOutcome(Status.OK, num_bytes_of(parts))

    async def _delete(self, name: str) -> ObjectOutcome:
        await self._api.delete_async(self._client, name)
        return ObjectOutcome(Status.OK)

    def _each(
        self,
        action: Callable[..., Awaitable[ObjectOutcome]],
        arguments: Sequence[tuple[Any, ...]],
        deadline: float,
    ) -> list[ObjectOutcome]:
        """Apply an action to each object, ``concurrency`` at a time, within the deadline."""
        free = asyncio.Semaphore(self._concurrency)

        async def guarded(*each: Any) -> ObjectOutcome:
            try:
                async with free:
                    return await action(*each)
            except FileNotFoundError:
                return MISSING
            except asyncio.CancelledError:
                return TOO_LATE
            except Exception as error:  # obstore's own classes, or system errors it translated
                error.__traceback__ = None  # as in `_read`
                return failed(_first_line(error))

        async def all_of_them() -> list[ObjectOutcome]:
            tasks = [asyncio.ensure_future(guarded(*each)) for each in arguments]
            _, late = await asyncio.wait(tasks, timeout=seconds_until(deadline))
            for task in late:
                task.cancel()
            return await asyncio.gather(*tasks)

        return asyncio.run(all_of_them()) if arguments else []


def _first_line(error: BaseException) -> str:
    """Return what an error says, without most of the store's answer: that may quote our request and
    its signed headers, and the reason goes to logs and traces."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    said, _, answer = line.partition("<")
    code = re.search("<Code>([^<]{1,80})</Code>", f"<{answer}")
    return said[:_MOST_REASON].strip() + (f" {code[1]}" if code else "")


_OPTIONS: dict[str, dict[str, OptionCheck]] = {
    "s3": {"endpoint": endpoint_option, "region": text_option},
    "gs": {},
    "az": {"account": text_option, "endpoint": endpoint_option},
}
for _scheme, _options in _OPTIONS.items():
    register(
        _scheme,
        StoreKind(
            open=open_object_store,
            form=f"{_scheme}://BUCKET/PREFIX",
            options=_options,
            package="obstore",
            extra="object-store",
        ),
    )
