"""`flexcache cache`, `flexcache drain`: look up, pin, delete, hand over what is cached, by the HTTP
API of a server."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

from flexcache.cli.status import answer_of, http_url
from flexcache.errors import ConfigError, FlexCacheError
from flexcache.terminal import user_errors

app = typer.Typer(no_args_is_help=True, help="What is cached: look it up, pin it, delete it.")

_TIMEOUT_S = 60.0
_POLL_S = 0.2
_MOST_BYTES = 1 << 20
_REFUSED = 3

_Endpoint = Annotated[
    str | None,
    typer.Option(
        help="The server's http_endpoint: http://HOST:PORT. Default: FLEXCACHE_HTTP_ENDPOINT. "
        "FLEXCACHE_HTTP_TOKEN is sent if it is set."
    ),
]
_Tokens = Annotated[
    str | None,
    typer.Option(help="File with the prompt's token ids, as JSON or with blanks between; - reads "
                 "standard input."),
]  # fmt: skip
_Keys = Annotated[
    str | None,
    typer.Option(help="Instead, a file with the engine's block keys, in hexadecimal."),
]
_Namespace = Annotated[
    list[str] | None, typer.Option(help="Part of the prompt's namespace. Repeat for each part.")
]
_Session = Annotated[str | None, typer.Option(help="Instead of a prompt, a user's session.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


@app.command()
def lookup(
    tokens: _Tokens = None,
    keys: _Keys = None,
    namespace: _Namespace = None,
    endpoint: _Endpoint = None,
    as_json: _AsJson = False,
) -> None:
    """Show how many tokens of a prompt, from its start, each tier could supply."""
    with user_errors():
        found = _post(endpoint, "lookup", _named(tokens, keys, namespace))
        _show(found, found["tokens"], "tokens", as_json)


@app.command()
def pin(
    ttl: Annotated[float, typer.Option(help="How long, in seconds; at most a week.")],
    tokens: _Tokens = None,
    keys: _Keys = None,
    namespace: _Namespace = None,
    session: _Session = None,
    endpoint: _Endpoint = None,
    as_json: _AsJson = False,
) -> None:
    """Keep what is cached of a prompt, or of a session, from eviction for a time.

    The exit status is 3 if it is refused: nothing is cached, or there is no room for more pins.
    """
    with user_errors():
        body = _named(tokens, keys, namespace, session)
        found = _post(endpoint, "pin", {**body, "ttl_s": ttl})
    made, text = found["pin"], "refused: nothing is cached, or there is no room for more pins"
    if made is not None:
        until = time.strftime("%F %T", time.localtime(made["expires_at"]))
        text = f"pin {made['id']} holds {made['num_tokens']:,} tokens until {until}"
    typer.echo(json.dumps(found) if as_json else text)
    if made is None:
        raise typer.Exit(_REFUSED)  # 2 is a wrong option


@app.command()
def unpin(
    pin_id: Annotated[str, typer.Argument(help="As `pin` has shown it.")],
    endpoint: _Endpoint = None,
    as_json: _AsJson = False,
) -> None:
    """End a pin before its time."""
    with user_errors():
        found = _post(endpoint, "unpin", {"pin_id": pin_id})
        is_over = "it holds nothing any more" if found["unpinned"] else "there is no such pin"
        typer.echo(json.dumps(found) if as_json else is_over)


@app.command()
def delete(
    tokens: _Tokens = None,
    keys: _Keys = None,
    namespace: _Namespace = None,
    session: _Session = None,
    endpoint: _Endpoint = None,
    as_json: _AsJson = False,
) -> None:
    """Delete what is cached of a prompt, of a session, or of a namespace alone, for good.

    What others use stays.
    """
    with user_errors():
        found = _post(endpoint, "delete", _named(tokens, keys, namespace, session))
        _show(found, found["deleted_blocks"], "blocks deleted", as_json)


def drain(
    to: Annotated[str | None, typer.Option(
        help="The peer_endpoint of the cache that takes the blocks: tcp://HOST:PORT.",
    )] = None,
    seconds: Annotated[float, typer.Option(help="How long it may take.", min=0.1)] = 60.0,
    num_bytes: Annotated[int | None, typer.Option(
        "--bytes", help="How many bytes may be moved. Default: all.", min=1,
    )] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the drain that is under way.")] = False,
    endpoint: _Endpoint = None,
    as_json: _AsJson = False,
) -> None:  # fmt: skip
    """Hand what this cache has in DRAM to a peer, hottest first, before its host goes.

    The peer reads it, and pushes out nothing for it that was used later. Ctrl-C stops it. The exit
    status is 1 if it fails; what time or bytes have left is no failure.
    """
    with user_errors():
        if (to is None) is not stop:
            raise ConfigError("give either --to tcp://HOST:PORT or --stop")
        body = {"to": to, "seconds": seconds, "bytes": num_bytes} if to else {"to": None}
        found = _post(endpoint, "drain", body)
        if found is not None and not stop:
            found = _follow_drain(endpoint, found, is_shown=not as_json)
        if as_json:
            typer.echo(json.dumps(found))
        elif found is None:
            typer.echo("there was no drain")
        else:
            typer.echo(
                f"{found['state']}: {found['moved_blocks']:,} blocks moved "
                f"({found['moved_bytes'] / 1e9:,.2f} GB), {found['there_blocks']:,} were there, "
                f"{found['left_blocks']:,} left, {found['seconds']:.1f} s"
            )
        if found is not None and found["state"] == "failed":
            raise FlexCacheError(found["error"])


def _follow_drain(endpoint: str | None, found: dict[str, Any], is_shown: bool) -> dict[str, Any]:
    """Show how a drain goes until it has ended; return how."""
    columns = (
        "{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[moved]:.2f} GB",
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task(f"to {found['to']}", total=found["total_blocks"], moved=0.0)
        while found["state"] == "running":
            try:
                time.sleep(_POLL_S)
                found = _post(endpoint, "drain")
            except KeyboardInterrupt:
                found = _post(endpoint, "drain", {"to": None})
            num_gone = found["moved_blocks"] + found["there_blocks"]
            bar.update(task, completed=num_gone, moved=found["moved_bytes"] / 1e9)
    return found


def _named(
    tokens: str | None, keys: str | None, namespace: list[str] | None, session: str | None = None
) -> dict[str, Any]:
    """Return what names a prompt or a session, as HTTP has it."""
    named: dict[str, Any] = {}
    if tokens is not None:
        try:
            named["token_ids"] = [int(word) for word in _words(tokens)]
        except ValueError as error:
            raise ConfigError(f"--tokens {tokens}: {error}") from None
    if keys is not None:
        named["block_keys"] = _words(keys)
    if namespace:
        named["namespace"] = namespace
    if session:
        named["session_id"] = session
    return named


def _words(path: str) -> list[str]:
    """Return the numbers or keys in a file, or what an engine's ``/tokenize`` has answered."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if text.lstrip().startswith("{"):
        try:
            text = " ".join(map(str, json.loads(text)["tokens"]))
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{path}: a JSON object must have a list of tokens") from None
    words = [word for word in re.split(r"[\s,\[\]\"']+", text) if word]
    if not words:
        raise ConfigError(f"{path} has no numbers or keys")
    return words


