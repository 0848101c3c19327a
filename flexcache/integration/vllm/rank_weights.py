"""Weights and adapters of one rank: when they change, and which adapters are loaded.

vLLM tells no connector. So the worker's own methods are watched, those of vLLM 0.28 to 0.33 and the
model's, which RL frameworks call directly:

    worker   reload_weights, update_weights, start_weight_update, start_draft_weight_update,
             finish_weight_update, sleep from level 2 on, discard, reset_weights, load_model
    model    load_weights, load_state_dict, also of the draft model; within the wrappers of CUDA
             graphs, since worker extensions reach through them
    LoRA     the manager's _load_adapter: the one function that reads an adapter's files

They run on the worker's thread, so no step runs meanwhile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flexcache.integration.identity.checkpoint import LoadedAdapter
from flexcache.integration.identity.files import ANY_TIME, FileDigests
from flexcache.integration.vllm.callers import find_caller
from flexcache.integration.vllm.metadata import AdapterUse
from flexcache.logs import log_event

logger = logging.getLogger(__name__)

_NEEDED = (
    "reload_weights", "update_weights", "start_weight_update", "finish_weight_update", "sleep",
    "load_model",
)  # fmt: skip
_ALSO = ("start_draft_weight_update", "discard", "reset_weights")
_OF_MODELS = ("load_weights", "load_state_dict")
_KEEPS_WEIGHTS = 1
"""The level of sleep that does."""


class RankWeights:
    """Watches the worker in whose call stack it is made.

    Args:
        changed: Called right before weights change.

    Attributes:
        unwatched: Why weights that have changed once may change unnoticed from then on: this vLLM
            lacks a method to watch.
        num_updates: How often weights have changed.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._depth = 0
        self.unwatched: str | None = None
        self.num_updates = 0
        self._lora: Any = None
        self._digests = FileDigests(since_ns=ANY_TIME, waits=False)
        self._loaded: dict[int, str] = {}
        self._promised: dict[int, tuple[str, set[int]]] = {}
        """What KV was loaded for before its adapter is: the digest, and the blocks."""
        self._broken: set[int] = set()
        """Blocks of such KV whose adapter turned out to be another."""

    def attach(self) -> None:
        """Watch the worker that is being set up. Its model has been loaded."""
        worker = find_caller("model_runner", "load_model")
        if worker is None:
            log_event(
                logger, logging.WARNING, "weights_unwatched",
                reason="this vLLM sets its workers up otherwise",
                remedy="call POST /cache/weights before and after each update of the weights",
            )  # fmt: skip
            return
        missing = [name for name in _NEEDED if not self._watch(worker, name)]
        for name in _ALSO:
            self._watch(worker, name)
        runner = worker.model_runner
        models = _models_of(runner)
        for model in models:
            missing += [name for name in _OF_MODELS if not self._watch(model, name)]
        for part in _parts_of(models):
            for name in _OF_MODELS:
                self._watch(part, name)
        self._watch(runner, "reload_weights")
        self._lora = getattr(runner, "lora_manager", None)
        if self._lora is not None:
            self._watch_adapters(self._lora)
        if missing:
            self.unwatched = f"this vLLM has no {', '.join(missing)}"

    # -- weights ---------------------------------------------------------------------------------

    def _watch(self, owner: Any, name: str) -> bool:
        method = getattr(owner, name, None)
        if method is None:
            return False

        @functools.wraps(method)
        def watched(*arguments: Any, **options: Any) -> Any:
            if name == "sleep" and _level(arguments, options) <= _KEEPS_WEIGHTS:
                return method(*arguments, **options)
            if not self._depth:
                self._note_change(name)
            self._depth += 1
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1

        setattr(owner, name, watched)
        return True

    def _note_change(self, name: str) -> None:
        self.num_updates += 1
        if self.num_updates == 1:
            log_event(logger, logging.INFO, "weights_changed", by=name)
        self._changed()

    # -- adapters --------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[int, str]:
        """Digest of each adapter that is loaded, by vLLM's number of it."""
        if self._lora is None:
            return {}
        present = self._lora.list_adapters()
        return {number: each for number, each in self._loaded.items() if number in present}

    def holds(self, digest: str) -> bool:
        """Return whether KV of the adapter of this digest can be of use here. Any thread."""
        held = [*self._loaded.values()]
        return digest in held or any(digest == each for each, _ in [*self._promised.values()])

    def may_load(self, use: AdapterUse | None, blocks: Iterable[int]) -> bool:
        """Return whether KV of an adapter may be loaded for a request.

        vLLM loads adapters when it runs their requests, which is after their KV. Until then the
        digest of the files is trusted, and checked against what is loaded.
        """
        if use is None:
            return True
        number, digest = use.number, use.digest
        loaded = None if use.reloads else self.adapters.get(number)
        if loaded is None and self._lora is not None and use.can_be_lost:
            promised, of_blocks = self._promised.setdefault(number, (digest, set()))
            of_blocks.update(blocks)
            return promised == digest
        return loaded == digest

    def _watch_adapters(self, manager: Any) -> None:
        kind = type(manager)
        if not hasattr(kind, "_load_adapter"):
            log_event(
                logger, logging.WARNING, "adapters_unwatched",
                reason="this vLLM loads adapters otherwise", effect="their KV is not cached",
            )  # fmt: skip
            self._lora = None
            return

        def load_adapter(request: Any) -> Any:
            loading = LoadedAdapter(request.lora_path)
            # Looked up now: RL frameworks replace it in the class, to load from memory.
            adapter = kind._load_adapter(manager, request)
            loading.identify(self._digests)
            self._note_adapter(request.lora_int_id, loading.name)
            return adapter

        manager._load_adapter = load_adapter

    def _note_adapter(self, number: int, digest: str) -> None:
        self._loaded[number] = digest
        promised, blocks = self._promised.pop(number, (digest, set[int]()))
        if promised != digest:
            self._broken |= blocks

    def take_broken(self) -> set[int]:
        """Return blocks that were loaded for an adapter that turned out to be another."""
        broken, self._broken = self._broken, set()
        return broken


def _level(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    return int(options.get("level", arguments[0] if arguments else 1))


def _models_of(runner: Any) -> list[Any]:
    """Return the model and the draft model, without the wrappers of CUDA graphs first: these hand
    calls on to what they wrap. A call through both is one update."""
    found = [_call(runner, "get_model"), getattr(runner, "model", None)]
    found.append(_call(runner, "get_draft_model"))
    return list({id(model): model for model in found if model is not None}.values())


def _parts_of(models: list[Any]) -> list[Any]:
    """Return the modules of the models, which can be given weights by themselves."""
    parts: dict[int, Any] = {}
    for model in models:
        if callable(modules := getattr(model, "modules", None)):
            parts.update((id(part), part) for part in modules())
    return [part for part in parts.values() if not any(part is model for model in models)]


def _call(owner: Any, name: str) -> Any:
    method = getattr(owner, name, None)
    return method() if callable(method) else None
