"""Generated tool-calling agents at given times: few system prompts, many conversations.

Modelled on the published description of Mooncake's `toolagent` trace: nearly all prompts begin with
one of three system prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from flexcache.router.simulate.agents import BLOCK_TOKENS
from flexcache.router.simulate.requests import Recorded, SimRequest

_SYSTEM_SHARES = 0.46, 0.39, 0.15
_SYSTEM_BLOCKS = 12, 6, 3
_MEAN_TURNS = 5.0
_TURN_TOKENS = 200, 2_400
_OUTPUT_TOKENS = 20, 350
_BETWEEN_TURNS_S = 20.0
_REQUESTS_PER_S = 6.5


def tool_agents(num_requests: int = 12_000, *, load: float = 1.0, seed: int = 0) -> Recorded:
    """Return conversations that begin at random times.

    Args:
        load: Factor of the rate of requests, which is 6.5 per second.
    """
    rng = random.Random(seed)
    duration_s = num_requests / (_REQUESTS_PER_S * load)
    requests: list[SimRequest] = []
    for session in count(1):
        if len(requests) >= num_requests:
            break
        requests += _conversation(rng, session, rng.uniform(0, duration_s))
    requests.sort(key=lambda request: request.time_s)
    return Recorded(requests[:num_requests], BLOCK_TOKENS)


def _conversation(rng: random.Random, session: int, time_s: float) -> Iterator[SimRequest]:
    (system,) = rng.choices(range(len(_SYSTEM_SHARES)), _SYSTEM_SHARES)
    shared = _SYSTEM_BLOCKS[system]
    num_tokens = shared * BLOCK_TOKENS
    for turn in range(1 + int(rng.expovariate(1 / _MEAN_TURNS))):
        num_tokens += rng.randint(*_TURN_TOKENS)
        blocks = range(-(-num_tokens // BLOCK_TOKENS))
        yield SimRequest(
            request_id=f"{session}.{turn}",
            time_s=time_s,
            num_tokens=num_tokens,
            output_tokens=rng.randint(*_OUTPUT_TOKENS),
            keys=[(-1 - system if i < shared else session, i) for i in blocks],
            session=session,
        )
        time_s += rng.expovariate(1 / _BETWEEN_TURNS_S)
