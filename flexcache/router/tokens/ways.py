"""Decides how the prompts of a model become tokens: here, by asking the engine, or not at all."""

from __future__ import annotations

from enum import Enum

from flexcache.errors import InternalError
from flexcache.router.tokens.body import Kind

AGREEMENTS_TO_RETURN = 3
"""Comparisons in a row that must agree before a kind that differed is made here again."""


class Way(str, Enum):
    """How prompts become tokens."""

    LOCAL = "local"
    RENDER = "render"
    """The engine is asked."""
    UNKNOWN = "unknown"
    """They do not: the request goes by load."""


class Ways:
    """The ways of one model, for each kind of prompt.

    Args:
        local: Kinds for which there are tokenizer and template here.
        missing: Why the others have none.
    """

    def __init__(self, local: frozenset[Kind], missing: str) -> None:
        self._local = local
        self._missing = missing
        self._engine_renders: bool | None = None
        self._agreed: dict[Kind, int] = {}  # comparisons in a row; 0: the last one differed
        self._differing: set[Kind] = set()
        self._checks = dict.fromkeys(Kind, 0)
        self._mismatches = dict.fromkeys(Kind, 0)

    def has_local(self, kind: Kind) -> bool:
        """Tell whether tokens of a kind can be made here."""
        return kind in self._local

    def way(self, kind: Kind) -> Way:
        """Tell how prompts of a kind become tokens now."""
        if kind in self._local and kind not in self._differing:
            return Way.LOCAL
        return Way.UNKNOWN if self._engine_renders is False else Way.RENDER

    def compared(self, kind: Kind, equal: bool) -> None:
        """Note a comparison of the tokens made here with the engine's."""
        self._engine_renders = True
        self._checks[kind] += 1
        if not equal:
            self._mismatches[kind] += 1
            self._agreed[kind] = 0
            self._differing.add(kind)
            return
        self._agreed[kind] = self._agreed.get(kind, 0) + 1
        if self._agreed[kind] >= AGREEMENTS_TO_RETURN:
            self._differing.discard(kind)

    def engine_renders(self, renders: bool) -> None:
        """Note whether the engine has ``/render`` or ``/tokenize``."""
        self._engine_renders = renders

    @property
    def checks(self) -> int:
        """Comparisons so far."""
        return sum(self._checks.values())

    @property
    def mismatches(self) -> int:
        """Comparisons that differed."""
        return sum(self._mismatches.values())

    def reason(self, kind: Kind) -> str:
        """Say why prompts of a kind go that way."""
        if self.way(kind) is Way.LOCAL:
            if self._agreed.get(kind):
                return "checked"
            return "unchecked: no /tokenize" if self._engine_renders is False else "unchecked"
        why = self._missing if kind not in self._local else "differs from the engine"
        return f"{why}; no /tokenize" if self._engine_renders is False else why

    def check(self) -> None:
        """Check the state.

        Raises:
            InternalError: It is impossible.
        """
        for kind in self._differing:
            if self._agreed.get(kind, 0) >= AGREEMENTS_TO_RETURN or not self._mismatches[kind]:
                raise InternalError(f"{kind} is asked of the engine without a reason")
        if any(self._mismatches[kind] > self._checks[kind] for kind in Kind):
            raise InternalError("more mismatches than checks")
