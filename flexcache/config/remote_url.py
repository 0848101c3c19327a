"""URLs of remote stores: their schemes and options. Pure: needs no optional package, no network."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from flexcache.config.values import read_path
from flexcache.config.values import reject as refuse
from flexcache.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NO_CREDENTIALS = "must not hold credentials: they come from the environment"


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


def check_remote_url(url: str) -> RemoteUrl:
    """Parse and validate a URL.

    Raises:
        ConfigError: It is malformed; names the field, the value and what is allowed.
    """

    def reject(allowed: str) -> ConfigError:
        return refuse("remote_url", presentable(url), allowed)

    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:  # whose text may quote a password
        raise reject("is no URL, or its port is not a number up to 65535") from None
    if split.scheme not in _OPTIONS:
        raise reject(f"must begin with one of {', '.join(f'{name}://' for name in _OPTIONS)}")
    if split.username is not None:
        raise reject(_NO_CREDENTIALS)
    if split.fragment:
        raise reject("must not have a fragment (#)")
    if split.scheme == "mooncake" and not (split.hostname and port and split.path in ("", "/")):
        raise reject("must be mooncake://HOST:PORT, the address of the master")
    if split.scheme in ("s3", "gs", "az") and not split.hostname:
        raise reject(f"must be {split.scheme}://BUCKET/PREFIX")
    if split.scheme == "file":
        if split.netloc or not split.path.startswith("/"):
            raise reject("must be file:///DIRECTORY, an absolute path")
        read_path("remote_url", unquote(split.path))
    if split.scheme == "memory" and (split.netloc or split.path):
        raise reject("must be memory://")
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    for name, value in options.items():
        allowed = _OPTIONS[split.scheme]
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(allowed) or '-'}"
            raise reject(f"option {name!r} is not known to {split.scheme}://; {hint}")
        problem = allowed[name](value)
        if problem:
            raise reject(f"{name} = {presentable(value)!r}: {problem}")
    location = split.netloc + (split.path.rstrip("/") if split.netloc else unquote(split.path))
    return RemoteUrl(split.scheme, location, options)


def presentable(url: str) -> str:
    """Strip what may be a secret: user info, query and fragment."""
    return re.split("[?#]", re.sub("//.*@", "//***@", url))[0]


def _text(value: str) -> str | None:
    return None if value else "must not be empty"


def _one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"must be one of {', '.join(allowed)}"


def _number(lowest: float, highest: float) -> Callable[[str], str | None]:
    def check(value: str) -> str | None:
        try:
            ok = lowest <= float(value) <= highest
        except ValueError:
            ok = False
        return None if ok else f"must be a number from {lowest:g} to {highest:g}"

    return check


def _endpoint(value: str) -> str | None:
    with contextlib.suppress(ValueError):
        split = urlsplit(value)
        if split.username is not None:
            return _NO_CREDENTIALS
        if split.scheme == "https" and split.hostname:
            return None
        if split.scheme == "http" and split.hostname in _LOOPBACK:
            return None
    return "must be https://HOST[:PORT]; plain http is for loopback only"


_OPTIONS: dict[str, dict[str, Callable[[str], str | None]]] = {
    "mooncake": {
        "metadata": _text,
        "protocol": _one_of("tcp", "rdma"),
        "device": _text,
        "segment_gb": _number(0, 1e6),
        "hostname": _text,
        "replicas": _one_of(*"12345678"),
        "soft_pin_s": _number(0, 86400),
    },
    "s3": {"endpoint": _endpoint, "region": _text},
    "gs": {},
    "az": {"account": _text, "endpoint": _endpoint},
    "file": {"access": _one_of("user", "group")},
    "memory": {},
}
