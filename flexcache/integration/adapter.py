"""Parts that the engines' adapters share: hints, calls about tasks, loads by layer, counters."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from flexcache.cache.control import LONGEST_PIN_S
from flexcache.client.arguments import GroupBlocks
from flexcache.errors import ConfigError, FlexCacheError
from flexcache.ids import KVStatus
from flexcache.logs import log_event
from flexcache.manager import KVManager
from flexcache.stats import TotalsStats
from flexcache.tasks.instructions import PromisedLoad

logger = logging.getLogger(__name__)


def safely(call: Callable[..., Any], *arguments: Any, if_failed: Any = None, **options: Any) -> Any:
    """Make a call and return its answer; log a failure, and return ``if_failed``."""
    try:
        return call(*arguments, **options)
    except (FlexCacheError, TimeoutError, ValueError, KeyError) as error:
        log_event(logger, logging.WARNING, "call_failed", call=call.__name__, error=error)
        return if_failed


_warned: set[str] = set()


def read_hint(
    params: Mapping[str, Any], request_id: str, name: str, convert: Callable[[Any], Any]
) -> Any:
    """Return a hint of a request's sender; None if there is none, or it makes no sense."""
    hint = params.get(f"flexcache_{name}")
    try:
        return None if hint is None else convert(hint)
    except (TypeError, ValueError, OverflowError) as error:
        hint_ignored(request_id, name, error)
        return None


def hint_ignored(request_id: str, name: str, reason: object) -> None:
    """Log a hint that makes no sense; the first of each name as a warning."""
    level = logging.DEBUG if name in _warned else logging.WARNING
    _warned.add(name)
    log_event(
        logger, level, "hint_ignored", request=request_id, hint=f"flexcache_{name}", reason=reason
    )


def as_bool(hint: Any) -> bool:
    if not isinstance(hint, bool):
        raise TypeError("must be true or false")
    return hint


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_count(hint: Any) -> int:
    if not is_count(hint):
        raise TypeError("must be a whole number of at least 0")
    return int(hint)


def as_pin_ttl_s(hint: Any) -> float:
    if isinstance(hint, bool):
        raise TypeError("must be a number")
    seconds = float(hint)
    if not 0 < seconds <= LONGEST_PIN_S:
        raise ValueError(f"must be above 0 and at most {LONGEST_PIN_S:,.0f} s")
    return seconds


_ANSWER_PATIENCE_S = 0.1


