"""Messages between a server and its clients; `docs/internals/protocol.md` draws the protocol.

Every frame is one tagged msgspec struct in MessagePack. A prompt's keys or token ids are in the
session's scratch memory or, without one, in a raw second frame after `Match`. Lists of blocks or
tasks are one binary array each. New fields go last, with defaults; a change that old code cannot
understand increments PROTOCOL_VERSION.

    rank (KVTPClient)                         scheduler, two sockets: events and calls
      HelloRank -> WelcomeRank | Refused        HelloEngine -> WelcomeEngine | Refused
      Register -> Registered | Refused          Match, Clear, SessionHint, ... -> a reply
      Execute, Drop -> Done                     Launch, Cancel -> TaskAnswer, once it is ready
      Ended, SessionOver <-                     Readiness, Weights, TaskAnswer <-
      WeightsChanged -> Weights
      Ping -> Pong,  Stop <-,  Goodbye ->       the same

A Hello may be repeated while the server is still considering it.

    peer: another host's server, and its peer worker
      FindBlocks -> FoundBlocks
      AskLoan -> Loan,  GiveBack ->
      TakeBlocks -> TookBlocks
"""

from __future__ import annotations

import os
import re
import uuid
from typing import Annotated, Any

import msgspec

from flexcache.cache.block_keys import unpack_keys
from flexcache.cache.control import CacheCall, CallName
from flexcache.cache.prompt import Prompt
from flexcache.config.model import EngineKeys, KVGroup, ModelConfig, read_dtype
from flexcache.errors import ConfigError
from flexcache.ids import (
    MAX_KEY_BYTES,
    NO_HAND_OVER,
    ROOT_BYTES,
    HandOver,
    PromptDetail,
    RequestInfo,
    RootId,
    TaskKind,
)
from flexcache.storage.host_pool import SegmentRef
from flexcache.storage.pool_directory import DirectFilesRef
from flexcache.tasks.instructions import Offer, TaskResult
from flexcache.transfer.messages import Done, Drop, Execute, Stop

MAX_NAME_LENGTH = 256
"""A server refuses greetings with a longer name of an engine."""
_ANONYMOUS = re.compile(r"dp\d+")


def engine_name(engine_id: str, dp_rank: int) -> str:
    """Name a data-parallel rank; ``engine_id`` distinguishes engines with the same ranks."""
    return f"{engine_id}/dp{dp_rank}" if engine_id else f"dp{dp_rank}"


def is_anonymous(name: str) -> bool:
    """Whether the name lacks an engine id, so that several engines may share it."""
    return _ANONYMOUS.fullmatch(name) is not None


def new_engine_id() -> str:
    """Make a unique engine id; it begins with our process id, for readability."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def pid_namespace() -> int:
    """Return the inode of the namespace in which this process's id counts; 0: not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


PROTOCOL_VERSION = 7
"""Server and clients must have the same; docs/internals/formats.md says what others receive."""
_MAX_RANKS = 1024
_MAX_MODEL_ID_LENGTH = 4096
MAX_FRAME_BYTES = 16 << 20
"""Two million token ids. A larger frame is refused."""

# What the server keeps of a peer's texts, or tells others, must not be as large as a frame.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Layout = Annotated[str, msgspec.Meta(max_length=64 << 10)]


