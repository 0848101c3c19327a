"""The control plane in this process: what a caller of `KVManager` waits for.

No byte is moved: blocks are published as if an engine's worker had copied them. The pump thread
runs beside the caller, as in an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from flexcache.bench.suite import Case, Result, Unsupported, sample_beside
from flexcache.cache.prompt import Mask
from flexcache.client.transport import LocalTransport
from flexcache.config import CacheConfig, ModelConfig
from flexcache.errors import ConfigError
from flexcache.ids import TaskKind
from flexcache.manager import KVManager
from flexcache.protocol.messages import engine_name
from flexcache.server.server import KVServer
from flexcache.tasks.instructions import device

BLOCK = 16
TURN = 256
"""Tokens that each turn of the conversation adds."""
LONGEST_TURN = 500
MODEL = ModelConfig("bench", 1, 1, 8, torch.uint8)
KEY_BYTES = 32
SLACK_BLOCKS = 20_000

_LIMITS_US = {"all cached": 70, "first three quarters cached": 107, "none cached": 17}
"""At `_LIMITED` tokens, from tokens; with `block_keys` `_KEYS_LIMIT_US`, whatever is cached."""
_KEYS_LIMIT_US = 25
_LIMITED = 131_072


@dataclass(frozen=True)
class Prompt:
    """Tokens and, where the engine is to have hashed them, the keys of their blocks."""

    tokens: npt.NDArray[np.int64]
    keys: list[bytes] | None = None

    @classmethod
    def random(cls, seed: int, num_tokens: int, *, has_keys: bool) -> Prompt:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 100_000, num_tokens)
        if not has_keys:
            return cls(tokens)
        data = random.bytes(KEY_BYTES * (num_tokens // BLOCK))
        return cls(tokens, [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)])

    def first(self, num_tokens: int) -> Prompt:
        keys = None if self.keys is None else self.keys[: num_tokens // BLOCK]
        return Prompt(self.tokens[:num_tokens], keys)

    @property
    def kind(self) -> str:
        return "from tokens" if self.keys is None else "with block_keys"

    def least_work_name(self, num_new: int) -> str:
        parts = ("xxh3-128" if self.keys is None else "", "dict" if num_new else "", "mask")
        return ", ".join(filter(None, parts))

    def least_work(self, num_cached: int, num_new: int) -> None:
        """Do the least work that finding and storing this many tokens takes.

        The tokens found are hashed once, those behind them block by block; the new keys go into a
        table; and the answer is a mask.
        """
        end = num_cached + num_new
        if self.keys is None:
            data = memoryview(self.tokens.view(np.uint8).data)
            hasher = xxhash.xxh3_128(data[: 8 * num_cached])
            keys = [hasher.digest()]
            for start in range(8 * num_cached, 8 * end, 8 * BLOCK):
                hasher.update(data[start : start + 8 * BLOCK])
                keys.append(hasher.digest())
        else:
            keys = self.keys[num_cached // BLOCK : end // BLOCK]
        dict.fromkeys(keys)
        mask = np.zeros(len(self.tokens), np.bool_)
        mask[:end] = True


class Caller:
    """Someone who calls a manager of their own, and checks every answer."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = KVManager(MODEL, CacheConfig(num_cpu_blocks=num_blocks))

    def __enter__(self) -> Caller:
        self.manager.start()
        # Without its rank an engine hits and stores nothing.
        with self._server.lock, self._server.session() as tasks:
            tasks.executor_up(device(engine_name("", 0), 0))
        return self

    @property
    def _server(self) -> KVServer:
        transport = self.manager._transport
        assert isinstance(transport, LocalTransport)
        return transport.server

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.manager.check()
        finally:
            self.manager.shutdown()

    def get_match(self, prompt: Prompt, num_cached: int, rounds: int) -> tuple[list[float], float]:
        """Microseconds of each call, and those of the least work."""
        call = partial(self.manager.get_match, prompt.tokens, block_keys=prompt.keys)
        bound = partial(prompt.least_work, num_cached, 0)
        return sample_beside(call, bound, partial(self._undo, num_cached), rounds)

    def put_match(self, prompt: Prompt, num_cached: int, rounds: int) -> tuple[list[float], float]:
        """Time `put_match` of a prompt whose first tokens are cached. Nothing is stored."""
        num_new = len(prompt.tokens) - num_cached
        call = partial(self.manager.put_match, prompt.tokens, block_keys=prompt.keys)
        bound = partial(prompt.least_work, num_cached, num_new)
        return sample_beside(call, bound, partial(self._undo, num_new), rounds)

    def _undo(self, expected: int, match: tuple[int, Mask]) -> None:
        task_id, mask = match
        self.manager.cancel([task_id])
        found = int(np.count_nonzero(mask))
        if found != expected:
            raise AssertionError(f"{found} tokens in the mask instead of {expected}")

    def store(self, prompt: Prompt) -> None:
        """Make the prompt's blocks cached."""
        put = self.manager._prompts.make(TaskKind.PUT, prompt.tokens, block_keys=prompt.keys)
        with self._server.lock, self._server.session() as tasks:
            plan = tasks.cache.stores.plan_put(put)
            tasks.cache.publish_staging(plan, plan.num_blocks)
            tasks.cache.finish(plan)


