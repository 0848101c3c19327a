"""From the body of a long chat to its token ids, and how long the loop stands still meanwhile.

    python benchmarks/router/bench_tokens.py
    python benchmarks/router/bench_tokens.py --tokenizer DIRECTORY --tokens 32000 --json out.json

A chat of 60 messages and 124,000 tokens is read cold, again as it is, and with a new turn (answer
and question). The loop is watched by a timer of 1 ms: *stall* is the longest time by which it was
late, *idle* the same while nothing is read, what the machine itself causes. A *decision* is a read
and the choice of one of 8 workers, one of which has told by events that it holds the chat's first
state, in blocks of 16 tokens. `transformers` does the whole chat each time, as an engine does.
Without `--tokenizer` a byte-level BPE of 50,000 tokens is trained on Python's own library, once for
each `--directory`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import router_path  # noqa: F401
import typer
import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flexcache.events.wire import BlockStored, EventBatch
from flexcache.router.chooser import Arrival
from flexcache.router.fleet import EventSource, WorkerSpec, WorkerState
from flexcache.router.router import KVRouter
from flexcache.router.tokens import Tokenizers, TokenLimits

CHAT_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SWITCH_INTERVAL_S = 0.0005  # as in the router's processes
TICK_S = 0.001
BLOCK_SIZE = 16

app = typer.Typer(add_completion=False)


def _sources() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _train(directory: Path) -> Path:
    target = directory / "bench-tokenizer"
    if (target / "tokenizer_config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=50_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in _sources()], trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


class Texts:
    """Makes messages of stretches of source text."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._text = "".join(path.read_text(errors="replace") for path in _sources())
        sample = self._text[: 1 << 20]
        num_tokens = len(tokenizer.encode(sample, add_special_tokens=False).ids)
        self._chars_per_token = len(sample) / num_tokens

    def messages(self, number: int, num_tokens: float) -> list[Any]:
        """Make messages of that many tokens each, an even number of them."""
        chars = int(num_tokens * self._chars_per_token)
        starts = [self._rng.randrange(len(self._text) - chars) for _ in range(number)]
        return [
            {"role": ("user", "assistant")[i % 2], "content": self._text[start : start + chars]}
            for i, start in enumerate(starts)
        ]


class LoopWatch:
    """Notes the longest time by which a timer of the loop was late."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - before - TICK_S)

    async def reset(self) -> None:
        """Begin a new interval, the timer running."""
        await asyncio.sleep(0.01)
        self.longest_s = 0.0


@dataclass(frozen=True)
class Row:
    name: str
    wall_ms: list[float]
    cpu_ms: list[float]
    stall_ms: list[float]


def _arrival(messages: list[Any]) -> Arrival:
    body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
    return Arrival(request_id="r", method="POST", path="/v1/chat/completions", body=body)


@dataclass(frozen=True)
class Shape:
    tokens: int
    messages: int
    turn: int

    def chat(self, texts: Texts) -> list[Any]:
        return texts.messages(self.messages, self.tokens / self.messages)

    def next_turn(self, texts: Texts) -> list[Any]:
        return texts.messages(2, self.turn / 2)


def _make_router(token_ids: Any) -> KVRouter:
    """Make a router of 8 workers, the first of which holds a prompt."""
    workers = [
        WorkerSpec(name=f"w{i}", url=f"http://w{i}", sources=(EventSource(f"tcp://w{i}:1"),))
        for i in range(8)
    ]
    router = KVRouter(approximate="never")
    router.set_workers(workers)
    for worker in workers:
        router.set_state(worker.name, WorkerState.UP)
    count = len(token_ids) // BLOCK_SIZE
    stored = BlockStored(
        block_hashes=list(range(1, count + 1)),
        parent_block_hash=None,
        token_ids=token_ids[: count * BLOCK_SIZE].tolist(),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    router.apply("tcp://w0:1", EventBatch(ts=0.0, events=[stored]))
    return router


class Bench:
    """Reads chats with readers of one tokenizer."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self._directory = directory
        self._shape = shape
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.rows: dict[str, Row] = {}

    async def run(self, repeats: int) -> None:
        """Read that many chats in every way."""
        self._watch = LoopWatch()
        for repeat in range(repeats):
            limits = TokenLimits(encode_deadline_s=60)
            self._readers = Tokenizers(tokenizer=str(self._directory), limits=limits)
            await self._readers.start()
            texts = Texts(self._tokenizer, repeat)
            chat = self._shape.chat(texts)
            await self._time("idle", None)
            await self._time("cold", chat)
            await self._time("all known", chat)
            known = await self._readers.read(_arrival(chat))
            self._router = _make_router(known.token_ids)
            chat += self._shape.next_turn(texts)
            await self._time("next turn", chat)
            chat += self._shape.next_turn(texts)
            await self._time("decision, next turn", chat)
            await self._time("decision, all known", chat)
            await self._readers.close()

    async def _time(self, name: str, messages: list[Any] | None) -> None:
        arrival = None if messages is None else _arrival(messages)
        await self._watch.reset()
        cpu, wall = time.process_time(), time.perf_counter()
        if arrival is None:
            await asyncio.sleep(0.5)
        else:
            request = await self._readers.read(arrival)
            assert request.token_ids is not None and len(request.token_ids) == request.num_tokens
            if name.startswith("decision"):
                decision = self._router.choose(request, wall)
                assert decision is not None and decision.matched_tokens > 0
        row = self.rows.setdefault(name, Row(name, [], [], []))
        row.wall_ms.append((time.perf_counter() - wall) * 1e3)
        row.cpu_ms.append((time.process_time() - cpu) * 1e3)
        if name.startswith("decision"):
            self._router.ended("r", wall)
        await asyncio.sleep(2 * TICK_S)
        row.stall_ms.append(self._watch.longest_s * 1e3)


def _measure_transformers(directory: Path, shape: Shape, repeats: int) -> Row:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(directory))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    row = Row("transformers, whole", [], [], [])
    for repeat in range(repeats):
        body = _arrival(shape.chat(Texts(tokenizer, repeat))).body
        cpu, wall = time.process_time(), time.perf_counter()
        messages = json.loads(body)["messages"]
        theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        row.wall_ms.append((time.perf_counter() - wall) * 1e3)
        row.cpu_ms.append((time.process_time() - cpu) * 1e3)
        row.stall_ms.append(row.wall_ms[-1])
    return row


def _show(rows: list[Row]) -> None:
    table = Table(title="body to token ids, ms (median, least)")
    for column in ("", "wall", "least", "CPU", "least", "stall", "least"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        cells = []
        for values in (row.wall_ms, row.cpu_ms, row.stall_ms):
            cells += [f"{statistics.median(values):.2f}", f"{min(values):.2f}"]
        table.add_row(row.name, *cells)
    Console(width=110).print(table)


@app.command()
def main(
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of a tokenizer.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the chat.")] = 124_000,
    messages: Annotated[int, typer.Option(help="Messages of the chat.")] = 60,
    turn: Annotated[int, typer.Option(help="Tokens of a new turn.")] = 500,
    repeats: Annotated[int, typer.Option(help="Chats to read.")] = 9,
    directory: Annotated[Path | None, typer.Option(help="Keeps the trained tokenizer.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples.")] = None,
) -> None:
    """Measure how long the router takes to find the tokens of a long chat."""
    source = tokenizer or _train(directory or Path(tempfile.gettempdir()))
    shape = Shape(tokens, messages, turn)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bench = Bench(source, shape)
    uvloop.run(bench.run(repeats))
    rows = [*bench.rows.values(), _measure_transformers(source, shape, repeats)]
    _show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    app()
