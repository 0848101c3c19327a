"""Errors that FlexCache raises, by whose fault they are.

Bad arguments of a call raise the builtin ``ValueError`` and ``KeyError``; waiting too long raises
the builtin ``TimeoutError``. All other errors have a class here.
"""


class FlexCacheError(Exception):
    """Base of all of FlexCache's own errors."""


class ConfigError(FlexCacheError, ValueError):
    """A setting is wrong. The message names the field, its value, what is allowed, and where the
    value came from, if it was read from a file, the environment or a table of settings.

    Attributes:
        setting: The field; empty if the message is about none.
    """

    setting = ""


class UnsupportedLayoutError(FlexCacheError, ValueError):
    """A KV tensor's layout cannot be moved as whole blocks. Names the layer and the reason."""


class RegistrationError(FlexCacheError):
    """The server refused a client. The message has both values of whatever did not match."""


class UntrustedError(ConfigError, RegistrationError):
    """Another user owns, or could replace, a resource. Names the owner and a remedy."""


class MissingDependencyError(FlexCacheError, ImportError):
    """The requested function needs an optional package. Names the package and the extra."""


class AmbiguousEngineError(FlexCacheError):
    """Several engines are attached, and a call does not say which of them it is for."""


class ClosedError(FlexCacheError):
    """The object was shut down before the call, or not started yet."""


class StorageError(FlexCacheError):
    """A device or file system failed an operation."""


class DeviceLostError(FlexCacheError, RuntimeError):
    """A GPU or its driver no longer works, for this process at least."""


class NoDirectPathError(FlexCacheError):
    """A rank cannot move blocks between its KV tensors and the SSD past DRAM. Says why."""


class LoadLostError(FlexCacheError, RuntimeError):
    """KV that an engine already counts as computed was not loaded, and cannot be."""


class TraceError(FlexCacheError, ValueError):
    """A file is not the requested trace. Says what it is, or where it is malformed."""


class InternalError(FlexCacheError):
    """An internal invariant does not hold: a bug in FlexCache, never the caller's fault."""


class ServerLostError(FlexCacheError):
    """The server died or does not answer. Requests to it count as misses."""


class TaskRevokedError(FlexCacheError):
    """A copy must not continue: its task was answered, and its GPU slots may be in use again."""

    def __init__(self) -> None:
        super().__init__("revoked: its task was answered before the copy had ended")
