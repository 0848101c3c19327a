"""FlexCache's LRU and optimum beside kvcache-simulator's, on the same trace.

Counted as the simulator does: tokens of the blocks that a prompt finds from its first one on, over
the last half of the requests. The last block of a prompt counts with the tokens that it has.
Their program knows nothing of sessions, so it is given a file with whole prompts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_eviction import replay
from bench_write_policies import Request, optimal_hits, request_of
from reporting import Say

from flexcache.replay.traces import MooncakeRequest, read_requests

MODEL = "llama-3.1-8b"
BYTES_PER_TOKEN = 131_072
"""KV of the model. Their sizes are in GiB, ours in blocks."""


def compare(trace: Path, sizes: Sequence[int], python: str, say: Say) -> list[dict[str, Any]]:
    """Return a row per size and policy, with the tokens that each of the two hit.

    Args:
        sizes: Of the cache, in blocks; theirs leaves out one that half of the trace does not fill.
        python: The interpreter of the simulator's environment.
    """
    lines = sorted(read_requests(trace), key=lambda line: line.time_s)
    block_size = lines[0].tokens_per_id
    say(f"{trace.name}: kvcache-simulator")
    theirs = _their_hits(lines, sizes, python)
    requests = _by_prefix(lines)
    rows = []
    for size in sizes:
        for policy in ("lru", "optimal"):
            if (size, policy) not in theirs:
                continue
            say(f"{trace.name}: {policy}, {size:,} blocks")
            ours = (
                replay(requests, size, "lru").hits
                if policy == "lru"
                else optimal_hits(requests, size)
            )
            hit, total = theirs[size, policy]
            rows.append(
                {"trace": trace.name, "requests": len(lines), "block_size": block_size,
                 "blocks": size, "policy": policy, "simulator_hit_tokens": hit,
                 "hit_tokens": _tokens(lines, ours), "of_tokens": total}
            )  # fmt: skip
    return rows


def _by_prefix(lines: Sequence[MooncakeRequest]) -> list[Request]:
    """Return requests whose equal ids are equal prefixes, whatever ids the trace has."""
    numbers: dict[tuple[int, int], int] = {}
    requests = []
    for line in lines:
        blocks: list[int] = []
        for hash_id in line.hash_ids:
            before = blocks[-1] if blocks else -1
            blocks.append(numbers.setdefault((before, hash_id), len(numbers)))
        requests.append(request_of(line.time_s, blocks, line.output_length))
    return requests


def _tokens(lines: Sequence[MooncakeRequest], hits: Sequence[int]) -> int:
    half = len(lines) // 2
    return sum(
        min(hit * line.tokens_per_id, line.input_length)
        for line, hit in zip(lines[half:], hits[half:], strict=True)
    )


def _their_hits(
    lines: Sequence[MooncakeRequest], sizes: Sequence[int], python: str
) -> dict[tuple[int, str], tuple[int, int]]:
    """Return hit and all tokens by size and policy."""
    block_size = lines[0].tokens_per_id
    gib = [size * block_size * BYTES_PER_TOKEN / (1 << 30) for size in sizes]
    with tempfile.TemporaryDirectory() as directory:
        prompts, report = Path(directory, "trace.jsonl"), Path(directory, "report.json")
        write_prompts(prompts, lines)
        subprocess.run(
            [python, "-m", "kvcache_sim", "run", "--trace", prompts, "--model", MODEL,
             "--policies", "lru,optimal", "--budgets-gib", ",".join(map(repr, gib)),
             "--backend", "python", "--no-progress", "--format", "json", "--output", report],
            check=True,
        )  # fmt: skip
        points = json.loads(report.read_text())["points"]
    return {
        (point["cacheBlocks"], policy): (found["hitTokens"], found["totalTokens"])
        for point in points
        for policy, found in point["results"].items()
    }


def write_prompts(path: Path, lines: Sequence[MooncakeRequest]) -> None:
    """Write whole prompts, as other programs read them."""
    with path.open("w") as file:
        for line in lines:
            fields = {
                "timestamp": line.timestamp, "input_length": line.input_length,
                "output_length": line.output_length, "hash_ids": line.hash_ids,
                "block_size": line.tokens_per_id,
            }  # fmt: skip
            file.write(json.dumps(fields) + "\n")
