"""Users of an engine, each of whom asks its next question a while after the last answer.

`Users` decides who asks what and keeps the times, without an engine or a clock; `converse` lets a
vLLM engine of this process answer them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WORDS = (
    "block", "of", "a", "prompt", "that", "cache", "has", "seen", "before", "tier", "0", "1", "2",
    "3", "4", "5", "6", "7", "8", "9",
)  # fmt: skip
"""Each is about a token of the models that `make_models` makes."""

START_S = 0.5
"""Between the first requests of two users: no rush at the start, which would be a miss for all."""

Turn = tuple[list[int], int]
"""Tokens that the user adds to the conversation, and how many the engine answers with."""


@dataclass
class Answer:
    """The times of one request: when the user asked, and when tokens came."""

    session: int
    turn: int
    num_prompt: int
    num_cached: int
    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.asked_at

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.last_at - self.first_at) / max(1, self.num_tokens - 1)


@dataclass
class _User:
    due_at: float
    session: int = -1
    turn: int = 0
    context: list[int] = field(default_factory=list)


class Users:
    """A closed loop: as many sessions are under way as there are users.

    Args:
        sessions: The turns of each; users take them in order.
        think_s: Between an answer and the user's next request.
        apart_s: Between the first requests of two users.
    """

    def __init__(
        self, sessions: Sequence[Sequence[Turn]], num_users: int, think_s: float, now: float,
        apart_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._sessions = sessions
        self._next = 0
        self._think_s = think_s
        self._thinking = [_User(now + number * apart_s) for number in range(num_users)]
        self._asking: dict[str, tuple[_User, Answer]] = {}
        self.answers: list[Answer] = []

    @property
    def are_done(self) -> bool:
        return not self._thinking and not self._asking

    def ask(self, now: float) -> list[tuple[str, list[int], int]]:
        """Return the requests that are due: name, prompt, number of tokens wanted."""
        requests = []
        for user in [user for user in self._thinking if user.due_at <= now]:
            self._thinking.remove(user)
            if user.session < 0 or user.turn == len(self._sessions[user.session]):
                if self._next == len(self._sessions):
                    continue  # the user goes home
                user.session, user.turn, user.context = self._next, 0, []
                self._next += 1
            added, num_wanted = self._sessions[user.session][user.turn]
            user.context = user.context + added
            name = f"{user.session}-{user.turn}"
            answer = Answer(user.session, user.turn, len(user.context), 0, user.due_at)
            self._asking[name] = (user, answer)
            requests.append((name, user.context, num_wanted))
        return requests

    def next_due_at(self) -> float | None:
        return min((user.due_at for user in self._thinking), default=None)

    def hear(
        self, name: str, tokens: Sequence[int], is_last: bool, num_cached: int, now: float
    ) -> None:
        """Note the tokens of a request so far."""
        user, answer = self._asking[name]
        if tokens and not answer.num_tokens:
            answer.first_at = now
        answer.num_tokens, answer.last_at, answer.num_cached = len(tokens), now, num_cached
        if is_last:
            del self._asking[name]
            self.answers.append(answer)
            user.context = user.context + list(tokens)
            user.turn += 1
            user.due_at = now + self._think_s
            self._thinking.append(user)


def converse(
    engine: Any, sessions: Sequence[Sequence[Turn]], num_users: int, think_s: float
) -> tuple[list[Answer], float]:
    """Let the engine (vLLM's `LLMEngine`) answer all sessions; return the seconds it took too."""
    from vllm import SamplingParams

    began = time.monotonic()
    users = Users(sessions, num_users, think_s, began, START_S)
    while not users.are_done:
        for name, prompt, num_wanted in users.ask(time.monotonic()):
            sampling = SamplingParams(temperature=0, max_tokens=num_wanted, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        if engine.has_unfinished_requests():
            outputs, now = engine.step(), time.monotonic()
            for output in outputs:
                tokens = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens or 0
                users.hear(output.request_id, tokens, output.finished, cached, now)
        elif (due_at := users.next_due_at()) is not None:
            time.sleep(max(0.0, due_at - time.monotonic()))
    return users.answers, time.monotonic() - began
