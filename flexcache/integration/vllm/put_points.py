"""Where a running request is stored, so that it can be resumed there.

Windows slide and states are replaced while a request runs, so what they hold at a point is copied
in the step that computes past it:

    prompt ##################|  answer ......................
           |        |      | |         |                   |
           |        |      | |         interval            request's end: the last position there
           |        |      | prompt's end
           |        |      the last position below it: a repeated prompt resumes here
           |        every `tail_interval_tokens`
           where other prompts part from this one, if vLLM has noticed

Models of full attention only need the prompt's end and the request's: they resume anywhere.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexcache.config.model import KVGroup

_MIN_INTERVAL = 512  # tokens
_WINDOWS_PER_INTERVAL = 4


@dataclass(frozen=True)
class PutPoints:
    """The rule of one engine.

    Attributes:
        position: Tokens between the positions where prefixes can end.
        interval: Tokens between tails; 0 if prompts can be resumed anywhere.
    """

    position: int
    interval: int = 0

    def next(self, num_tokens: int, num_prompt_tokens: int, junction: int = 0) -> int | None:
        """Return the first point behind ``num_tokens`` at which a request is stored.

        Args:
            junction: Tokens that the prompt shares with others, as far as known.
        """
        if not self.interval:
            end = self.floor(num_prompt_tokens)
            return end if end > num_tokens else None
        points = (
            self.floor(num_prompt_tokens - 1),  # the last token is always computed
            self.floor(junction),
            (num_tokens // self.interval + 1) * self.interval,
        )
        return min(point for point in points if point > num_tokens)

    def floor(self, num_tokens: int) -> int:
        """Return the last position that ``num_tokens`` reach."""
        return num_tokens // self.position * self.position


def tail_interval(
    groups: Sequence[KVGroup], position: int, tail_interval_tokens: int | None = None
) -> int:
    """Return tokens between tails: those set, in whole positions; 0 for a model without tails.

    By default four windows, so that tails cost a quarter of keeping all of the windows' KV.
    """
    if all(group.is_dense for group in groups):
        return 0
    window = max(group.window for group in groups)
    wanted = tail_interval_tokens or max(_MIN_INTERVAL, _WINDOWS_PER_INTERVAL * window)
    return -(-wanted // position) * position