def cases(thorough: bool, seed: int = 0) -> list[Case]:
    lengths = [1_024, 16_384, _LIMITED, *([1_048_576] if thorough else [])]
    populations = [[10_000, 100_000, 1_000_000], *([[10_000_000]] if thorough else [])]
    rounds = 1000 if thorough else 200
    return [
        *(Case(f"get_match, {n:,} tokens", partial(get_matches, n, seed, rounds)) for n in lengths),
        *(Case(f"put_match, {n:,} tokens", partial(put_matches, n, seed, rounds)) for n in lengths),
        Case("a conversation", partial(conversation, seed, rounds // 4)),
        *(
            Case(f"up to {counts[-1]:,} cached blocks", partial(many_blocks, counts, seed, rounds))
            for counts in populations
        ),
    ]


def get_matches(num_tokens: int, seed: int, rounds: int) -> Iterator[Result]:
    partly = num_tokens * 100_000 // _LIMITED // BLOCK * BLOCK
    for has_keys in (False, True):
        prompt = Prompt.random(seed, num_tokens, has_keys=has_keys)
        shares = zip(_LIMITS_US.items(), (num_tokens, partly, 0), strict=True)
        for (share, limit), num_cached in shares:
            with Caller(num_tokens // BLOCK + SLACK_BLOCKS) as caller:
                caller.store(prompt.first(num_cached))
                times, bound = caller.get_match(prompt, num_cached, rounds)
            yield Result(
                f"get_match {prompt.kind}, {share}", "us", times, bound, prompt.least_work_name(0),
                limit=_limit(num_tokens, _KEYS_LIMIT_US if has_keys else limit),
                parameter="tokens", at=num_tokens,
            )  # fmt: skip


def _limit(num_tokens: int, limit: float) -> float | None:
    return limit if num_tokens == _LIMITED else None


def put_matches(num_tokens: int, seed: int, rounds: int) -> Iterator[Result]:
    for has_keys in (False, True):
        prompt = Prompt.random(seed, num_tokens, has_keys=has_keys)
        shares = {"all new": 0, "one turn new": num_tokens - TURN, "all cached": num_tokens}
        for share, num_cached in shares.items():
            with Caller(num_tokens // BLOCK + SLACK_BLOCKS) as caller:
                caller.store(prompt.first(num_cached))
                fewer = rounds if num_cached else max(10, rounds * 1024 // num_tokens)
                times, bound = caller.put_match(prompt, num_cached, fewer)
            what = prompt.least_work_name(num_tokens - num_cached)
            yield Result(
                f"put_match {prompt.kind}, {share}", "us", times, bound, what,
                parameter="tokens", at=num_tokens,
            )  # fmt: skip


def conversation(seed: int, rounds: int) -> Iterator[Result]:
    """Each turn's prompt is the last one and `TURN` tokens more; every turn is stored."""
    for has_keys in (False, True):
        whole = Prompt.random(seed, LONGEST_TURN * TURN, has_keys=has_keys)
        with Caller(LONGEST_TURN * TURN // BLOCK + SLACK_BLOCKS) as caller:
            for turn in range(1, LONGEST_TURN + 1):
                prompt, num_cached = whole.first(turn * TURN), (turn - 1) * TURN
                if turn in (1, 10, 100, LONGEST_TURN):
                    yield from both_matches(
                        caller, prompt, num_cached, rounds, "the next turn", "turns", turn
                    )
                caller.store(prompt)


def both_matches(
    caller: Caller, prompt: Prompt, num_cached: int, rounds: int, what: str, parameter: str,
    at: float,
) -> Iterator[Result]:  # fmt: skip
    """A get and a put of the same prompt."""
    num_new = len(prompt.tokens) - num_cached
    for name, match, num_filed in (
        ("get_match", caller.get_match, 0),
        ("put_match", caller.put_match, num_new),
    ):
        times, bound = match(prompt, num_cached, rounds)
        yield Result(
            f"{name} {prompt.kind}, {what}", "us", times, bound,
            prompt.least_work_name(num_filed), parameter=parameter, at=at,
        )  # fmt: skip


def many_blocks(populations: Sequence[int], seed: int, rounds: int) -> Iterator[Result]:
    """A prompt of 16,384 tokens, three quarters of it cached, among ever more blocks of others.

    Raises:
        Unsupported: The host pool, of a page for each block, would be larger than memory.
    """
    try:
        caller = Caller(populations[-1] + SLACK_BLOCKS)
    except ConfigError as error:
        raise Unsupported(str(error)) from None
    num_tokens, num_cached = 16_384, 12_288
    prompts = [Prompt.random(seed, num_tokens, has_keys=has) for has in (False, True)]
    step = Prompt(np.zeros(10_000 * BLOCK, np.int64))
    with caller:
        for prompt in prompts:
            caller.store(prompt.first(num_cached))
        num_stored = 0
        for population in populations:
            for start in range(num_stored, population, 10_000):
                keys = [i.to_bytes(16, "big") for i in range(start, start + 10_000)]
                caller.store(Prompt(step.tokens, keys))
            num_stored = population
            for prompt in prompts:
                yield from both_matches(
                    caller, prompt, num_cached, rounds, "three quarters cached",
                    "cached blocks", population,
                )  # fmt: skip
