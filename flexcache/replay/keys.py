"""Reads the block keys of a trace, which `flexcache.tracing.tracer` writes."""

from __future__ import annotations

import msgspec

from flexcache.tracing.records import KEY_BYTES, Matched


class _Keys:
    """Keys of blocks from ``start`` on; earlier ones are in ``base``, which starts earlier.

    ``jump`` is a base further back, chosen so that any base is found in O(log n) steps.
    """

    __slots__ = ("base", "depth", "jump", "rest", "start")

    def __init__(self, base: _Keys | None, start: int, rest: bytes) -> None:
        self.start = start
        self.rest = rest
        self.base: _Keys = self if base is None else base
        self.jump: _Keys = self.base
        self.depth: int = 0 if base is None else base.depth + 1
        far = self.base.jump
        if self.base.depth - far.depth == far.depth - far.jump.depth:
            self.jump = far.jump

    def last_before(self, stop: int) -> _Keys:
        """Return the nearest of this one and its bases that starts before ``stop``."""
        keys = self
        while keys.start >= stop:
            keys = keys.jump if keys.jump.start >= stop else keys.base
        return keys


class KeyReader:
    """Completes the keys of one file's matches. Uses no more memory than the file's size.

    A match costs at most as many steps as it has keys, and O(log n) for shared ones.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[_Keys, int]] = {}
        """Keys and number of blocks, by task."""
        self._last: tuple[_Keys, bytes] = _Keys(None, 0, b""), b""
        """The last completed keys: a prompt that grows with each call costs one copy."""

    def complete(self, match: Matched) -> Matched:
        """Return the match with all of its keys.

        Raises:
            ValueError: An earlier line that this one refers to is missing, or keys are.
        """
        own, keys = _Keys(None, 0, match.keys), match.keys
        if match.base:
            if match.base not in self._prompts:
                raise ValueError(
                    f"task {match.task} refers to keys of task {match.base}, which is missing"
                )
            base, num_blocks = self._prompts[match.base]
            if match.base_blocks > num_blocks:
                raise ValueError(
                    f"task {match.task} refers to {match.base_blocks} blocks of task "
                    f"{match.base}, which has {num_blocks}"
                )
            if match.base_blocks:
                base = base.last_before(match.base_blocks)
                own = _Keys(base, match.base_blocks, match.keys) if match.keys else base
                keys = self._join(base, match.base_blocks) + match.keys
        if len(keys) != match.stop * KEY_BYTES:
            raise ValueError(f"task {match.task} has {match.stop} blocks and {len(keys)} key bytes")
        self._prompts[match.task] = own, match.stop
        self._last = own, keys
        return msgspec.structs.replace(match, base=0, base_blocks=0, keys=keys)

    def _join(self, keys: _Keys, stop: int) -> bytes:
        """Return the first ``stop`` keys."""
        last, whole = self._last
        pieces = []
        while stop:
            keys = keys.last_before(stop)
            if keys is last and len(whole) >= stop * KEY_BYTES:
                pieces.append(whole[: stop * KEY_BYTES])
                break
            pieces.append(keys.rest[: (stop - keys.start) * KEY_BYTES])
            stop = keys.start
        return b"".join(reversed(pieces))
