"""`flexcache events`: show KV events, and merge those of several publishers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcache.terminal import user_errors

if TYPE_CHECKING:
    from flexcache.events.subscriber import News
    from flexcache.events.wire import BlockHash, Event

app = typer.Typer(no_args_is_help=True, help="KV events: blocks stored and removed, by tier.")

_TOKENS_SHOWN = 4


@app.command()
def tail(
    endpoint: Annotated[str, typer.Argument(help="Publisher endpoint: FlexCache's, vLLM's, ...")],
    replay: Annotated[
        str | None,
        typer.Option(
            help="Endpoint that replays missed batches; the output begins with the oldest."
        ),
    ] = None,
    topic: Annotated[str, typer.Option(help="Only topics with this prefix.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    count: Annotated[int | None, typer.Option(help="Exit after this many batches.")] = None,
) -> None:
    """Show events as they arrive, one per line."""
    from flexcache.events.subscriber import KVEventSubscriber

    with (
        user_errors(),
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
        list[str],
        typer.Option(help="ENDPOINT[,REPLAY_ENDPOINT] of a publisher. Repeat for each publisher."),
    ],
    publish: Annotated[str, typer.Option(help="Endpoint that publishes the merged events.")],
    replay_endpoint: Annotated[
        str | None, typer.Option(help="Endpoint that replays missed batches.")
    ] = None,
    topic: Annotated[
        str, typer.Option(help="Topic that your router expects, such as `kv@POD@MODEL`.")
    ] = "",
) -> None:
    """Merge the events of several publishers.

    A block is reported as stored when the first place has it, and as removed when the last place
    loses it.
    """
    from flexcache.events.consolidator import Consolidation
    from flexcache.events.publisher import Address

    pairs = [(first, second or None) for first, _, second in (s.partition(",") for s in source)]
    address = Address(publish, replay_endpoint, topic)
    with _ended_by_signals(), Consolidation(pairs, address) as consolidation:
        print(f"publishing at {consolidation.address.endpoint}", end="")
        replay = consolidation.address.replay_endpoint
        print(f", replay at {replay}" if replay else "", flush=True)
        consolidation.run()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Exit quietly on Ctrl-C and SIGTERM; print user errors in one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with user_errors(), contextlib.suppress(KeyboardInterrupt):
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

    from flexcache.events.subscriber import Lost, PublisherRestarted, Received

    match news:
        case Lost(first, stop):
            yield f"LOST     batches {first} to {stop - 1}"
        case PublisherRestarted():
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

    def place(event: BlockStored | BlockRemoved) -> str:
        return " ".join(filter(None, (event.locality, event.medium))) or "-"

    match event:
        case BlockStored(block_hashes=hashes, token_ids=tokens, parent_block_hash=parent):
            behind = "start" if parent is None else f"{low_64_bits(parent):016x}"
            shown = ", ".join(map(str, tokens[:_TOKENS_SHOWN])) or "unknown"
            more = ", ..." if len(tokens) > _TOKENS_SHOWN else ""
            lora = f"  lora {event.lora_name}" if event.lora_name else ""
            return (
                f"stored   {place(event):8} {len(hashes):5} blocks {names(hashes)} after "
                f"{behind}  tokens {shown}{more}{lora}"
            )
        case BlockRemoved(hashes):
            return f"removed  {place(event):8} {len(hashes):5} blocks {names(hashes)}"
        case AllBlocksCleared():
            return "cleared  all blocks"
