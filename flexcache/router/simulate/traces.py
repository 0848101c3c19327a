"""Reads traces of any known format as requests of a simulation."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.replay.traces import MooncakeRequest, RecordedTrace, read_requests
from flexcache.router.simulate.requests import Recorded, SimRequest
from flexcache.tracing.records import KEY_BYTES, Matched


def read_trace(
    paths: Sequence[Path], *, load: float = 1.0, num_requests: int | None = None
) -> Recorded:
    """Read a trace: FlexCache's own, or one file in Mooncake's or Bailian's format.

    Args:
        load: How many times faster than recorded the requests come.
        num_requests: Only the first ones.

    Raises:
        TraceError: The files are not one trace. Names the file and the line.
    """
    is_single = len(paths) == 1 and paths[0].is_file()
    block_tokens, requests = _single(paths[0]) if is_single else _recorded(paths)
    chosen = sorted(islice(requests, num_requests), key=lambda request: request.time_s)
    if not chosen:
        raise TraceError(f"{', '.join(map(str, paths))}: no requests")
    began_s = chosen[0].time_s
    return Recorded(
        [replace(each, time_s=(each.time_s - began_s) / load) for each in chosen], block_tokens
    )


def _single(path: Path) -> tuple[int, Iterator[SimRequest]]:
    try:
        first = next(read_requests(path), None)
    except TraceError as error:
        try:
            return _recorded([path])
        except TraceError as other:
            raise TraceError(f"{error}; {other}") from None
    if first is None:
        raise TraceError(f"{path}: no requests")
    return first.tokens_per_id, _requests_of(path, first.tokens_per_id)


def _requests_of(path: Path, block_tokens: int) -> Iterator[SimRequest]:
    chats: dict[int, int] = {}  # chat -> the first of its conversation
    for number, line in enumerate(read_requests(path), 1):
        if line.tokens_per_id != block_tokens:
            raise TraceError(f"{path}, line {number}: some requests have a chat_id and some do not")
        yield SimRequest(
            request_id=str(number),
            time_s=line.time_s,
            num_tokens=max(line.input_length or len(line.hash_ids) * block_tokens, 1),
            output_tokens=max(line.output_length, 1),
            keys=line.hash_ids,
            session=_session_of(line, chats),
        )


def _session_of(line: MooncakeRequest, chats: dict[int, int]) -> Hashable | None:
    if line.chat_id is None:
        return None
    return chats.setdefault(line.chat_id, chats.get(line.parent_chat_id, line.chat_id))


def _recorded(paths: Sequence[Path]) -> tuple[int, Iterator[SimRequest]]:
    """Return the prompts that were looked up; what was stored beyond one is its answer."""
    trace = RecordedTrace(paths)
    asked: dict[tuple[str, str], Matched] = {}
    most: dict[tuple[str, str], int] = {}
    for record in trace.records(with_keys=True):
        if isinstance(record, Matched):
            request = record.engine, record.request or f"task {record.task}"
            if record.kind is TaskKind.GET:
                asked.setdefault(request, record)
            most[request] = max(most.get(request, 0), record.num_tokens)
    return trace.header.tokens_per_block, (
        SimRequest(
            request_id=f"{number} {record.request}",
            time_s=record.time,
            num_tokens=max(record.num_tokens, 1),
            output_tokens=max(most[request] - record.num_tokens, 1),
            keys=_keys_of(record),
        )
        for number, (request, record) in enumerate(asked.items(), 1)
    )


def _keys_of(record: Matched) -> list[Hashable]:
    keys = record.keys
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
