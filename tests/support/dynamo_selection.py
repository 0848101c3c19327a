"""Dynamo's SelectionService as a process: a line of JSON for each call and for each answer.

Runs in an environment with ``ai-dynamo-runtime``, which need not have FlexCache.
"""

from __future__ import annotations

import asyncio
import json
import sys


async def serve() -> None:
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    for line in iter(sys.stdin.readline, ""):
        name, request = json.loads(line)
        if isinstance(request, str):  # a selection's id
            await getattr(service, name)(request)
            print("{}", flush=True)
            continue
        endpoints = request.get("kv_events_endpoints", {})  # JSON has no integer keys
        request |= {"kv_events_endpoints": {int(rank): endpoints[rank] for rank in endpoints}}
        if not endpoints:
            del request["kv_events_endpoints"]
        print(json.dumps(await getattr(service, name)(request)), flush=True)
    await service.shutdown_async()


if __name__ == "__main__":
    asyncio.run(serve())
