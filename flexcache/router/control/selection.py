"""Choosing workers for others, such as gateways: with or without reserving.

    POST /select                                 the worker that would be chosen
    POST /select_and_reserve, /reservations      the same, and the request counts as its load
    POST /reservations/{id}/prefill_complete     its first token came
    DELETE /reservations/{id}                    it ended
    POST /score                                  what the request would find at each worker
    POST /query                                  how much of the prompt each worker holds

Bodies and answers have the fields of Dynamo's selection service; a worker's id is its name.
"""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from aiohttp import web

from flexcache.router.chooser import Arrival, NotRouted, Outcome
from flexcache.router.control.bodies import Selection, as_json, read
from flexcache.router.decider.decider import Decider
from flexcache.router.request import Decision, RouteRequest
from flexcache.router.router import WorkerScore
from flexcache.router.workers import Tier

_OWNER = "control API"


class SelectionApi:
    """Handlers of the requests above."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/select", self.select),
            web.post("/select_and_reserve", self.reserve),
            web.post("/reservations", self.reserve),
            web.post("/reservations/{id}/prefill_complete", self.prefill_complete),
            web.delete("/reservations/{id}", self.free),
            web.post("/score", self.score),
            web.post("/query", self.query),
        ]

    async def select(self, request: web.Request) -> web.Response:
        selection = await read(request, Selection)
        wanted = await self._read(selection)
        scores = self._scores(wanted)
        best = scores[0]
        spec = self._decider.roster.spec(best.worker)
        answer = _selected(selection, spec.url, spec.data_parallel_rank, best)
        return as_json(answer | {"effective_prefill_tokens": _to_compute(wanted, best)})

    async def reserve(self, request: web.Request) -> web.Response:
        selection = await read(request, Selection)
        if selection.selection_id is None:
            selection.selection_id = uuid.uuid4().hex
        wanted = await self._read(selection)
        decision = await self._place(wanted, selection)
        # Scores from now on would count the reservation itself.
        found = WorkerScore(decision.worker, None, dict(decision.matched), decision.ttft_s)
        spec = self._decider.roster.spec(decision.worker)
        answer = _selected(selection, spec.url, spec.data_parallel_rank, found)
        return as_json(answer | {"effective_prefill_tokens": _to_compute(wanted, found)}, 201)

    async def prefill_complete(self, request: web.Request) -> web.Response:
        self._require(request)
        self._decider.first_token(request.match_info["id"])
        return as_json({"status": "ok"})

    async def free(self, request: web.Request) -> web.Response:
        self._require(request)
        self._decider.ended(request.match_info["id"], Outcome.DONE)
        return as_json({"status": "ok"})

    async def score(self, request: web.Request) -> web.Response:
        wanted = await self._read(await read(request, Selection))
        return as_json({"scores": [_score(score) for score in self._scores(wanted)]})

    async def query(self, request: web.Request) -> web.Response:
        wanted = await self._read(await read(request, Selection))
        held = {score.worker: _overlap(score) for score in self._scores(wanted)}
        return as_json({"num_tokens": wanted.num_tokens, "workers": held})

    # -- parts -------------------------------------------------------------------------------------

    def _require(self, request: web.Request) -> None:
        running = self._decider.running.get(request.match_info["id"])
        if running is None or running.owner != _OWNER:
            raise web.HTTPNotFound(text="no such reservation")

    async def _read(self, selection: Selection) -> RouteRequest:
        name = selection.selection_id or uuid.uuid4().hex
        if bytes(selection.request):
            arrival = Arrival(
                request_id=name, method="POST", path=selection.path, body=bytes(selection.request)
            )
            return await self._decider.read(arrival)
        tokens = selection.token_ids
        if tokens is None and selection.isl_tokens is None:
            raise web.HTTPBadRequest(text="give token_ids, isl_tokens or request")
        return RouteRequest(
            request_id=name,
            num_tokens=len(tokens) if tokens is not None else selection.isl_tokens or 0,
            token_ids=None if tokens is None else np.array(tokens, np.uint32),
            model=selection.model_name,
            adapter=selection.lora_name,
            cache_salt=selection.cache_salt,
            session_id=selection.session_id,
        )

    async def _place(self, wanted: RouteRequest, selection: Selection) -> Decision:
        decider, worker = self._decider, selection.worker_id
        if worker is not None and worker not in decider.roster:
            raise web.HTTPNotFound(text=f"no worker {worker!r}")
        others = [] if worker is None else [each.name for each in decider.roster.specs]
        tried = tuple(name for name in others if name != worker)
        try:
            decision = await decider.decide(wanted, tried, owner=_OWNER, lease_s=selection.lease_s)
        except NotRouted as refusal:
            headers = {}
            if refusal.retry_after_s is not None:
                headers["Retry-After"] = str(int(-(-refusal.retry_after_s // 1)))
            kind = web.HTTPTooManyRequests if refusal.status == 429 else web.HTTPServiceUnavailable
            raise kind(text=str(refusal), headers=headers) from None
        except ValueError as error:
            raise web.HTTPConflict(text=str(error)) from None
        if worker not in (None, decision.worker):
            decider.ended(wanted.request_id, Outcome.ABORTED)
            raise web.HTTPConflict(text=f"worker {worker!r} takes no requests now")
        return decision

    def _scores(self, wanted: RouteRequest) -> list[WorkerScore]:
        scores = self._decider.routing.scores(wanted, self._decider.clock())
        if not scores:
            raise web.HTTPServiceUnavailable(text="no worker takes requests")
        return scores


def _selected(
    selection: Selection, url: str, rank: int | None, score: WorkerScore
) -> dict[str, Any]:
    return {
        "selection_id": selection.selection_id,
        "model_name": selection.model_name,
        "worker_id": score.worker,
        "dp_rank": rank,
        "endpoint": url,
        "overlap": _overlap(score),
        "ttft_s": score.ttft_s,
    }


def _to_compute(wanted: RouteRequest, score: WorkerScore) -> int:
    return wanted.num_tokens - sum(score.matched.values())


def _overlap(score: WorkerScore) -> dict[str, int]:
    """Return the tokens that a worker has in a tier or a faster one."""
    gpu, dram, disk = (score.matched.get(tier, 0) for tier in Tier)
    held = {"gpu": gpu, "cpu": gpu + dram, "disk": gpu + dram + disk}
    return {"longest_matched": gpu + dram + disk, **held}


def _score(score: WorkerScore) -> dict[str, Any]:
    matched = {tier.value: tokens for tier, tokens in score.matched.items()}
    return {
        "worker_id": score.worker, "cost": score.cost, "ttft_s": score.ttft_s, "matched": matched,
    }  # fmt: skip
