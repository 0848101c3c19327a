"""Generated request traffic for the comparison of eviction policies, by a seed.

Some of it returns in ways that can be learned, some in ways that cannot, and some changes its ways.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from bench_write_policies import Request, request_of


class Writer:
    """Collects prompts as they are made; a prompt is the ids of its blocks."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._prompts: list[tuple[float, list[int], int]] = []
        self._next_id = 0

    def blocks(self, count: int) -> list[int]:
        """Blocks that no prompt has had so far."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def ask(self, time_s: float, prompt: list[int], output_tokens: int = 200) -> None:
        self._prompts.append((time_s, list(prompt), output_tokens))

    def about(self, median: float, spread: float) -> float:
        """A positive number, log-normal."""
        return float(median * np.exp(self.random.normal(0.0, spread)))

    def popular(self, count: int, exponent: float) -> int:
        """One of ``count``, the first ones more often, by Zipf's law."""
        weights = 1.0 / np.arange(1, count + 1) ** exponent
        return int(self.random.choice(count, p=weights / weights.sum()))

    def requests(self) -> list[Request]:
        ordered = sorted(self._prompts, key=lambda prompt: prompt[0])
        return [request_of(*prompt) for prompt in ordered]


def chat(seed: int, num_talks: int = 3_000) -> list[Request]:
    """Conversations behind one system prompt; most end after a turn, some go on for long."""
    writer = Writer(seed)
    _talk(writer, num_talks, 1.0)
    return writer.requests()


def _talk(writer: Writer, num_talks: int, pause_s: float, start_s: float = 0.0) -> float:
    now, system = start_s, writer.blocks(4)
    for _ in range(num_talks):
        now += writer.random.exponential(pause_s)
        at, prompt = now, system + writer.blocks(1 + int(writer.about(6.0, 1.0)))
        goes_on = writer.random.choice([0.2, 0.85], p=[0.6, 0.4])
        writer.ask(at, prompt)
        while writer.random.random() < goes_on:
            at += 5.0 + writer.about(60.0, 1.0)
            prompt = prompt + writer.blocks(1 + int(writer.about(2.0, 0.7)))
            writer.ask(at, prompt)
    return now


def agents(seed: int, num_tasks: int = 200) -> list[Request]:
    """Tool loops behind a few long system prompts; some fan out, some are picked up much later."""
    writer = Writer(seed)
    _work(writer, num_tasks)
    return writer.requests()


