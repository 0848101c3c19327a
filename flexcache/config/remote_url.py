"""URLs of remote stores, and the registry of the kinds of stores that they name.

A store is one module, which describes itself by one call of `register`. Those of FlexCache are
named in `STORES` and imported once a URL has their scheme; any other is named by its module's
dotted path as the scheme (``acme.kv_store://HOST``). Parsing needs no optional package, no network.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from flexcache.config.values import reject as refuse
from flexcache.errors import ConfigError

OptionCheck = Callable[[str], str | None]
"""Returns what an option's value must be; None if it is that."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NO_CREDENTIALS = "must not hold credentials: they come from the environment"
# How URLs look. Modules by name: stores are in a higher layer, and a process needs one of them.
STORES = {
    "mooncake://HOST:PORT": "mooncake",
    "s3://BUCKET/PREFIX": "object_store",
    "gs://BUCKET/PREFIX": "object_store",
    "az://CONTAINER/PREFIX": "object_store",
    "file:///DIRECTORY": "directory",
    "memory://": "memory",
}
_BUILT_IN = {form.split(":")[0]: f"flexcache.storage.remote.{at}" for form, at in STORES.items()}


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A checked URL: ``location`` is host and port, bucket and prefix, or directory."""

    scheme: str
    location: str
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        """The URL without its options."""
        return f"{self.scheme}://{self.location}"


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits that a store is opened with.

    Attributes:
        call_bytes: The most bytes that one call reads or writes, for stores that move them through
            memory of their own.
        timeout_s: For a single request.
        concurrency: Concurrent requests per batch, for stores without batches of their own.
    """

    call_bytes: int = 0
    timeout_s: float = 10.0
    concurrency: int = 16


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """All that FlexCache knows of a kind of remote store.

    Attributes:
        open: Opens the store (`storage.remote.base.RemoteStore`) of a URL that was checked. It may
            raise `StoreUnavailableError` to be called again later.
        form: How its URLs look, for refusals.
        fits: Whether a URL has that form. May raise `ConfigError` with a better text.
        options: The options of its URLs, and what each may be.
        package: The package that it needs, if it needs one; ``extra`` of FlexCache installs it.
        problem: Returns, for the doctor, why the store at a URL cannot be used; None if it can. By
            default an object is looked up in a process of its own, since a client may hang.
        caution: What the doctor adds if it can be used.
    """

    open: Callable[[RemoteUrl, StoreLimits], Any]
    form: str
    fits: Callable[[SplitResult], bool] = lambda split: bool(split.hostname)
    options: Mapping[str, OptionCheck] = field(default_factory=dict)
    package: str | None = None
    extra: str | None = None
    problem: Callable[[RemoteUrl], str | None] | None = None
    caution: str = ""


_kinds: dict[str, StoreKind] = {}


def register(scheme: str, kind: StoreKind) -> None:
    """Make a kind of store known: by the name of the module that calls this, where it is not
    FlexCache's, since URLs name it by that (``register(__name__, ...)``)."""
    _kinds[scheme] = kind


def store_kind(scheme: str) -> StoreKind:
    """Return the kind of a URL's scheme, whose module is imported if need be.

    Raises:
        LookupError: There is none of this name; the text says what is.
    """
    module = _BUILT_IN.get(scheme, scheme if "." in scheme else None)
    if scheme not in _kinds and module is not None:
        try:
            importlib.import_module(module)
        except Exception as error:  # a stranger's module may raise any class
            raise LookupError(f"its scheme is a module that cannot be imported: {error}") from None
    if scheme not in _kinds:
        known = ", ".join(f"{name}://" for name in _BUILT_IN)
        what = f"must begin with one of {known}, or with the module of another store"
        raise LookupError(what if module is None else f"the module {module} registers no store")
    return _kinds[scheme]


def check_remote_url(url: str) -> RemoteUrl:
    """Parse and validate a URL.

    Raises:
        ConfigError: It is malformed; names the field, the value and what is allowed.
    """

    def reject(allowed: str) -> ConfigError:
        return refuse("remote_url", presentable(url), allowed)

    scheme, _, rest = url.partition(":")
    # The standard parser knows no scheme with an underscore, and folds the case of modules' names.
    scheme = scheme if "." in scheme else scheme.lower()
    try:
        split = urlsplit(f"store:{rest}")
        _ = split.port
    except ValueError:  # whose text may quote a password
        raise reject("is no URL, or its port is not a number up to 65535") from None
    try:
        kind = store_kind(scheme)
    except LookupError as error:
        raise reject(str(error)) from None
    if split.username is not None:
        raise reject(_NO_CREDENTIALS)
    if split.fragment:
        raise reject("must not have a fragment (#)")
    if not kind.fits(split):
        raise reject(f"must be {kind.form}")
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    for name, value in options.items():
        if (problem := _option_problem(scheme, kind, name, value)) is not None:
            raise reject(problem)
    location = split.netloc + (split.path.rstrip("/") if split.netloc else unquote(split.path))
    return RemoteUrl(scheme, location, options)


def _option_problem(scheme: str, kind: StoreKind, name: str, value: str) -> str | None:
    if name not in kind.options:
        near = difflib.get_close_matches(name, kind.options, 1)
        known = ", ".join(kind.options) or "-"
        hint = f"did you mean {near[0]}?" if near else f"known are: {known}"
        return f"option {name!r} is not known to {scheme}://; {hint}"
    problem = kind.options[name](value)
    return f"{name} = {presentable(value)!r}: {problem}" if problem else None


def presentable(url: str) -> str:
    """Strip what may be a secret: user info, query and fragment."""
    return re.split("[?#]", re.sub("//.*@", "//***@", url))[0]


# -- what options may be ------------------------------------------------------------------------


def text_option(value: str) -> str | None:
    return None if value else "must not be empty"


def choice_option(*allowed: str) -> OptionCheck:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def number_option(lowest: float, highest: float) -> OptionCheck:
    def check(value: str) -> str | None:
        try:
            ok = lowest <= float(value) <= highest
        except ValueError:
            ok = False
        return None if ok else f"must be a number from {lowest:g} to {highest:g}"

    return check


def endpoint_option(value: str) -> str | None:
    """Accept an address by https, and by http on loopback: requests carry signatures."""
    with contextlib.suppress(ValueError):
        split = urlsplit(value)
        if split.username is not None:
            return _NO_CREDENTIALS
        if split.scheme == "https" and split.hostname:
            return None
        if split.scheme == "http" and split.hostname in _LOOPBACK:
            return None
    return "must be https://HOST[:PORT]; plain http is for loopback only"
