"""Traffic for a small engine: lengths of a production trace divided, conversations kept whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from bench_eviction import sessions_of
from bench_write_policies import read_trace
from msgspec.structs import replace

from flexcache.replay.traces import MooncakeRequest, read_requests

SCALE = 16
"""What lengths are divided by."""


def scaled(
    trace: Path, longest: int, num_requests: int, rate: float, answer: int, seed: int
) -> list[MooncakeRequest]:
    """Return whole conversations of a trace, chosen by a seed, in the order of their times.

    Conversations of one request are left out, and so are those with a prompt that is too long:
    in a few minutes no user of theirs would return. Times are stretched to the rate.

    Args:
        longest: Tokens of a prompt, after scaling.
        rate: Requests a second.
        answer: Tokens of each answer.
    """
    lines = sorted(read_requests(trace), key=lambda line: line.time_s)
    conversations: dict[str, list[MooncakeRequest]] = {}
    for number, name in sessions_of(read_trace(trace), 1.0).items():
        conversations.setdefault(name, []).append(lines[number])
    wanted = [
        lines
        for lines in conversations.values()
        if len(lines) > 1 and max(line.input_length for line in lines) < longest * SCALE
    ]
    random.Random(seed).shuffle(wanted)
    chosen: list[MooncakeRequest] = []
    while wanted and len(chosen) < num_requests:
        chosen += wanted.pop()
    chosen.sort(key=lambda line: line.time_s)
    return [
        _scaled(line, number * 1000 / rate, answer)
        for number, line in enumerate(chosen[:num_requests])
    ]


def _scaled(line: MooncakeRequest, timestamp: float, answer: int) -> MooncakeRequest:
    size, tokens = line.tokens_per_id // SCALE, max(1, line.input_length // SCALE)
    return replace(
        line, timestamp=timestamp, input_length=tokens, output_length=answer,
        hash_ids=line.hash_ids[: -(-tokens // size)], block_size=size,
    )  # fmt: skip


def working_set(lines: Sequence[MooncakeRequest]) -> int:
    """Return the tokens of all blocks of the prompts, each once."""
    sizes: dict[int, int] = {}
    for line in lines:
        for at, hash_id in enumerate(line.hash_ids):
            rest = line.input_length - at * line.tokens_per_id
            sizes[hash_id] = min(line.tokens_per_id, rest)
    return sum(sizes.values())