def _work(writer: Writer, num_tasks: int) -> None:
    now, systems = 0.0, [writer.blocks(30) for _ in range(8)]

    def loop(at: float, prompt: list[int], steps: int, may_fan_out: bool) -> None:
        for _ in range(steps):
            writer.ask(at, prompt, 50 + int(writer.about(100.0, 1.0)))
            if may_fan_out and writer.random.random() < 0.05:
                for _ in range(3):
                    loop(at + writer.about(3.0, 0.5), prompt + writer.blocks(2), 5, False)
            at += writer.about(5.0, 0.8)
            prompt = prompt + writer.blocks(1 + int(writer.about(1.0, 0.8)))
        if may_fan_out and writer.random.random() < 0.3:
            loop(at + writer.about(300.0, 1.0), prompt, steps // 2, True)

    for _ in range(num_tasks):
        now += writer.random.exponential(12.0)
        system = systems[writer.popular(8, 1.0)]
        loop(now, system + writer.blocks(4), 5 + int(writer.random.integers(0, 25)), True)


def documents(seed: int) -> list[Request]:
    """Questions about documents, some of which are asked about far more often than others."""
    writer, now = Writer(seed), 0.0
    system = writer.blocks(2)
    library = [writer.blocks(2 + int(writer.about(20.0, 0.8))) for _ in range(3_000)]
    for _ in range(8_000):
        now += writer.random.exponential(0.5)
        writer.ask(now, system + library[writer.popular(3_000, 0.8)] + writer.blocks(1))
    return writer.requests()


def shifting(seed: int) -> list[Request]:
    """Chat whose users change every half hour: first they return soon, then late, then hardly."""
    writer, now = Writer(seed), 0.0
    for goes_on, gap_s in ((0.8, 20.0), (0.7, 400.0), (0.1, 60.0), (0.8, 60.0)):
        end = now + 1_800.0
        while now < end:
            now += writer.random.exponential(2.0)
            at, prompt = now, writer.blocks(1 + int(writer.about(8.0, 1.0)))
            writer.ask(at, prompt)
            while writer.random.random() < goes_on:
                at += writer.about(gap_s, 0.5)
                prompt = prompt + writer.blocks(2)
                writer.ask(at, prompt)
    return writer.requests()


def alike(seed: int) -> list[Request]:
    """Prompts that are all asked equally often, at random: nothing can be learned."""
    writer, now = Writer(seed), 0.0
    prompts = [writer.blocks(20) for _ in range(1_500)]
    for _ in range(8_000):
        now += writer.random.exponential(0.5)
        writer.ask(now, prompts[int(writer.random.integers(1_500))])
    return writer.requests()


def rounds(seed: int) -> list[Request]:
    """A set of prompts asked in turn, again and again, which is LRU's worst case; then others."""
    writer, now = Writer(seed), 0.0
    for num_prompts in (150, 600):
        prompts = [writer.blocks(5 + int(writer.random.integers(20))) for _ in range(num_prompts)]
        for at in range(4_000):
            now += writer.random.exponential(0.5)
            writer.ask(now, prompts[at % num_prompts])
    return writer.requests()


def one_shots(seed: int) -> list[Request]:
    """A batch job: prompts with one system prompt, none of which returns."""
    writer, now = Writer(seed), 0.0
    system = writer.blocks(10)
    for _ in range(8_000):
        now += writer.random.exponential(0.3)
        writer.ask(now, system + writer.blocks(1 + int(writer.about(15.0, 0.6))))
    return writer.requests()


def mixed(seed: int) -> list[Request]:
    """Chat, agents and a batch job at once."""
    writer = Writer(seed)
    _work(writer, 100)
    end = _talk(writer, 1_200, 1.0)
    now, system = 0.0, writer.blocks(6)
    while now < end:
        now += writer.random.exponential(1.0)
        writer.ask(now, system + writer.blocks(1 + int(writer.about(10.0, 0.6))), 20)
    return writer.requests()


def reversing(seed: int) -> list[Request]:
    """Every ten minutes, those that returned stop to, and those that did not begin to."""
    writer, now = Writer(seed), 0.0
    while now < 6_000.0:
        now += writer.random.exponential(1.0)
        is_long = writer.random.random() < 0.5
        prompt = writer.blocks(30 if is_long else 6)
        writer.ask(now, prompt)
        at, returns = now, 4 if is_long == (now // 600.0 % 2 == 0) else 0
        for _ in range(returns):
            at += writer.about(40.0, 0.6)
            prompt = prompt + writer.blocks(1)
            writer.ask(at, prompt)
    return writer.requests()


def daily(seed: int) -> list[Request]:
    """Chat whose rate rises and falls tenfold, every hour."""
    writer, now = Writer(seed), 0.0
    while now < 3 * 3_600.0:
        now += writer.random.exponential(1.0) / (0.15 + 1.35 * np.sin(np.pi * now / 3_600.0) ** 2)
        at, prompt = now, writer.blocks(1 + int(writer.about(8.0, 1.0)))
        writer.ask(at, prompt)
        while writer.random.random() < 0.55:
            at += writer.about(90.0, 1.2)
            prompt = prompt + writer.blocks(1 + int(writer.about(2.0, 0.7)))
            writer.ask(at, prompt)
    return writer.requests()


WORKLOADS: dict[str, Callable[[int], list[Request]]] = {
    "chat": chat, "agents": agents, "documents": documents, "shifting": shifting, "alike": alike,
    "rounds": rounds, "one shots": one_shots, "mixed": mixed, "reversing": reversing,
    "daily": daily,
}  # fmt: skip
