"""Prompts as the cache sees them: block keys and a range of whole blocks.

Callers use tokens and masks over tokens. `PromptMaker` turns those into a `Prompt`, and blocks back
into a mask. Block keys are made here and nowhere else, so a prefetch by HTTP finds what an engine
has stored.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from flexcache.cache.block_keys import (
    ENGINE_KEYS,
    TOKEN_KEYS,
    EngineBlockKeys,
    PromptContent,
    PromptKeys,
    TokenBlockKeys,
    hash_as_engine,
    make_root,
)
from flexcache.config.model import EngineKeys
from flexcache.ids import (
    MAX_KEY_BYTES,
    NO_HAND_OVER,
    NO_INFO,
    BlockKey,
    HandOver,
    PromptDetail,
    RequestInfo,
    RootId,
    TaskKind,
    check_request_info,
)

Mask = npt.NDArray[np.bool_]

_FIRST_LENGTH = 4096


class TokenMasks:
    """Makes masks, which are read-only. Thread-safe.

    Nearly every answer is True from the first token on, or nowhere. Writing 131,072 of them takes a
    quarter of a look-up that is given keys, with what that evicts from the processor's cache. So
    these masks are views of one array: as many True as the longest prompt has tokens, then as many
    False.
    """

    def __init__(self) -> None:
        self._trues_then_falses = _trues_then_falses(_FIRST_LENGTH)

    def make(self, num_tokens: int, first: int, last: int) -> Mask:
        """Return a mask over ``num_tokens``, True at positions ``first <= position < last``.

        Args:
            last: At most ``num_tokens``.
        """
        if first < last and first:
            mask = np.empty(num_tokens, dtype=np.bool_)  # each byte is written once
            mask[:first] = False
            mask[first:last] = True
            mask[last:] = False
            mask.flags.writeable = False
            return mask
        shared = self._trues_then_falses
        if num_tokens > len(shared) // 2:
            shared = self._trues_then_falses = _trues_then_falses(2 * num_tokens)
        start = len(shared) // 2
        if first < last:
            start -= last
        return shared[start : start + num_tokens]


def _trues_then_falses(length: int) -> Mask:
    both = np.zeros(2 * length, dtype=np.bool_)
    both[:length] = True
    both.flags.writeable = False
    return both


Span = Mask | range
"""Which tokens of a prompt: a mask with one run of True, or their positions."""
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Namespace = str | Sequence[str] | None

MAX_PRIORITY = 1000
PRIORITY_STEP_S = 3600.0  # each step of a put's priority counts as a use this much later
MAX_SESSION_ID_LENGTH = 256
MAX_VERSION_LENGTH = 256
LONGEST_RETURN_S = 86_400.0
_MAX_ROOTS = 65_536


class Prompt(msgspec.Struct, frozen=True):
    """A get, put or prefetch of blocks ``[start, stop)`` of a prompt of ``num_tokens``.

    It is made once and handed on as it is. What continues a chain resolves to another one, of the
    whole chain (`Matcher.plan`).

    ``retain_s``: stored blocks of a put count as used this much later when room is needed.
    ``tail_at``: a put also stores the tail behind this many blocks, unless it is 0.
    ``session_id``: whose prompt it is (`prompt_sessions`).
    ``weights``: the generation of the engine's weights that named its keys; tasks are made for the
    present one only.
    ``adapter``: digest of the adapter that its KV needs; ranks without it move nothing.
    ``num_before``: blocks before the caller's prompt, which continues their chain.
    ``hand_over``: what a get may wait for.
    """

    # A struct: as a named tuple it took a match 2 % longer, most of it to read the fields.

    kind: TaskKind
    keys: PromptKeys
    start: int
    stop: int
    num_tokens: int
    retain_s: float = 0.0
    tail_at: int = 0
    session_id: str | None = None
    weights: int = 0
    adapter: str = ""
    num_before: int = 0
    hand_over: HandOver = NO_HAND_OVER

    def up_to(self, stop: int) -> Prompt:
        """Return the part before block ``stop``."""
        stop = min(self.stop, stop)
        return msgspec.structs.replace(self, start=min(self.start, stop), stop=stop)

    def before_last_token(self, tokens_per_block: int) -> Prompt:
        """Return what a hit may cover if a state sums up the tokens: the last is computed."""
        return self.up_to(max(0, self.num_tokens - 1) // tokens_per_block)


class PromptName(TypedDict, total=False):
    """What the keys of a prompt depend on, beside its tokens.

    Attributes:
        namespace: Isolates keys: tenant, LoRA, cache salt.
        block_keys: The engine's own chained block hashes; if given, tokens are only counted, and
            published in KV events: -1 stands for an unknown one.
        adapter: Digest of the adapter (LoRA) that the KV belongs to. Ranks that do not hold it
            (`KVTPClient`) move nothing.
    """

    namespace: Namespace
    block_keys: Sequence[bytes] | None
    adapter: str


class PromptOptions(PromptName, total=False):
    """What a caller may say of a prompt beside its tokens, and what `PromptName` has.

    Attributes:
        parent_key: The key of a cached block, if ``block_keys`` continue the chain that it ends.
            Tokens and masks are those of the continuation.
        request_info: Metadata for KV events and traces.
        session_id: Names the user's session that the prompt belongs to (`KVManager.session_hint`).
        weights: `KVManager.weights_generation` when the request began. If the weights are others by
            now, nothing is found, and of a put nothing is stored. None: they are the present ones.
        hand_over: What a get may wait for, if it ``awaits_loads``.
    """

    parent_key: bytes | None
    request_info: RequestInfo | None
    session_id: str | None
    weights: int | None
    hand_over: HandOver


class _Names(NamedTuple):
    """What the weights are called, and the roots that were made with it: swapped as one."""

    generation: int
    version: str
    roots: dict[tuple[Namespace, str, str], RootId]


class PromptMaker:
    """Makes the prompts of one model. Thread-safe.

    Args:
        fingerprint: Identifies model and block size: prompts of another model have other keys.
        tokens_per_block: The block size.
        prompt_detail: Returns how much of a prompt the cache's observers need. It may change.
        version: What the weights are called from the start.
        engine_keys: How the engine makes keys, if it does.
    """

    def __init__(
        self, fingerprint: str, tokens_per_block: int, prompt_detail: Callable[[], PromptDetail],
        version: str = "", engine_keys: EngineKeys | None = None,
    ) -> None:  # fmt: skip
        self.tokens_per_block = tokens_per_block
        self._prompt_detail = prompt_detail
        self._fingerprint = fingerprint
        self._engine_keys = engine_keys
        self._names = _Names(0, version, {})
        self._masks = TokenMasks()

    @property
    def generation(self) -> int:
        """Which generation of the engine's weights names prompts now."""
        return self._names.generation

    def rename(self, generation: int, version: str) -> None:
        """Name prompts by other weights from now on. Earlier generations are ignored."""
        # Names come on two ways, with the session and as news, and so maybe late or twice.
        if generation > self._names.generation:
            self._names = _Names(generation, version, {})

    def make(
        self, kind: TaskKind, token_ids: Tokens, token_mask: Span | None = None,
        retain_s: float = 0.0, namespace: Namespace = None,
        block_keys: Sequence[bytes] | None = None, parent_key: bytes | None = None,
        request_info: RequestInfo | None = None, session_id: str | None = None,
        weights: int | None = None, adapter: str = "", hand_over: HandOver = NO_HAND_OVER,
    ) -> Prompt:  # fmt: skip
        """Make a prompt of the whole blocks within the first run of True in ``token_mask``, or
        within a range of positions.

        With ``block_keys`` only the number of tokens matters. With a ``parent_key`` they continue
        the chain that ends with it.

        The arguments from ``namespace`` on are `PromptOptions`; name them.

        Raises:
            ValueError: An argument has the wrong shape, type or size.
        """
        # They are not keyword-only: each default of those is looked up in a table, at each call.
        if session_id is not None:
            check_session_id(session_id)
        if request_info is not None:
            check_request_info(request_info)
        if weights is not None or adapter:
            _check_weights(weights, adapter)
        # Read once, since another thread may rename the weights: generation and roots go together.
        names = self._names
        try:
            num_tokens = len(token_ids)
        except TypeError:
            raise _no_tokens(type(token_ids).__name__) from None
        start, stop = 0, num_tokens // self.tokens_per_block
        if token_mask is not None:
            start, stop = self._block_range(num_tokens, token_mask)
        content = None
        if detail := self._prompt_detail():
            tokens = _own_copy(token_ids) if detail is PromptDetail.TOKENS else ()
            content = PromptContent(tokens, request_info or NO_INFO)
        keys = self._keys(token_ids, (namespace, adapter), names, block_keys, parent_key, content)
        # An engine may have hashed fewer blocks than the tokens make.
        stop = min(stop, keys.num_blocks)
        generation = names.generation if weights is None else weights
        return Prompt(
            kind, keys, min(start, stop), stop, num_tokens, retain_s, 0, session_id, generation,
            adapter, 0, hand_over,
        )  # fmt: skip

    def named(
        self, token_ids: Tokens | None, options: PromptName, kind: TaskKind = TaskKind.GET
    ) -> list[Prompt]:
        """Make the prompt that a user's call is about, if it is about one.

        ``block_keys`` alone name it too, since only the number of tokens matters. Without them it
        is named as the engine names its own.

        Raises:
            TypeError: An option is none that names a prompt, ``session_id`` for one.
            ValueError: An argument has the wrong shape, type or size.
        """
        if others := options.keys() - PromptName.__annotations__.keys():
            raise TypeError(f"a prompt is not named by {', '.join(sorted(others))}")
        keys = options.get("block_keys")
        if token_ids is None and keys is not None:
            token_ids = range(len(keys) * self.tokens_per_block)
        if token_ids is None:
            return []
        if keys is None and (how := self._engine_keys) is not None:
            tokens = _as_tokens(token_ids).tolist()
            keys = hash_as_engine(tokens, how, self.tokens_per_block)
        place = self._place(options.get("namespace"))
        adapter = options.get("adapter", "")
        return [self.make(kind, token_ids, namespace=place, block_keys=keys, adapter=adapter)]

    def _place(self, namespace: Namespace) -> Namespace:
        """Return the namespace of prompts that the engine has under a user's."""
        if self._engine_keys is None:
            return namespace
        own, parts = self._engine_keys.namespace, _parts(namespace)
        # It may be there already, also before parts that the adapter appends.
        windows = (parts[i : i + len(own)] for i in range(len(parts)))
        return parts if own in windows else (*parts, *own)

    def roots(self, namespace: Namespace, adapter: str = "") -> tuple[str | None, list[RootId]]:
        """Return what the keys of a namespace begin with: the tenant, if the namespace is one, or
        else the roots that its prompts have now, by tokens and by an engine's keys.

        Raises:
            ValueError: It is no namespace, or has no parts.
        """
        names = self._names
        parts, place = _parts(namespace), self._place(namespace)
        roots = [self._root(place, adapter, kind, names) for kind in (TOKEN_KEYS, ENGINE_KEYS)]
        if not parts:  # by a slip, say: these are the roots of all prompts without a namespace
            raise ValueError("namespace must have at least one part")
        is_tenant = len(parts) == 1 and not adapter
        return (parts[0], []) if is_tenant else (None, roots)

    def token_mask(self, num_tokens: int, start: int, num_blocks: int) -> Mask:
        """Make a mask over ``num_tokens`` that is True for ``num_blocks`` from block ``start``."""
        first = start * self.tokens_per_block
        return self._masks.make(num_tokens, first, first + num_blocks * self.tokens_per_block)

    def _keys(
        self,
        token_ids: Tokens,
        place: tuple[Namespace, str],
        names: _Names,
        block_keys: Sequence[bytes] | None,
        parent_key: bytes | None,
        content: PromptContent | None,
    ) -> PromptKeys:
        if parent_key is not None and (block_keys is None or not _is_key(parent_key)):
            raise ValueError(f"a parent_key must be 1 to {MAX_KEY_BYTES} bytes, beside block_keys")
        if block_keys is not None:
            _check_keys(block_keys)
            root = self._root(*place, ENGINE_KEYS, names)
            num_blocks = len(token_ids) // self.tokens_per_block
            parent = None if parent_key is None else BlockKey(parent_key)
            return EngineBlockKeys(root, block_keys, num_blocks, content, parent)
        tokens = _as_tokens(token_ids)
        return TokenBlockKeys(
            self._root(*place, TOKEN_KEYS, names), tokens, self.tokens_per_block, content
        )

    def _root(self, namespace: Namespace, adapter: str, kind: str, names: _Names) -> RootId:
        if namespace is not None and not isinstance(namespace, str | tuple):
            namespace = _parts(namespace)
        root = names.roots.get((namespace, adapter, kind))
        if root is None:
            parts = _parts(namespace)
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
            # Namespaces come from requests (a cache salt), so the table needs a bound.
            if len(names.roots) >= _MAX_ROOTS:
                names.roots.clear()
            try:
                root = make_root(self._fingerprint, parts, kind, names.version, adapter)
            except UnicodeEncodeError as error:
                raise ValueError(f"namespace = {namespace!r}: {error.reason}") from None
            names.roots[namespace, adapter, kind] = root
        return root

    def _block_range(self, num_tokens: int, token_mask: Span) -> tuple[int, int]:
        size = self.tokens_per_block
        if isinstance(token_mask, range):
            first, last = token_mask.start, min(token_mask.stop, num_tokens)
            if first < 0 or token_mask.step != 1:
                raise ValueError(f"token_mask = {token_mask}: no range of step 1 within the prompt")
            start = -(-first // size)
            return (start, max(start, last // size)) if first < last else (0, 0)
        mask = np.asarray(token_mask)
        if mask.shape != (num_tokens,) or mask.dtype != np.bool_:
            raise ValueError(
                f"token_mask must be {num_tokens} booleans, not {mask.shape} of {mask.dtype}"
            )
        if not num_tokens or not mask[first := int(mask.argmax())]:
            return 0, 0
        run = mask[first:]
        length = int(run.argmin())
        last = num_tokens if run[length] else first + length
        start = -(-first // size)
        return start, max(start, last // size)


def _parts(namespace: Namespace) -> tuple[str, ...]:
    if namespace is None or isinstance(namespace, str):
        return () if namespace is None else (namespace,)
    if not isinstance(namespace, Sequence):
        raise ValueError(f"namespace must be a string or strings, not {namespace!r}")
    return tuple(namespace)


def _as_tokens(token_ids: Tokens) -> npt.NDArray[np.int64]:
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise _no_tokens(f"{tokens.ndim}-D of {tokens.dtype}")
    as_int64 = tokens.astype(np.int64, copy=False)
    if isinstance(token_ids, list | tuple) or as_int64 is not tokens:
        as_int64.flags.writeable = False  # it is not the caller's
    return as_int64


def _no_tokens(what: str) -> ValueError:
    return ValueError(f"token_ids must be a 1-D array of integers, not {what}")


def _check_keys(block_keys: Sequence[bytes]) -> None:
    """Raise `ValueError` unless these are keys, judged by the first and the last: to check each of
    8,192 takes longer than the whole match."""
    try:
        are_keys = not len(block_keys) or (_is_key(block_keys[0]) and _is_key(block_keys[-1]))
    except (TypeError, LookupError):  # no sequence
        are_keys = False
    if not are_keys:
        raise ValueError(
            "block_keys must be a sequence of keys; the first and the last must be bytes, 1 to "
            f"{MAX_KEY_BYTES} each"
        )


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and 0 < len(key) <= MAX_KEY_BYTES


def check_session_id(session_id: object) -> None:
    """Raise `ValueError` unless this can name a session."""
    check_name("session_id", session_id, MAX_SESSION_ID_LENGTH)


def random_version() -> str:
    """Return a version of weights that no one else has."""
    return uuid.uuid4().hex


def check_version(version: object) -> None:
    """Raise `ValueError` unless this can name the weights."""
    check_name("version", version, MAX_VERSION_LENGTH)


def _check_weights(weights: object, adapter: object) -> None:
    is_number = isinstance(weights, int) and not isinstance(weights, bool)
    if weights is not None and not (is_number and weights >= 0):  # type: ignore[operator]
        raise ValueError(f"weights = {weights!r}: must be a KVManager.weights_generation")
    if adapter != "":
        check_name("adapter", adapter, MAX_VERSION_LENGTH)


def check_name(what: str, name: object, longest: int) -> None:
    """Raise `ValueError` unless this is a name of 1 to ``longest`` characters."""
    if not isinstance(name, str) or not 0 < len(name) <= longest:
        raise ValueError(f"a {what} must be a string of 1 to {longest} characters")
    try:
        name.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: it fits no message
        raise ValueError(f"{what} = {name!r}: {error.reason}") from None


def check_hint(session_id: object, over: object, returns_in_s: object) -> None:
    """Raise `ValueError` unless this is a hint about a session: one of the two, not both."""
    check_session_id(session_id)
    if not isinstance(over, bool):
        raise ValueError(f"over = {over!r}: must be True or False")
    if over == (returns_in_s is not None):
        raise ValueError("say either over=True or returns_in_s, the seconds until it goes on")
    if over:
        return
    if isinstance(returns_in_s, bool) or not isinstance(returns_in_s, Real):
        raise ValueError(f"returns_in_s = {returns_in_s!r}: must be a number of seconds")
    if not 0 <= returns_in_s <= LONGEST_RETURN_S:  # type: ignore[operator]
        raise ValueError(f"returns_in_s = {returns_in_s}: must be 0 to {LONGEST_RETURN_S:,.0f} s")


def retention_s(priority: int, ttl_s: float) -> float:
    """Return how much later than now a put's blocks count as used.

    Raises:
        ValueError: ``priority`` or ``ttl_s`` is of another type or out of range.
    """
    if not isinstance(ttl_s, Real) or not 0 <= ttl_s <= sys.float_info.max:
        raise ValueError(f"ttl_s = {ttl_s!r}: must be a number of seconds, at least 0")
    if not isinstance(priority, Integral) or abs(priority) > MAX_PRIORITY:
        raise ValueError(
            f"priority = {priority!r}: must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return priority * PRIORITY_STEP_S + ttl_s


def _own_copy(token_ids: Tokens) -> Sequence[int] | npt.NDArray[np.int64]:
    """Copy tokens: observers read them later, when the caller may have changed its own. Sequences
    other than arrays and lists are views that an engine only appends to."""
    if isinstance(token_ids, np.ndarray):
        return np.array(token_ids, dtype=np.int64)
    return list(token_ids) if isinstance(token_ids, list) else token_ids
