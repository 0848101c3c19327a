"""Bodies of requests to the control API, and of its answers."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from flexcache.router.proxy.bodies import Bodies, Body

T = TypeVar("T")
BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)

_LEASE_S = 600.0
_NOTHING = msgspec.Raw()
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Id = Annotated[str, Meta(min_length=1, max_length=200)]


class Selection(msgspec.Struct, kw_only=True):
    """A request to be placed. Unknown fields are ignored, as other selection services' callers
    send some.

    Attributes:
        selection_id: Names the reservation; made up if there is none.
        token_ids: The prompt.
        isl_tokens: Its length, if the tokens are unknown.
        model_name: Served model.
        request: Instead of tokens: the body of a request to the engines' API. Empty: none.
        path: Path that it is for.
        worker_id: For ``/reservations``: the worker that was selected.
        lease_s: A reservation is given up after this long.
    """

    selection_id: Id | None = None
    token_ids: list[TokenId] | None = None
    isl_tokens: Annotated[int, Meta(ge=0)] | None = None
    model_name: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request: msgspec.Raw = _NOTHING
    path: str = "/v1/chat/completions"
    worker_id: str | None = None
    lease_s: Annotated[float, Meta(gt=0)] = _LEASE_S


class Draining(msgspec.Struct, forbid_unknown_fields=True):
    """
    Attributes:
        worker: Name, or the URL of an engine with all its ranks.
    """

    worker: str
    draining: bool = True


async def read(request: web.Request, kind: type[T]) -> T:
    """Read a JSON body.

    Raises:
        web.HTTPBadRequest: It is not what is expected; says why.
        BodyRefused: See `Bodies.read`.
    """
    bodies, held = request.app[BODIES], Body()
    try:
        return msgspec.json.decode(await bodies.read(request, held), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    finally:
        bodies.release(held)


def as_json(content: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )
