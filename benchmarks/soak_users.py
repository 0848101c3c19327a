"""Users of the soak: conversations whose turns are known beforehand, so that each answer can be
compared with that of an engine without a cache."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from users import WORDS

FIRST_WORDS, NEXT_WORDS, NUM_TURNS = 220, 130, 6
NUM_ANSWER = 8
TIMEOUT_S = 300.0
TENANTS = ("team-a", "team-b", "")
"""Whose conversations they are, in turn; "" names none."""
WORKER_HEADER = "x-flexcache-worker"


def conversations(num_sessions: int, seed: int) -> list[list[str]]:
    """Return the prompts of each session's turns: each continues the one before it."""
    source = random.Random(seed)
    found = []
    for _ in range(num_sessions):
        words = source.choices(WORDS, k=FIRST_WORDS)
        prompts = []
        for _ in range(NUM_TURNS):
            prompts.append(" ".join(words))
            words = words + source.choices(WORDS, k=NEXT_WORDS)
        found.append(prompts)
    return found


@dataclass(frozen=True)
class Failure:
    at: float
    model: str
    what: str


@dataclass
class Seen:
    """What users saw. Times are of the monotonic clock."""

    num_answers: int = 0
    num_divided: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


async def complete(
    http: aiohttp.ClientSession, url: str, model: str, prompt: str, tenant: str = ""
) -> tuple[str, str, int, int]:
    """Return the engine's address, its answer, and how many tokens were cached, of how many.

    Raises:
        aiohttp.ClientError: It was refused or broke off.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": NUM_ANSWER, "temperature": 0,
        "ignore_eos": True,
        **({"kv_transfer_params": {"flexcache_namespace": tenant}} if tenant else {}),
    }  # fmt: skip
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            text = (await response.text())[:200]
            raise aiohttp.ClientPayloadError(f"{response.status} {text}")
        answer = await response.json()
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        worker = response.headers.get(WORKER_HEADER, "")
        return worker, answer["choices"][0]["text"], cached, usage["prompt_tokens"]


async def ask_all(url: str, model: str, prompts: Sequence[str]) -> dict[str, str]:
    """Return an engine's answer to each prompt."""
    async with client() as http:
        return {p: (await complete(http, url, model, p))[1] for p in prompts}


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


class Users:
    """A closed loop of users, each of whom asks the turns of one conversation after another.

    Args:
        url: The router's.
        sessions: By model.
        expected: By the engine's address and the prompt.
    """

    def __init__(
        self, url: str, sessions: Mapping[str, Sequence[Sequence[str]]],
        expected: Mapping[str, Mapping[str, str]], seed: int,
    ) -> None:  # fmt: skip
        self.seen = Seen()
        self._url = url
        self._sessions = sessions
        self._expected = expected
        self._random = random.Random(seed)

    async def run(self, num_users: int, until: float) -> None:
        """Ask until that time."""
        async with client() as http:
            models = list(self._sessions)
            users = [self._user(http, models[i % len(models)], until) for i in range(num_users)]
            await asyncio.gather(*users)

    async def _user(self, http: aiohttp.ClientSession, model: str, until: float) -> None:
        while True:
            number = self._random.randrange(len(self._sessions[model]))
            for prompt in self._sessions[model][number]:
                if time.monotonic() >= until:
                    return
                await self._ask(http, model, prompt, TENANTS[number % len(TENANTS)])
                await asyncio.sleep(self._random.random())

    async def _ask(self, http: aiohttp.ClientSession, model: str, prompt: str, tenant: str) -> None:
        seen, began = self.seen, time.monotonic()
        try:
            worker, text, cached, length = await complete(http, self._url, model, prompt, tenant)
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.failures.append(Failure(time.monotonic(), model, repr(error)[:200]))
            await asyncio.sleep(1)
            return
        seen.waits_s.append(time.monotonic() - began)
        seen.num_answers += 1
        seen.num_divided += ", " in worker
        seen.num_cached_tokens += cached
        seen.num_prompt_tokens += length
        # Of a divided request the last one answers.
        wanted = self._expected[worker.rpartition(", ")[2]].get(prompt, "another model's answer")
        if text != wanted:
            seen.wrong.append(f"{worker} {model}: {text!r}, not {wanted!r}, to {prompt[-80:]!r}")
