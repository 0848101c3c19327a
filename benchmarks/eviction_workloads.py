"""Generated request traffic for the comparison of eviction policies. Seeds are fixed."""

from __future__ import annotations

import numpy as np
from bench_write_policies import Request, request_of


class Writer:
    """Collects prompts as they are made; a prompt is the ids of its blocks."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._prompts: list[tuple[float, list[int]]] = []
        self._next_id = 0

    def blocks(self, count: int) -> list[int]:
        """Blocks that no prompt has had so far."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def ask(self, time_s: float, prompt: list[int]) -> None:
        self._prompts.append((time_s, list(prompt)))

    def about(self, median: float, spread: float) -> float:
        """A positive number, log-normal."""
        return float(median * np.exp(self.random.normal(0.0, spread)))

    def requests(self) -> list[Request]:
        ordered = sorted(self._prompts, key=lambda prompt: prompt[0])
        return [request_of(time_s, ids) for time_s, ids in ordered]


def chat() -> list[Request]:
    """Conversations behind one system prompt; most end after a turn, some go on for long."""
    writer, now = Writer(seed=1), 0.0
    system = writer.blocks(4)
    for _ in range(4_000):
        now += writer.random.exponential(1.0)
        at, prompt = now, system + writer.blocks(1 + int(writer.about(6.0, 1.0)))
        goes_on = writer.random.choice([0.2, 0.85], p=[0.6, 0.4])
        writer.ask(at, prompt)
        while writer.random.random() < goes_on:
            at += 5.0 + writer.about(60.0, 1.0)
            prompt = prompt + writer.blocks(1 + int(writer.about(2.0, 0.7)))
            writer.ask(at, prompt)
    return writer.requests()


def agents() -> list[Request]:
    """Tool loops behind a few long system prompts; some fan out, some are picked up much later."""
    writer, now = Writer(seed=2), 0.0
    systems = [writer.blocks(30) for _ in range(8)]
    popularity = 1.0 / np.arange(1, 9)
    popularity /= popularity.sum()

    def loop(at: float, prompt: list[int], steps: int, may_fan_out: bool) -> None:
        for _ in range(steps):
            writer.ask(at, prompt)
            if may_fan_out and writer.random.random() < 0.05:
                for _ in range(3):
                    loop(at + writer.about(3.0, 0.5), prompt + writer.blocks(2), 5, False)
            at += writer.about(5.0, 0.8)
            prompt = prompt + writer.blocks(1 + int(writer.about(1.0, 0.8)))
        if may_fan_out and writer.random.random() < 0.3:
            loop(at + writer.about(300.0, 1.0), prompt, steps // 2, True)

    for _ in range(250):
        now += writer.random.exponential(12.0)
        system = systems[int(writer.random.choice(8, p=popularity))]
        steps = 5 + int(writer.random.integers(0, 25))
        loop(now, system + writer.blocks(4), steps, True)
    return writer.requests()


def documents() -> list[Request]:
    """Questions about documents, some of which are asked about far more often than others."""
    writer, now = Writer(seed=3), 0.0
    system = writer.blocks(2)
    library = [writer.blocks(2 + int(writer.about(20.0, 0.8))) for _ in range(3_000)]
    popularity = 1.0 / np.arange(1, 3_001) ** 0.8
    popularity /= popularity.sum()
    for chosen in writer.random.choice(3_000, size=10_000, p=popularity):
        now += writer.random.exponential(0.5)
        writer.ask(now, system + library[int(chosen)] + writer.blocks(1))
    return writer.requests()


def shifting() -> list[Request]:
    """Chat whose users change every half hour: first they return soon, then late, then hardly."""
    writer, now = Writer(seed=4), 0.0
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
