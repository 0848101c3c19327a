"""Sessions of Claude Code and Codex, asked of OpenAI-compatible servers over HTTP."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from agent_sessions import TRANSCRIPTS, of_length, session_of, usage_of
from conversations import Answer, Conversations, Session

from flexcache.router.proxy.answers import OutputWatch


@dataclass(slots=True)
class AgentSession(Session):
    """A session of one of the clients, by turns of either."""

    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    target: str = ""

    @property
    def is_over(self) -> bool:
        return self.num_asked == len(self.bodies)


class AgentConversations(Conversations):
    """Asks one server the requests of many agents."""

    def _sessions(self) -> Sequence[Session]:
        targets, made = list(TRANSCRIPTS), []
        for number in range(self.shape.num_sessions):
            target = targets[number % len(targets)]
            headers, bodies = session_of(target, f"{self.text_seed}-{number}")
            made.append(
                AgentSession(number, random.Random(), self.shape, "", 0, headers, bodies, target)
            )
        return made

    async def _ask(self, client: aiohttp.ClientSession, session: Session) -> Session:
        assert isinstance(session, AgentSession)
        turn, target = session.num_asked, session.target
        session.num_asked += 1
        few = of_length(target, self.shape.output_tokens)
        body = {**session.bodies[turn], **few, "model": self.model}
        answer = Answer(session.number, turn, 0, 0.0, 0.0)
        self.answers.append(answer)
        began = time.monotonic()
        async with client.post(
            self.url + target, data=json.dumps(body), headers={
                "Content-Type": "application/json", **session.headers,
            },
        ) as response:  # fmt: skip
            answer.take_head(response)
            lines, output = list[str](), OutputWatch(target, is_stream=True)
            async for line in response.content:
                if not answer.ttft_s and output.sees(line):
                    answer.ttft_s = time.monotonic() - began
                lines.append(line.decode())
        answer.e2e_s = time.monotonic() - began
        if answer.status == 200:
            answer.cached, answer.prompt_tokens = usage_of(target, "".join(lines))
        return session
