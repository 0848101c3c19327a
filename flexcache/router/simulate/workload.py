"""Workloads of a simulation: generated requests, and traces."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Protocol

from flexcache.errors import TraceError
from flexcache.ids import TaskKind
from flexcache.replay.traces import MooncakeRequest, RecordedTrace, is_mooncake, read_requests
from flexcache.tracing.records import KEY_BYTES, TaskMatched


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request to be simulated.

    Attributes:
        request_id: Unique in the simulation.
        time_s: When it arrives.
        num_tokens: Length of the prompt.
        output_tokens: Length of the answer, at least 1.
        keys: Keys of the prompt's blocks; the last block may be partial.
        session: Conversation it belongs to; None if unknown.
    """

    request_id: str
    time_s: float
    num_tokens: int
    output_tokens: int
    keys: Sequence[Hashable]
    session: Hashable | None = None


class Workload(Protocol):
    """Requests that come at given times, or when others have ended."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a key."""
        ...

    @property
    def num_requests(self) -> int | None:
        """Return how many requests there are; None if it depends on the engines."""
        ...

    def first(self) -> Sequence[SimRequest]:
        """Return the requests that depend on no other; starts over."""
        ...

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        """Return the request that follows one that has ended; it comes at ``now`` or later."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests at given times."""

    requests: Sequence[SimRequest]
    block_tokens: int

    @property
    def num_requests(self) -> int | None:
        return len(self.requests)

    def first(self) -> Sequence[SimRequest]:
        return self.requests

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        return None


BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """How agents behave. Ranges are uniform.

    Attributes:
        system_prompts: How many different ones there are, each of ``system_tokens``.
        turn_tokens: What a turn adds to the prompt, the last answer included.
        mean_turns: Of a conversation; exponential.
        think_s: Mean time between an answer and the next turn; exponential.
        max_tokens: A conversation ends here if not before; another one takes its place.
        start_s: Within which they all begin.
        duration_s: After which no turns begin.
        max_requests: After which no turns begin either.
    """

    num_sessions: int = 120
    system_prompts: int = 5
    system_tokens: int = 4096
    turn_tokens: tuple[int, int] = (1000, 3000)
    output_tokens: tuple[int, int] = (50, 300)
    mean_turns: float = 20.0
    think_s: float = 4.0
    max_tokens: int = 120_000
    start_s: float = 30.0
    duration_s: float = 400.0
    max_requests: int | None = None