class ModelSpec(msgspec.Struct, frozen=True):
    """Wire form of `ModelConfig`, with the block size of the cache."""

    model_id: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    use_mla: bool
    tp_size: int
    tokens_per_block: int
    pp_size: int = 1
    cp_size: int = 1
    kv_replicas: int | None = None
    sized_by_ranks: bool = False
    groups: tuple[KVGroup, ...] = ()
    engine_keys: EngineKeys | None = None
    store_shards: int | None = None

    @classmethod
    def of(cls, model: ModelConfig, tokens_per_block: int) -> ModelSpec:
        return cls(
            model.model_id, model.num_layers, model.num_kv_heads, model.head_size,
            str(model.dtype).removeprefix("torch."), model.use_mla, model.tp_size, tokens_per_block,
            model.pp_size, model.cp_size, model.kv_replicas, model.sized_by_ranks,
            model.groups, model.engine_keys, model.store_shards,
        )  # fmt: skip

    def model(self) -> ModelConfig:
        """Return the model; raises `ConfigError` if the fields do not describe one."""
        dtype = read_dtype(self.dtype)
        num_parts = self.pp_size * self.cp_size * max(self.tp_size, self.store_shards or 1)
        if num_parts > _MAX_RANKS or len(self.model_id) > _MAX_MODEL_ID_LENGTH:
            raise ConfigError(f"{num_parts} ranks are more than {_MAX_RANKS}, or the model_id "
                              f"is longer than {_MAX_MODEL_ID_LENGTH}")  # fmt: skip
        if self.tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block = {self.tokens_per_block}: must be at least 1")
        return ModelConfig(
            self.model_id, self.num_layers, self.num_kv_heads, self.head_size, dtype,
            self.use_mla, self.tp_size, 1, self.pp_size, self.cp_size, self.kv_replicas,
            self.sized_by_ranks, self.groups, self.engine_keys, self.store_shards,
        )  # fmt: skip


# -- ranks ---------------------------------------------------------------------------------------


UNKNOWN_WEIGHTS = -1
"""Number of the weights of a rank that can no longer tell what they are. It takes no op."""


class HelloRank(msgspec.Struct, tag=True, frozen=True):
    """A rank of an engine asks for its share of the host pool."""

    engine: str
    rank: int
    client: str
    """The same in every connection of one client, so that it can reclaim its own place."""
    pid: int
    version: int = PROTOCOL_VERSION
    layout: Layout = ""
    """How the rank lays out KV, once known. A conflict is then refused before it maps the pool."""
    block_bytes: int = 0
    """Bytes of one of its blocks. Counts where the model leaves sizes to the ranks."""
    kv_replicas: int = 0
    """How many neighbouring ranks hold the same KV, if the rank knows."""
    pid_namespace: int = 0
    """Inode of the namespace in which ``pid`` counts; 0: not known."""


class WelcomeRank(msgspec.Struct, tag=True, frozen=True):
    """The rank's share of the host pool, and the required size of one of its blocks: the size of
    ``blocks_per_unit`` blocks of the GPU. With ``may_skip``, -1 stands for one not to be copied.
    ``num_groups``: groups of layers whose blocks ops may name (`transfer.messages`).
    ``num_shards``: parts in which the rank stores its heads (`CacheConfig.store_shards`).

    ``epoch`` is that of the task ids that this server gives out; ``fence``: see `protocol.fence`.
    ``direct``: the files that the rank may move blocks to and from past the host pool.
    """

    epoch: int
    server_pid: int
    segment: SegmentRef
    fence: str
    block_bytes: int
    fingerprint: str
    blocks_per_unit: int = 1
    may_skip: bool = False
    num_groups: int = 1
    direct: DirectFilesRef | None = None
    num_shards: int = 1


class Register(msgspec.Struct, tag=True, frozen=True):
    """The rank is ready to move blocks, unless ``problem`` says why it is not; ``is_direct``: past
    the host pool too."""

    layout: Layout
    num_blocks: int
    problem: str | None = None
    is_direct: bool = False
    weights: int = 0
    version: Name = ""
    """As in `WeightsChanged`."""


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The rank is registered and will receive ops."""


class WeightsChanged(msgspec.Struct, tag=True, frozen=True):
    """The rank's weights were updated for the ``number``-th time since its client began, or are
    `UNKNOWN_WEIGHTS`. ``version`` names them, if the rank knows that. Answered with `Weights`."""

    number: int
    version: Name = ""


class Weights(msgspec.Struct, tag=True, frozen=True):
    """What an engine's weights are called now, in its ``generation``.

    ``ranks``: those whose weights are not what they started with: the client that told, and its
    number. A scheduler repeats it to the next server, which tells news by that.
    """

    generation: int = 0
    version: str = ""
    ranks: dict[int, tuple[str, int]] = {}


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The GPU side of a gated task has ended on every rank; its first ``num_ok`` blocks arrived."""

    task_id: int
    num_ok: int


class SessionOver(msgspec.Struct, tag=True, frozen=True):
    """The engine's scheduler lost its session: the parts of its gated tasks that `Ended` did not
    report never began, and will not."""

    session: int


