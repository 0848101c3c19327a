"""The errors FlexCache raises, by whose fault they are.

Bad arguments at a call are the builtin ``ValueError`` and ``KeyError``; waiting too long is the
builtin ``TimeoutError``. What is left has a class here.
"""


class FlexCacheError(Exception):
    """Base of every error of FlexCache's own."""


class ConfigError(FlexCacheError, ValueError):
    """A setting is wrong. The message names the field, its value and what is allowed."""


class UnsupportedLayoutError(FlexCacheError, ValueError):
    """A KV tensor has a layout that cannot be moved as whole blocks. Names the layer and why."""


class RegistrationError(FlexCacheError):
    """The server refused a client. The message has both sides of what did not agree."""


class UntrustedError(ConfigError, RegistrationError):
    """Another user owns what was to be used, or could replace it. Names the owner and a remedy."""


class MissingDependencyError(FlexCacheError, ImportError):
    """An optional package is needed for what was asked. Names the package and the extra."""


class ClosedError(FlexCacheError):
    """The object was shut down before the call."""


class StorageError(FlexCacheError):
    """A device or file system refused what was asked of it."""


class DeviceLostError(FlexCacheError, RuntimeError):
    """A GPU or its driver no longer works, for this process at least."""


class TraceError(FlexCacheError, ValueError):
    """A file is not the trace that was asked for. Says what it is or where it goes wrong."""


class InternalError(FlexCacheError):
    """An invariant of FlexCache's own does not hold: a bug here, never the caller's fault."""


class ServerLostError(FlexCacheError):
    """The server died or does not answer. What was asked of it is a miss."""


class TaskRevokedError(FlexCacheError):
    """A copy must not go on: its task was answered, and its GPU slots may be in use again."""

    def __init__(self) -> None:
        super().__init__("revoked: its task was answered before the copy had ended")
