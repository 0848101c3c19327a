"""Bounds on what one request, and all of them together, may cost the router."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Beyond these, requests go by load.

    Attributes:
        max_body: Bytes of a body that is looked into.
        max_braces: Braces and brackets in a body; each may be an object that the parser makes.
        max_commas: Commas in a body, which separate the other values, unless it has token ids.
        max_messages: Messages of a chat.
        max_text: Characters of a prompt.
        memo_bytes: Memory of remembered tokens.
        threads: Threads for long texts, by default half the processors and at most 4; as many more
            for short ones, which need not wait for them.
        waiting_chars: Characters that may wait for or be in threads.
        encode_deadline_s: Time to encode a prompt; then its known beginning has to do.
        render_deadline_s: Time for an engine to render a prompt; then, too.
        render_timeout_s: Time after which the engine's answer is given up.
        rendering: Requests that may be at engines at a time.
        check_every_s: Time between comparisons with the engine, for each kind of prompt.
        refresh_every_s: Time between looks at the engines' lists of models.
    """

    max_body: int = 16 << 20
    max_braces: int = 50_000
    max_commas: int = 300_000
    max_messages: int = 4096
    max_text: int = 8 << 20
    memo_bytes: int = 256 << 20
    threads: int = max(1, min(4, (os.cpu_count() or 1) // 2))
    waiting_chars: int = 32 << 20
    encode_deadline_s: float = 2.0
    render_deadline_s: float = 0.05
    render_timeout_s: float = 30.0
    rendering: int = 16
    check_every_s: float = 60.0
    refresh_every_s: float = 10.0
