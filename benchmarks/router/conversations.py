"""Conversations of several turns, asked of OpenAI-compatible servers over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import router_path  # noqa: F401
from users import WORDS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the conversations look like. Lengths in words, each about a token."""

    num_sessions: int = 24
    num_turns: int = 6
    first_words: int = 800
    next_words: int = 120
    output_tokens: int = 8


@dataclass(slots=True)
class Answer:
    """What one request saw.

    Attributes:
        predicted: Cached tokens that the router predicted; None if it did not say.
        cached: Cached tokens that the engine reported; None if it did not.
    """

    session: int
    turn: int
    status: int
    ttft_s: float
    e2e_s: float
    worker: str = ""
    prompt_tokens: int | None = None
    predicted: int | None = None
    cached: int | None = None
    text: str = ""

    def take_head(self, response: aiohttp.ClientResponse) -> None:
        """Note the status, and what a router says in the header."""
        self.status = response.status
        self.worker = response.headers.get("x-flexcache-worker", "")
        predicted = response.headers.get("x-flexcache-matched-tokens")
        self.predicted = None if predicted is None else int(predicted)


@dataclass(slots=True)
class Session:
    """A conversation: each turn's prompt is the whole of it so far."""

    number: int
    random: random.Random
    shape: Shape
    text: str = ""
    num_asked: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_asked == self.shape.num_turns

    @classmethod
    def whole_text(cls, shape: Shape) -> str:
        """Return an example of what the user says in one conversation."""
        session = cls(0, random.Random(0), shape)
        while not session.is_over:
            session.next_prompt()
        return session.text

    def next_prompt(self) -> str:
        count = self.shape.next_words if self.num_asked else self.shape.first_words
        self.num_asked += 1
        self.text += " ".join(self.random.choices(WORDS, k=count)) + " "
        return self.text


@dataclass
class Conversations:
    """Asks one server the turns of many sessions.

    Args:
        url: Base URL of the server, a router or an engine.
        seed: Decides lengths of pauses and the order of the sessions.
        text_seed: Decides the texts.
    """

    url: str
    model: str
    shape: Shape
    seed: int
    text_seed: int
    answers: list[Answer] = field(default_factory=list)

    async def run(self, rate: float | None, concurrency: int = 8) -> float:
        """Ask all turns; return the seconds it took.

        Args:
            rate: Requests per second, with Poisson arrivals; each goes to a random session that
                waits for no answer. None: as many as ``concurrency`` at a time.
        """
        arrivals = random.Random(self.seed)
        idle, running = list(self._sessions()), set[asyncio.Task[Session]]()
        began = due = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while idle or running:
                if rate is not None:
                    due += arrivals.expovariate(rate)
                    await asyncio.sleep(due - time.monotonic())
                while running and (not idle or (rate is None and len(running) >= concurrency)):
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    idle += self._collect(running)
                idle += self._collect(running)
                if idle:
                    session = idle.pop(arrivals.randrange(len(idle)))
                    running.add(asyncio.create_task(self._ask(client, session)))
        return time.monotonic() - began

    def _sessions(self) -> Sequence[Session]:
        return [
            Session(i, random.Random(self.text_seed * 1_000_003 + i), self.shape)
            for i in range(self.shape.num_sessions)
        ]

    @staticmethod
    def _collect(running: set[asyncio.Task[Session]]) -> Sequence[Session]:
        done = [task for task in running if task.done()]
        running.difference_update(done)
        sessions = [task.result() for task in done]
        return [session for session in sessions if not session.is_over]

    async def _ask(self, client: aiohttp.ClientSession, session: Session) -> Session:
        turn, prompt = session.num_asked, session.next_prompt()
        answer = await complete(client, self.url, self.model, prompt, self.shape.output_tokens)
        answer.session, answer.turn = session.number, turn
        session.text += answer.text
        self.answers.append(answer)
        return session


async def complete(
    client: aiohttp.ClientSession, url: str, model: str, prompt: str | list[int], max_tokens: int
) -> Answer:
    """Stream one completion."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began = time.monotonic()
    answer = Answer(-1, -1, 0, 0.0, 0.0)
    async with client.post(f"{url}/v1/completions", json=body) as response:
        answer.take_head(response)
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if chunk["choices"] and not answer.ttft_s:
                answer.ttft_s = time.monotonic() - began
            answer.text += "".join(choice["text"] for choice in chunk["choices"])
            if usage := chunk.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                answer.cached = details.get("cached_tokens")
    answer.e2e_s = time.monotonic() - began
    return answer