class TaskCalls:
    """Calls to one engine's `KVManager`, once it is open: until then nothing is found or stored.

    The cache may fail, but the request must not: errors are logged, and the answer is that there is
    nothing to load or store.

    Args:
        manager: None if `open` follows.
        block_size: Tokens between the positions where prefixes can end.

    Attributes:
        manager: Unset until it is open.
        is_open: Whether there is a manager.
        effect_of_lost_load: What the engine does about it, for the log.
    """

    manager: KVManager
    effect_of_lost_load = ""

    def __init__(self, manager: KVManager | None, block_size: int) -> None:
        self.is_open = False
        self._block_size = block_size
        if manager is not None:
            self.open(manager)

    def open(self, manager: KVManager) -> None:
        """Call this one from now on."""
        self.manager = manager
        self.is_open = True

    def launch(self, task_id: int, blocks: GroupBlocks, gated: bool = True) -> bool:
        """Launch a matched task; return whether it was launched. Else it has ended, or is
        cancelled.

        Args:
            blocks: GPU blocks of each group.
            gated: Whether the ranks begin only when they are asked to (`KVTPClient.open_gates`).
        """
        return bool(self.launch_all({task_id: blocks}, gated))

    def launch_all(self, blocks: Mapping[int, GroupBlocks], gated: bool = True) -> list[int]:
        """Launch matched tasks, given the blocks of each; return those that were launched. The
        others have ended, or are cancelled."""
        task_ids = list(blocks)
        try:
            self.manager.launch(task_ids, group_blocks=list(blocks.values()), gated=gated)
            # A task that had already ended (because the server was lost, say) was not launched.
            ended = self.manager.try_wait(task_ids)
        except (FlexCacheError, ValueError, KeyError) as error:
            if len(task_ids) > 1 and not isinstance(error, FlexCacheError):
                # They were refused as a whole because of one of them.
                return [each for each in task_ids if self.launch(each, blocks[each], gated)]
            for task_id in task_ids:
                log_event(logger, logging.WARNING, "launch_failed", task=task_id, error=error)
                self.cancel(task_id)
            return []
        return [
            task_id
            for task_id in task_ids
            if task_id not in ended or ended[task_id].status is KVStatus.SUCCESS
        ]

    def promise(self, task_id: int) -> PromisedLoad | None:
        """Start a matched get that cannot be lost any more, if that can be promised."""
        promised: PromisedLoad | None = safely(self.manager.promise, task_id)
        return promised

    def end_promises(self) -> None:
        """No step counts on a promised load any more. Idempotent."""
        if self.is_open:
            self.manager.end_promises()

    def has_arrived(self, task_id: int, num_tokens: int) -> bool:
        """Return whether everything that was matched was loaded.

        The workers have seen the task's end; the server's answer may still be on its way. There is
        none soon if a rank has refused the load: the task is then cancelled.
        """
        try:
            response = self.manager.wait([task_id], _ANSWER_PATIENCE_S)[task_id]
        except (FlexCacheError, KeyError):
            return False
        if response.status is KVStatus.TIMEOUT:
            self.cancel(task_id)
            return False  # else a refused load would be offered again without end
        if int(response.mask.sum()) == num_tokens:
            return True
        log_event(
            logger, logging.WARNING, "load_lost", task=task_id, error=response.error,
            effect=self.effect_of_lost_load,
        )  # fmt: skip
        return False

    def ended(self, task_ids: Iterable[int]) -> Collection[int]:
        """Return those of the tasks whose copies to and from the GPU have ended on every rank."""
        asked = list(task_ids)
        try:
            return self.manager.try_wait(asked).keys() if asked else asked
        except (FlexCacheError, KeyError):  # the cache was shut down: it has let go of the GPU
            return asked

    def wait_ended(self, task_ids: Iterable[int], timeout_s: float) -> None:
        """Wait until copies to and from the GPU have ended on every rank, or for ``timeout_s``."""
        if asked := list(task_ids):  # there are none before it is open
            safely(self.manager.wait, asked, timeout_s)

    def cancel(self, task_id: int) -> None:
        safely(self.manager.cancel, [task_id])

    def report_prefill(self, tokens_per_s: float) -> None:
        if self.is_open:
            safely(self.manager.report_prefill, tokens_per_s)

    def reset(self) -> bool:
        """Drop everything cached and unused. Return whether that succeeded."""
        return not self.is_open or safely(self.manager.reset, if_failed=False) is not False


class LayerwiseRule:
    """The setting ``layerwise_load``, applied to one engine.

    Such a load saves the step in which a request only waits, and computing begins when its first
    layer has arrived. But the whole step waits for it, and so does every request in the step.

    Args:
        setting: "auto", "on" or "off".
        obstacle: Why this engine does not support it; None if it does.

    Raises:
        ConfigError: The setting is "on" and not supported.
    """

    def __init__(self, setting: str, obstacle: str | None) -> None:
        if setting == "on" and obstacle is not None:
            raise ConfigError(f"layerwise_load = 'on': {obstacle}")
        self._is_off = setting == "off" or obstacle is not None
        self._always = setting == "on"
        self._running: set[str] = set()

    @property
    def depends_on_times(self) -> bool:
        """Whether it matters how long loads and steps take."""
        return not self._is_off and not self._always

    def step(self, request_ids: Iterable[str]) -> None:
        """Record which requests the step computes that is about to start."""
        self._running = set(request_ids)

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)

    def allows(self, request_id: str) -> bool:
        """Return whether a load from DRAM may run within the step in which the request starts,
        however long it takes."""
        return not self._is_off and (self._always or self._running <= {request_id})


_MIN_TOKENS = 128  # a smaller batch says little
_NUM_BATCHES = 32
_NEWS = 0.05  # smaller changes are not reported