class _Session:
    """A conversation, with randomness of its own: policies meet the same ones."""

    def __init__(self, spec: AgentSpec, number: int, seed: int) -> None:
        self.number = number
        self.spec = spec
        self.random = random.Random(f"{seed}/{number}")
        self.system = self.random.randrange(spec.system_prompts)
        self.num_tokens = spec.system_tokens
        self.num_turns = 1 + int(self.random.expovariate(1 / spec.mean_turns))
        self.turn = 0

    def next_turn(self, time_s: float) -> SimRequest | None:
        """Return the next request; None at the end of the conversation."""
        self.num_tokens += self.random.randint(*self.spec.turn_tokens)
        if self.turn == self.num_turns or self.num_tokens > self.spec.max_tokens:
            return None
        self.turn += 1
        shared = self.spec.system_tokens // BLOCK_TOKENS
        blocks = range(-(-self.num_tokens // BLOCK_TOKENS))
        keys = [(-1 - self.system if i < shared else self.number, i) for i in blocks]
        return SimRequest(
            request_id=f"{self.number}.{self.turn}",
            time_s=time_s,
            num_tokens=self.num_tokens,
            output_tokens=self.random.randint(*self.spec.output_tokens),
            keys=keys,
            session=self.number,
        )


class Agents:
    """A closed loop of agents."""

    block_tokens = BLOCK_TOKENS
    num_requests: int | None = None

    def __init__(self, spec: AgentSpec, seed: int = 0) -> None:
        self._spec = spec
        self._seed = seed
        self._sessions: dict[int, _Session] = {}
        self._number = 0
        self._num_left: int | None = None

    def first(self) -> Sequence[SimRequest]:
        rng = random.Random(self._seed)
        self._sessions.clear()
        self._number = 0
        num_first = self._spec.num_sessions
        self._num_left = self._spec.max_requests
        if self._num_left is not None:
            num_first = min(num_first, self._num_left)
            self._num_left -= num_first
        return [self._begin(rng.uniform(0, self._spec.start_s)) for _ in range(num_first)]

    def after(self, request: SimRequest, now: float) -> SimRequest | None:
        session = self._sessions[int(str(request.session))]
        time_s = now + session.random.expovariate(1 / self._spec.think_s)
        if time_s > self._spec.duration_s or self._num_left == 0:
            return None
        if self._num_left is not None:
            self._num_left -= 1
        following = session.next_turn(time_s)
        if following is None:
            del self._sessions[session.number]
            return self._begin(time_s)
        return following

    def _begin(self, time_s: float) -> SimRequest:
        self._number += 1
        session = self._sessions[self._number] = _Session(self._spec, self._number, self._seed)
        return session.next_turn(time_s) or self._begin(time_s)


_SYSTEM_SHARES = 0.46, 0.39, 0.15
_SYSTEM_BLOCKS = 12, 6, 3
_MEAN_TURNS = 5.0
_TURN_TOKENS = 200, 2_400
_OUTPUT_TOKENS = 20, 350
_BETWEEN_TURNS_S = 20.0
_REQUESTS_PER_S = 6.5


def tool_agents(num_requests: int = 12_000, *, load: float = 1.0, seed: int = 0) -> Recorded:
    """Return conversations that begin at random times.

    Args:
        load: Factor of the rate of requests, which is 6.5 per second.
    """
    rng = random.Random(seed)
    duration_s = num_requests / (_REQUESTS_PER_S * load)
    requests: list[SimRequest] = []
    for session in count(1):
        if len(requests) >= num_requests:
            break
        requests += _conversation(rng, session, rng.uniform(0, duration_s))
    requests.sort(key=lambda request: request.time_s)
    return Recorded(requests[:num_requests], BLOCK_TOKENS)


def _conversation(rng: random.Random, session: int, time_s: float) -> Iterator[SimRequest]:
    (system,) = rng.choices(range(len(_SYSTEM_SHARES)), _SYSTEM_SHARES)
    shared = _SYSTEM_BLOCKS[system]
    num_tokens = shared * BLOCK_TOKENS
    for turn in range(1 + int(rng.expovariate(1 / _MEAN_TURNS))):
        num_tokens += rng.randint(*_TURN_TOKENS)
        blocks = range(-(-num_tokens // BLOCK_TOKENS))
        yield SimRequest(
            request_id=f"{session}.{turn}",
            time_s=time_s,
            num_tokens=num_tokens,
            output_tokens=rng.randint(*_OUTPUT_TOKENS),
            keys=[(-1 - system if i < shared else session, i) for i in blocks],
            session=session,
        )
        time_s += rng.expovariate(1 / _BETWEEN_TURNS_S)


def read_trace(
    paths: Sequence[Path], *, load: float = 1.0, num_requests: int | None = None
) -> Recorded:
    """Read a trace: FlexCache's own, or one of requests (`flexcache.replay.traces`).

    Args:
        load: How many times faster than recorded the requests come.
        num_requests: Only the first ones.

    Raises:
        TraceError: The files are not one trace. Names the file and the line.
    """
    is_single = len(paths) == 1 and (paths[0].is_file() or is_mooncake(paths[0]))
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
            raise TraceError(f"{path}, line {number}: the tokens per id are not those of line 1")
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
        return line.session or None
    return chats.setdefault(line.chat_id, chats.get(line.parent_chat_id, line.chat_id))


def _recorded(paths: Sequence[Path]) -> tuple[int, Iterator[SimRequest]]:
    """Return the prompts that were looked up; what was stored beyond one is its answer."""
    trace = RecordedTrace(paths)
    asked: dict[tuple[str, str], TaskMatched] = {}
    most: dict[tuple[str, str], int] = {}
    for record in trace.records(with_keys=True):
        if isinstance(record, TaskMatched):
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


def _keys_of(record: TaskMatched) -> list[Hashable]:
    keys = record.keys
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