def _post(endpoint: str | None, call: str, body: dict[str, Any] | None = None) -> Any:
    """Call a cache by HTTP; return the answer. Without a body it is a GET.

    Raises:
        FlexCacheError: It refuses; the message says why.
    """
    url = _address(endpoint)
    token = os.environ.get("FLEXCACHE_HTTP_TOKEN") or None
    content = None if body is None else json.dumps(body).encode()
    try:
        with answer_of(url, f"/cache/{call}", token, _TIMEOUT_S, content) as answer:
            return json.loads(answer.read(_MOST_BYTES))
    except HTTPError as error:
        with error:
            text = error.read(_MOST_BYTES).decode(errors="replace")
        try:
            text = json.loads(text)["error"]
        except (ValueError, TypeError, KeyError):
            text = f"is it the http_endpoint of a cache? {text}"
        raise FlexCacheError(f"{url} answers {error.code}: {text}") from None


def _address(endpoint: str | None) -> str:
    found = endpoint or os.environ.get("FLEXCACHE_HTTP_ENDPOINT")
    if not found:
        raise ConfigError("say where the cache is: --endpoint http://HOST:PORT")
    return http_url(found)


def _show(answer: dict[str, Any], by_tier: dict[str, int], unit: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for tier, count in by_tier.items():
        typer.echo(f"{tier:<8}{count:>12,} {unit}")