class PrefillRate:
    """Computes tokens per second of the recent prefills.

    A batch that is launched while another one runs begins when that one ends. The rate is that of
    the batch in which the median token was computed: a mean would remember a first batch that
    compiled kernels for seconds, and count small batches, which use a GPU badly, like large ones.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, int]] = deque(maxlen=_NUM_BATCHES)
        self._last_end_s = 0.0
        self._reported = 0.0

    def batch_ended(self, num_tokens: int, launched_s: float, now: float) -> float | None:
        """Record a batch; return the rate if it has changed.

        Args:
            num_tokens: Tokens of prompts that it computed; 0 if it did other things, too.
        """
        begin_s = max(launched_s, self._last_end_s)
        self._last_end_s = now
        if num_tokens < _MIN_TOKENS or now <= begin_s:
            return None
        self._batches.append((num_tokens / (now - begin_s), num_tokens))
        rate = self._median()
        if abs(rate - self._reported) < _NEWS * self._reported:
            return None
        self._reported = rate
        return rate

    def _median(self) -> float:
        left = sum(num_tokens for _, num_tokens in self._batches) / 2
        for rate, num_tokens in sorted(self._batches, reverse=True):
            left -= num_tokens
            if left <= 0:
                return rate
        return 0.0


COUNTERS = {
    "dram_hit_tokens": "Prompt tokens found in DRAM, at each look-up.",
    "ssd_hit_tokens": "Prompt tokens found on SSD, at each look-up.",
    "peer_hit_tokens": "Prompt tokens found in another host's DRAM, at each look-up.",
    "remote_hit_tokens": "Prompt tokens found in the remote store, at each look-up.",
    "missed_tokens": "Prompt tokens that were looked up and not found.",
    "stored_tokens": "Tokens whose KV was copied off the GPU.",
    "loaded_bytes": "Bytes copied to the GPU.",
    "load_seconds": "Time that copies to the GPU took, summed over copies.",
    "stored_bytes": "Bytes copied off the GPU.",
    "store_seconds": "Time that copies off the GPU took, summed over copies.",
    "ssd_read_bytes": "Bytes read from SSD.",
    "ssd_written_bytes": "Bytes written to SSD.",
    "peer_read_bytes": "Bytes read from other hosts' DRAM.",
    "remote_read_bytes": "Bytes read from the remote store.",
    "remote_written_bytes": "Bytes written to the remote store.",
    "skipped_blocks": "Blocks cached and not loaded: computing is faster, or DRAM is full.",
    "failed_loads": "Loads that did not load all of their blocks.",
    "dropped_blocks": "Blocks that could not be stored, for any reason.",
}
VLLM_COUNTERS = {
    **COUNTERS,
    "early_look_ups": "Look-ups at the remote store that began when a request arrived.",
    "early_loads": "Loads to DRAM that began before vLLM asked about their request.",
    "cancelled_look_ups": "Requests that went away before vLLM asked about them.",
}

_LOADS = ("H2D", "DISK2H", "PEER2H", "REMOTE2H", "DISK2D")


def increases(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what has increased. If any counter fell, all are a new server's, which started at
    zero."""
    is_new = any(value < before.get(name, 0) for name, value in after.items())
    gains = {name: value - (0 if is_new else before.get(name, 0)) for name, value in after.items()}
    return {name: gain for name, gain in gains.items() if gain}


def read_counters(stats: Mapping[str, Any], tokens_per_block: int) -> dict[str, float]:
    """Read this engine's current counters from `KVManager.stats`."""
    mine = msgspec.convert(stats["engine"], TotalsStats)
    hits, ops = mine.hit_blocks, mine.ops
    return {
        "dram_hit_tokens": hits.get("CPU", 0) * tokens_per_block,
        "ssd_hit_tokens": hits.get("SSD", 0) * tokens_per_block,
        "peer_hit_tokens": hits.get("PEER", 0) * tokens_per_block,
        "remote_hit_tokens": hits.get("REMOTE", 0) * tokens_per_block,
        "missed_tokens": mine.missed_blocks * tokens_per_block,
        "stored_tokens": (ops["D2H"].blocks + ops["D2DISK"].blocks) * tokens_per_block,
        "loaded_bytes": ops["H2D"].bytes + ops["DISK2D"].bytes,
        "load_seconds": ops["H2D"].seconds + ops["DISK2D"].seconds,
        "stored_bytes": ops["D2H"].bytes + ops["D2DISK"].bytes,
        "store_seconds": ops["D2H"].seconds + ops["D2DISK"].seconds,
        "ssd_read_bytes": ops["DISK2H"].bytes + ops["DISK2D"].bytes,
        "ssd_written_bytes": ops["H2DISK"].bytes + ops["D2DISK"].bytes,
        "peer_read_bytes": ops["PEER2H"].bytes,
        "remote_read_bytes": ops["REMOTE2H"].bytes,
        "remote_written_bytes": ops["H2REMOTE"].bytes,
        "skipped_blocks": sum(mine.skipped_blocks.values()),
        "failed_loads": sum(ops[kind].failed_ops for kind in _LOADS),
        "dropped_blocks": sum(mine.dropped_blocks.values()),
    }
