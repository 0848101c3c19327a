"""The router as a library: events in, decisions out. No HTTP, no sockets.

python examples/router_library.py
"""

from __future__ import annotations

from flexcache.events.wire import BlockStored, EventBatch
from flexcache.router import EventSource, KVRouter, RouteRequest, WorkerSpec, WorkerState

BLOCK = 16
PROMPT = list(range(1000, 1000 + 40 * BLOCK))

router = KVRouter()
router.set_workers(
    [
        WorkerSpec(name=name, url=f"http://{name}:8000", sources=(EventSource(f"tcp://{name}:1"),))
        for name in ("a", "b")
    ]
)
for name in ("a", "b"):
    router.set_state(name, WorkerState.UP)

# Engine b says that it holds the first 30 blocks of a prompt, under its own names for them.
stored = BlockStored(
    block_hashes=list(range(30)),
    parent_block_hash=None,
    token_ids=PROMPT[: 30 * BLOCK],
    block_size=BLOCK,
    lora_id=None,
    medium="GPU",
    lora_name=None,
)
router.apply("tcp://b:1", EventBatch(ts=0.0, events=[stored]))

now = 0.0  # seconds of any clock
for request_id in ("one", "two", "three"):
    request = RouteRequest(request_id=request_id, num_tokens=len(PROMPT), token_ids=PROMPT)
    decision = router.choose(request, now)
    assert decision is not None
    print(f"{request_id}: engine {decision.worker}, {decision.matched_tokens} tokens held there")
    router.first_token(request_id, now + 0.2)
    router.ended(request_id, now + 1.0, cached_tokens=decision.matched_tokens)
    now += 1.0
print(router.stats(now).routing.cached_tokens)