# -- schedulers ----------------------------------------------------------------------------------


class HelloEngine(msgspec.Struct, tag=True, frozen=True):
    """An engine's scheduler asks for a session. ``calls`` is the identity of its second socket,
    ``scratch_fd`` its descriptor of the scratch memory it offers."""

    engine: str
    client: str
    pid: int
    model: ModelSpec
    calls: bytes
    scratch_fd: int = -1
    version: int = PROTOCOL_VERSION
    weights: Weights = Weights()
    heard: int = 0
    """The last generation that a server gave it: later ones it has given itself meanwhile."""
    pid_namespace: int = 0


class WelcomeEngine(msgspec.Struct, tag=True, frozen=True):
    """The session is open; the client assigns its task ids itself (`TaskIds`)."""

    session: int
    server_pid: int
    fence: str
    missing: list[str]
    uses_scratch: bool
    prompt_detail: PromptDetail = msgspec.field(default=PromptDetail.NOTHING, name="wanted")
    """How much detail about prompts the server passes on."""
    weights: Weights = Weights()
    """What the engine has to name its prompts by from now on."""


class Readiness(msgspec.Struct, tag=True, frozen=True):
    """Ranks whose registration the engine still waits for, and why others were refused."""

    missing: list[str]
    problems: list[str]


class Match(msgspec.Struct, tag=True, frozen=True):
    """Make a task for blocks ``[start, stop)``.

    The prompt is in the first ``scratch_bytes`` of the scratch memory or, if that is 0, in the next
    frame: block keys of ``key_bytes`` each or, if that is 0, token ids (int64). Answered with
    `Matched`: at once, unless the remote store must be asked (``look_up``) and the client
    ``may_wait``.

    If `WelcomeEngine.prompt_detail` asks for them, the prompt's token ids (int64, ``token_bytes``)
    follow the keys, and ``info`` describes the request.

    ``retain_s``: stored blocks of a put count as used this many seconds later.
    ``prefill_blocks_per_s``: how fast the engine computes, if known.
    ``tail_at``: a put also stores the tail behind this many blocks, unless it is 0.
    ``parent_key``: the keys continue the chain that ends with this one.
    ``session_id``: whose prompt it is.
    ``awaits_loads``: a get that may not wait is to ask again while its blocks are loaded early.
    ``weights``: the generation of the engine's weights that ``root`` is named by.
    ``adapter``: as in `Execute`.
    ``hand_over``: what a get that awaits loads may wait for besides.
    """

    request_id: int
    # By the client: a match whose answer is lost could not be cancelled else, and a rank could not
    # tell a task of a dead server from a late one. It contains server, session and count.
    task_id: int
    kind: TaskKind
    root: bytes
    start: int
    stop: int
    num_tokens: int
    # All keys are sent, though a bisection reads a handful: asking for them would cost round trips
    # of 60 to 120 us each, while joining and writing 8,192 of them takes about 70.
    key_bytes: int
    scratch_bytes: int = 0
    retain_s: float = 0.0
    prefill_blocks_per_s: float = 0.0
    look_up: bool = True
    may_wait: bool = True
    token_bytes: int = 0
    info: RequestInfo | None = None
    tail_at: int = 0
    parent_key: bytes | None = None
    session_id: str | None = None
    awaits_loads: bool = False
    weights: int = 0
    adapter: str = ""
    hand_over: HandOver = NO_HAND_OVER


