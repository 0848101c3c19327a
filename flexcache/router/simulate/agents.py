"""Generated agents: each sends its next turn when it has worked on the answer to the last."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from flexcache.router.simulate.requests import SimRequest

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
