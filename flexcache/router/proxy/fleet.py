"""Requests that concern all engines: which models there are, and changes that each must make."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from flexcache.router.chooser import Arrival, Choice
from flexcache.router.link.messages import WorkerAddress
from flexcache.router.proxy import answers, headers
from flexcache.router.proxy.engines import EngineBook, Engines, NoAnswer, NotTaken
from flexcache.router.tokens.engines import read_answer
from flexcache.router.tokens.named_model import named_model

_MODELS = "/v1/models"
_OF_VLLM = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory",
    "/pause", "/resume", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
    "/start_weight_update", "/start_draft_weight_update", "/update_weights",
    "/finish_weight_update", "/update_weight_version", "/weight_checker", "/collective_rpc",
)  # fmt: skip
_OF_SGLANG = (
    "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter",
    "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    "/pause_generation", "/continue_generation", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/begin_weight_update", "/end_weight_update", "/init_weights_update_group",
    "/destroy_weights_update_group", "/update_weight_version", "/weights_checker",
)  # fmt: skip
_TO_ALL = frozenset(_OF_VLLM + _OF_SGLANG)
"""Paths of changes: with one of several engines changed, answers would depend on the choice."""
_METHODS = ("POST", "GET")
"""SGLang makes some of these changes by GET."""
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class _Said:
    """What an engine answered.

    Attributes:
        status: None: nothing.
    """

    url: str
    status: int | None
    body: bytes
    content_type: str = "text/plain"

    @property
    def is_done(self) -> bool:
        return self.status is not None and self.status < 300


def is_for_all(method: str, target: str) -> bool:
    """Return whether a request must reach every engine."""
    return method in _METHODS and target.partition("?")[0] in _TO_ALL


def list_models(book: EngineBook, target: str) -> web.Response | None:
    """Return the models of all engines, or the one that is asked for; None: an engine may know."""
    path = target.partition("?")[0]
    if path != _MODELS and not path.startswith(f"{_MODELS}/"):
        return None
    cards, name = book.cards(), unquote(path[len(_MODELS) + 1 :])
    if not cards or (name and name not in cards):
        return None
    listed = [msgspec.Raw(card) for card in cards.values()]
    content = msgspec.Raw(cards[name]) if name else {"object": "list", "data": listed}
    return web.Response(
        body=msgspec.json.encode(content),
        content_type="application/json",
        headers={"Server": answers.SERVER},
    )


async def send_to_all(
    engines: Engines, book: EngineBook, arrival: Arrival, passed: CIMultiDict[str]
) -> web.Response | None:
    """Send a request to every engine; None: there is one at most.

    With a ``model`` in its body it goes to the engines that serve this model.

    Args:
        passed: The header fields of the request.
    """
    model = named_model(arrival)
    workers = {worker.url: worker for worker in book.addresses()}
    able = {url: worker for url, worker in workers.items() if model in worker.models}
    chosen = able or workers
    if len(workers) <= 1:
        return None
    said = await asyncio.gather(
        *(_send(engines, worker, arrival, passed) for worker in chosen.values())
    )
    book.models_changed()
    failed = [each for each in said if not each.is_done]
    if not failed:
        first = said[0]
        fields = {"Content-Type": first.content_type, headers.WORKER: ", ".join(chosen)}
        return web.Response(status=first.status or 200, body=first.body, headers=fields)
    shown = "; ".join(f"{each.url}: {_shown(each)}" for each in failed)
    message = f"{len(failed)} of {len(said)} engines did not do it, the others did: {shown}"
    return answers.error(failed[0].status or 502, message)


async def _send(
    engines: Engines, worker: WorkerAddress, arrival: Arrival, passed: CIMultiDict[str]
) -> _Said:
    choice = Choice(worker=worker.name, url=worker.url, headers=worker.headers, matched_tokens=None)
    fields = headers.to_engine(passed, {**worker.headers, "Accept-Encoding": "identity"})
    try:
        answer = await engines.send(
            choice, arrival.method, arrival.path, fields, arrival.body or None
        )
    except NotTaken as error:
        return _Said(worker.url, error.status, str(error).encode())
    except NoAnswer as error:
        return _Said(worker.url, None, str(error).encode())
    try:
        body = await read_answer(answer)
        return _Said(worker.url, answer.status, body, answer.headers.get("Content-Type", ""))
    except Exception as error:  # it broke, or is too long
        return _Said(worker.url, None, repr(error).encode())
    finally:
        answer.close()


def _shown(said: _Said) -> str:
    text = said.body.decode(errors="replace")[:_SHOWN]
    return text if said.status is None else f"status {said.status}: {text}"
