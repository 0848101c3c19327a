"""Descriptor limit of this process: every socket and file takes one."""

from __future__ import annotations

import resource

_MOST = 1 << 20  # some container runtimes allow 2**30: programs that close each take minutes


def raise_limit() -> int:
    """Raise the soft limit as far as the hard one allows; return it. It is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux has no unlimited one
    limit = max(soft, min(hard, _MOST))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