class Matched(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Match`. Without an ``offer`` no task was made, because the remote store has yet to
    answer: ask again."""

    request_id: int
    offer: Offer | None = None


class Promise(msgspec.Struct, tag=True, frozen=True):
    """Start a matched get from DRAM that the scheduler has its ranks carry out: they are sent
    nothing, and its blocks stay until they report. Answered with `Answer`: a `PromisedLoad`, or
    None if the task is to be launched."""

    request_id: int
    task_id: int


class Launch(msgspec.Struct, tag=True, frozen=True):
    """Start a matched task. A problem with it is answered as the task's failure.

    ``gpu_blocks``: for each block, then for each unit of the tail, `WelcomeRank.blocks_per_unit`
    blocks, each with its group (`transfer.messages`); -1 where there is nothing to copy.
    """

    task_id: int
    gpu_blocks: bytes
    gated: bool


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Cancel those parts of the tasks (an array of uint64) that have not started."""

    task_ids: bytes


class TaskAnswer(msgspec.Struct, tag=True, frozen=True):
    """How a task ended: its GPU side, then the task as a whole if work continued after that."""

    task_id: int
    result: TaskResult


class Clear(msgspec.Struct, tag=True, frozen=True):
    """Drop blocks that are not held, from one tier or all. Answered with `Answer` (a number).

    With all of them, `Weights` with another version is on its way to the engine before that.
    """

    request_id: int
    tier: Name | None


class SessionHint(msgspec.Struct, tag=True, frozen=True):
    """What a user says of its session. Answered with `Answer`: whether the session is known."""

    request_id: int
    session_id: str
    over: bool
    returns_in_s: float | None = None


class Control(msgspec.Struct, tag=True, frozen=True):
    """A user's call about what is cached (`CacheCall`). Answered with `Answer`.

    ``data`` has the prompt's keys, of ``key_bytes`` each or, if that is 0, its token ids (int64).
    ``weights``: as in `Match`. ``roots`` are of one engine: by tokens, and by its keys.
    """

    request_id: int
    name: CallName
    root: bytes = b""
    num_tokens: int = 0
    key_bytes: int = 0
    data: bytes = b""
    weights: int = 0
    session_id: str | None = None
    ttl_s: float = 0.0
    pin_id: Name = ""
    tenant: str | None = None
    roots: list[bytes] = []

    @classmethod
    def of(cls, call: CacheCall) -> Control:
        """Return the message for a call.

        Raises:
            ValueError: Its prompt does not fit into a message.
        """
        others: dict[str, Any] = {
            name: getattr(call, name)
            for name in ("session_id", "ttl_s", "pin_id", "tenant", "roots")
        }
        if not call.prompts:
            return cls(0, call.name, **others)
        [prompt] = call.prompts  # an engine has one name for its weights
        key_bytes, data = prompt.keys.packed(prompt.stop)
        if len(data) > MAX_FRAME_BYTES - 4096:
            raise ValueError(f"a prompt of {prompt.num_tokens:,} tokens is too long to be sent")
        root = prompt.keys.prompt_root
        return cls(
            0, call.name, root, prompt.num_tokens, key_bytes, bytes(data), prompt.weights, **others
        )

    def call(self, tokens_per_block: int) -> CacheCall:
        """Return the call; raises `ValueError` if the fields do not describe one."""
        if len(self.roots) > 2 or any(len(root) != ROOT_BYTES for root in self.roots):
            raise ValueError(f"roots: {len(self.roots)}, or not of {ROOT_BYTES} bytes each")
        prompts = []
        if self.root:
            if len(self.root) != ROOT_BYTES or self.key_bytes > MAX_KEY_BYTES or self.weights < 0:
                raise ValueError("a prompt with a malformed root, keys or weights")
            data = memoryview(self.data)
            keys = unpack_keys(self.root, data, self.key_bytes, tokens_per_block)
            stop = keys.num_blocks
            prompts.append(
                Prompt(TaskKind.GET, keys, 0, stop, self.num_tokens, weights=self.weights)
            )
        call = CacheCall(
            name=self.name, prompts=prompts, session_id=self.session_id, ttl_s=self.ttl_s,
            pin_id=self.pin_id, tenant=self.tenant, roots=[RootId(root) for root in self.roots],
        )  # fmt: skip
        call.check()
        return call


class NewWeights(msgspec.Struct, tag=True, frozen=True):
    """Rename the engine's weights. Answered with `Answer` (its `Weights`)."""

    request_id: int
    version: str


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Get statistics. Answered with `Answer`, even for peers without a session."""

    request_id: int


class CheckInvariants(msgspec.Struct, tag=True, frozen=True):
    """Check the cache's invariants. Answered with an empty `Answer`, or `Failed`."""

    request_id: int


class Answer(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    value: Any


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The request could not be carried out. ``kind``: value, key, session or internal."""

    request_id: int
    kind: str
    reason: str


# -- both ----------------------------------------------------------------------------------------


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The server will not work with this client, or, if it is not ``final``, not yet."""

    reason: str
    final: bool = True


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """A frame could not be understood or was out of place; nothing was done."""

    reason: str


class Ping(msgspec.Struct, tag=True, frozen=True):
    """The client is alive. Answered with `Pong`."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The server is alive."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The client is closing; none of its transfers are still running."""


class Greeting(msgspec.Struct, frozen=True):
    """Fields common to every version's `HelloRank` and `HelloEngine`, to read the version."""

    type: str
    version: int


# -- between servers ------------------------------------------------------------------------------


class FindBlocks(msgspec.Struct, tag=True, frozen=True):
    """Ask how many consecutive blocks of a prompt are in DRAM, from the first on, and which tail.

    ``keys`` are those of the blocks, of ``key_bytes`` each; without any only a sign of life is
    asked for. ``tails``: the last positions first, of each how many of the blocks must be there for
    it to be of use, the key of the block behind which it is, and its number of units.

    With ``stage``: bring to DRAM what is on SSD alone up to the last of the keys, and the tail.
    """

    request_id: int
    root: bytes = b""
    keys: bytes = b""
    key_bytes: int = 0
    tails: list[tuple[int, bytes, int]] = []
    stage: bool = False


class FoundBlocks(msgspec.Struct, tag=True, frozen=True):
    """So many of them can be read, and the tail of this number; -1 for none. So many more are on
    their way to DRAM: ask again. So many behind these are on SSD, and so is another tail: ask to
    stage them. ``cache`` identifies who answers, so that a cache knows itself among its peers."""

    request_id: int
    cache: bytes
    num_blocks: int = 0
    tail: int = -1
    num_coming: int = 0
    num_on_ssd: int = 0
    ssd_tail: int = -1
    kept: bytes = b""
    """Digests of the model and the layout whose KV it keeps; empty while it has no engine."""


class AskLoan(msgspec.Struct, tag=True, frozen=True):
    """Ask to keep consecutive blocks in place while they are read.

    ``tail``: they are units of the tail behind this block, ``first`` the position of the first of
    them from `TAIL_FIRST` on.
    """

    request_id: int
    root: bytes
    keys: bytes
    key_bytes: int
    tail: bytes = b""
    first: int = 0


class Loan(msgspec.Struct, tag=True, frozen=True):
    """They are kept for so many ``seconds`` from before this was sent, and can be read with the
    token at this TCP port of the same host. Without a token they are not there."""

    request_id: int
    token: bytes = b""
    port: int = 0
    seconds: float = 0.0


class GiveBack(msgspec.Struct, tag=True, frozen=True):
    """What the token is for has been read. Not answered."""

    token: bytes


class TakeBlocks(msgspec.Struct, tag=True, frozen=True):
    """Read blocks of a prompt from ``cache``, which goes; as of a `Portion`. Answered once what the
    peer wants of them is there.

    ``kept``: as in `FoundBlocks`.
    """

    request_id: int
    cache: bytes
    kept: bytes
    root: bytes
    keys: bytes
    key_bytes: int
    age_s: float
    num_units: int = 0


class TookBlocks(msgspec.Struct, tag=True, frozen=True):
    """So many of the prompt's blocks are in DRAM now, and its tail if that was wanted. So many were
    read for this. ``refusal`` says why no such request is taken at all."""

    request_id: int
    num_blocks: int = 0
    has_tail: bool = False
    num_read: int = 0
    refusal: str = ""


FromPeer = FindBlocks | AskLoan | GiveBack | TakeBlocks
SessionRequest = Match | Promise | Clear | Control | SessionHint | NewWeights | CheckInvariants
"""Requests that need a session."""
Request = SessionRequest | GetStats
Reply = Matched | Answer | Failed
ToServer = (
    HelloRank
    | HelloEngine
    | Register
    | WeightsChanged
    | Done
    | Launch
    | Cancel
    | Ping
    | Goodbye
    | Request
)
ToRank = (
    WelcomeRank
    | Registered
    | Refused
    | Rejected
    | Execute
    | Drop
    | Ended
    | SessionOver
    | Weights
    | Pong
    | Stop
)
ToScheduler = WelcomeEngine | Refused | Rejected | Readiness | Weights | TaskAnswer | Pong | Stop
ToClient = ToRank | ToScheduler | Reply
