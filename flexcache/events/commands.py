"""`flexcache events`: look at KV events, and merge those of several publishers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcache.terminal import errors_named

if TYPE_CHECKING:
    from flexcache.events.subscriber import News
    from flexcache.events.wire import BlockHash, Event

app = typer.Typer(no_args_is_help=True, help="KV events: what the tiers store and lose.")

_TOKENS_SHOWN = 4


@app.command()
def tail(
    endpoint: Annotated[str, typer.Argument(help="Of the publisher: FlexCache's, vLLM's, ...")],
    replay: Annotated[
        str | None, typer.Option(help="Where it is asked for what was missed, from the start on.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Only topics that begin so.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    count: Annotated[int | None, typer.Option(help="End after so many batches.")] = None,
) -> None:
    """Show events as they come, one a line."""
    from flexcache.events.subscriber import KVEventSubscriber

    with (
        errors_named(),
        _ended_by_signals(),
        KVEventSubscriber(endpoint, replay, topic) as subscriber,
    ):
        for number, news in enumerate(subscriber, 1):
            for line in _as_json(news) if as_json else _in_words(news):
                print(line, flush=True)
            if number == count:
                return


@app.command()
def consolidate(
    source: Annotated[
        list[str], typer.Option(help="ENDPOINT[,REPLAY_ENDPOINT] of a publisher; several times.")
    ],
    publish: Annotated[str, typer.Option(help="Where the merged events go.")],
    replay_endpoint: Annotated[
        str | None, typer.Option(help="Where missed ones can be asked for.")
    ] = None,
    topic: Annotated[str, typer.Option(help="`kv@POD@MODEL`, as your router expects it.")] = "",
) -> None:
    """Merge what several publishers tell: a block is stored when the first place has it, and
    removed when the last has lost it."""
    from flexcache.events.batch_publisher import Address
    from flexcache.events.consolidation import Consolidation

    pairs = [(first, second or None) for first, _, second in (s.partition(",") for s in source)]
    address = Address(publish, replay_endpoint, topic)
    with _ended_by_signals(), Consolidation(pairs, address) as consolidation:
        print(f"publishing at {consolidation.address.endpoint}", end="")
        replay = consolidation.address.replay_endpoint
        print(f" and again at {replay}" if replay else "", flush=True)
        consolidation.run()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM are the orderly end; what the user can mend is said in a line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with errors_named(), contextlib.suppress(KeyboardInterrupt):
        yield


def _as_json(news: News) -> Iterator[str]:
    import msgspec

    from flexcache.events.subscriber import Received

    def line(kind: object, **fields: Any) -> str:
        return msgspec.json.encode({"type": type(kind).__name__, **fields}).decode()

    if not isinstance(news, Received):
        yield line(news, **msgspec.to_builtins(news))
        return
    for event in news.batch.events:
        fields = msgspec.structs.asdict(event)
        for name in ("block_hashes", "parent_block_hash"):
            if name in fields:
                fields[name] = _readable(fields[name])
        yield line(event, number=news.number, ts=news.batch.ts, topic=news.topic, **fields)


def _readable(hashes: Any) -> Any:
    if isinstance(hashes, list):
        return [_readable(block_hash) for block_hash in hashes]
    return hashes.hex() if isinstance(hashes, bytes) else hashes


def _in_words(news: News) -> Iterator[str]:
    from datetime import datetime

    from flexcache.events.subscriber import BeganAnew, Lost, Received

    match news:
        case Lost(first, stop):
            yield f"LOST     batches {first} to {stop - 1}"
        case BeganAnew():
            yield "RESTART  the publisher counts from 0 again"
        case Received(number, batch):
            time = datetime.fromtimestamp(batch.ts).strftime("%H:%M:%S.%f")[:-3]
            for event in batch.events:
                yield f"{number:<8} {time}  {_describe(event)}"


def _describe(event: Event) -> str:
    from flexcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, low_64_bits

    def names(hashes: list[BlockHash]) -> str:
        first = f"{low_64_bits(hashes[0]):016x}" if hashes else "none"
        return first if len(hashes) < 2 else f"{first}..{low_64_bits(hashes[-1]):016x}"

    match event:
        case BlockStored(block_hashes=hashes, token_ids=tokens, parent_block_hash=parent):
            behind = "start" if parent is None else f"{low_64_bits(parent):016x}"
            shown = ", ".join(map(str, tokens[:_TOKENS_SHOWN])) or "not known"
            more = ", ..." if len(tokens) > _TOKENS_SHOWN else ""
            lora = f"  lora {event.lora_name}" if event.lora_name else ""
            return (
                f"stored   {event.medium or '-':8} {len(hashes):5} blocks {names(hashes)} behind "
                f"{behind}  tokens {shown}{more}{lora}"
            )
        case BlockRemoved(hashes, medium):
            return f"removed  {medium or '-':8} {len(hashes):5} blocks {names(hashes)}"
        case AllBlocksCleared():
            return "cleared  all blocks"


if __name__ == "__main__":
    app()
