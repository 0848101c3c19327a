"""Counters: records that count, and the metrics that the annotations of their fields declare.

    class SessionStats(Counters):
        over: Annotated[int, counter("session_hints", "Hints about sessions.", hint="over")] = 0

    class CacheStats(Counters):
        sessions: SessionStats
        tiers: Annotated[dict[str, TierStats], By("tier")]

The object that counts is the statistics: hot paths add to its attributes, `Counters.snapshot`
copies a tree of such records, and `families` and `samples` walk it for Prometheus and for the
documentation. Names of metrics begin with ``flexcache_``, units are bytes, seconds, tokens and
blocks, and names of counters end in ``_total``. Labels have few values, known in advance, except
for names of engines, workers and peers: nothing from a request becomes a label.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

import msgspec

Self = TypeVar("Self", bound="Counters")
Sample = tuple[tuple[str, ...], "float | Histogram"]
"""Values of the labels, and the value."""

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
           2.5, 5.0, 10.0, 30.0)  # fmt: skip


class Counters(msgspec.Struct, kw_only=True):
    """A record of figures, some of which are metrics.

    Fields whose names begin with ``_`` belong to the counting and are not told. What a process may
    lack is None, and not told either. Gauges that other state has are filled in by `snapshot`.
    """

    TITLE: ClassVar[str] = ""
    """Section of the documentation; empty: that of the record around it."""

    def snapshot(self: Self, **now: Any) -> Self:
        """Copy the tree.

        Args:
            now: Values of fields that are not counted but looked up.
        """
        values = {name: _copied(getattr(self, name)) for name in self.__struct_fields__}
        return type(self)(**{**values, **now})


class Histogram(Counters, kw_only=False):
    """Observations by the first bound that they do not exceed, as Prometheus has them.

    ``counts`` has one more entry than ``bounds``, for what is above the last; each counts only what
    lies between two bounds.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = []
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class MetricType(str, Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that a field is served as; `counter`, `gauge` and `histogram` make them.

    Numbers are served as they are, flags as 0 and 1. Of an enumeration each member is a sample, 1
    for the current one; a text is a sample of 1. Of a table each entry is a sample, or, without
    ``by``, their number is the value.

    Attributes:
        by: Labels whose values are the keys of the table, and of the tables in it; or the label
            whose value is the text, or the member of the enumeration.
        known: Values of the last of these labels that are served as 0 until they occur: a counter
            that begins with its first event hides that event from `rate` and `increase`.
        is_joined: Keys have the values of all labels, with ``_`` between; so have ``known``.
        labels: Labels whose value is fixed, where several fields are one metric.
    """

    name: str
    type: MetricType
    help: str
    by: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    is_joined: bool = False
    labels: Mapping[str, str] | None = None


def counter(
    name: str, help: str, *by: str, known: Sequence[str] = (), is_joined: bool = False,
    **labels: str,
) -> Metric:  # fmt: skip
    return Metric(
        f"flexcache_{name}_total", MetricType.COUNTER, help, by, tuple(known), is_joined, labels
    )


def gauge(name: str, help: str, *by: str, known: Sequence[str] = (), **labels: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.GAUGE, help, by, tuple(known), labels=labels)


def histogram(name: str, help: str, *by: str) -> Metric:
    return Metric(f"flexcache_{name}", MetricType.HISTOGRAM, help, by)


class By:
    """Marks a table of records: its keys are values of a label of all metrics in them."""

    def __init__(self, *labels: str) -> None:
        self.labels = labels


UNSERVED = object()
"""Marks a record whose metrics are not served from this place."""


class Family(NamedTuple):
    """A metric with all its labels, as Prometheus sees it."""

    section: str
    name: str
    type: MetricType
    labels: tuple[str, ...]
    help: str


def families(kind: type[Counters]) -> list[Family]:
    """Return the metrics of a tree of records, in the order of its fields.

    Raises:
        TypeError: Fields of one metric differ in type or labels.
    """
    found: dict[str, Family] = {}
    for each in _families(kind, "", ()):
        first = found.setdefault(each.name, each)
        if (first.type, first.labels) != (each.type, each.labels):
            raise TypeError(f"{each.name} is declared in two ways: {first}, {each}")
    return list(found.values())


def samples(tree: Counters) -> dict[str, list[Sample]]:
    """Return the samples of every metric that has any, by its name."""
    found: dict[str, list[Sample]] = {}
    _collect(tree, (), found)
    return found


def plain(tree: Any) -> Any:
    """Return a tree as dictionaries and lists of numbers and texts, without what is None."""
    match tree:
        case Counters():
            told = (name for name in tree.__struct_fields__ if not name.startswith("_"))
            values = {name: getattr(tree, name) for name in told}
            return {name: plain(value) for name, value in values.items() if value is not None}
        case dict():
            return {plain(key): plain(value) for key, value in tree.items()}
        case list() | tuple():
            return [plain(item) for item in tree]
        case Enum():
            return tree.value
    return tree


def from_plain(kind: type[Self], content: Any) -> Self:
    """Invert `plain`.

    Raises:
        ValueError: A figure is missing or different: it comes from another version.
    """
    _require_all(kind, content)
    return msgspec.convert(content, kind)


# -- the walk --------------------------------------------------------------------------------------


class _Field(NamedTuple):
    name: str
    metrics: tuple[Metric, ...]
    record: type[Counters] | None
    depth: int
    """How deep such records are in tables; 0 for a single one."""
    by: tuple[str, ...]
    is_served: bool
    is_required: bool


@cache
def _fields(kind: type[Counters]) -> tuple[_Field, ...]:
    hints = hints_of(kind, include_extras=True)
    return tuple(_field(spec, hints[spec.name]) for spec in msgspec.structs.fields(kind))


def _field(spec: msgspec.structs.FieldInfo, hint: Any) -> _Field:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    inner, depth = _without_tables(get_args(hint)[0] if marks else hint)
    by = next((mark.labels for mark in marks if isinstance(mark, By)), ())
    is_record = isinstance(inner, type) and issubclass(inner, Counters) and inner is not Histogram
    return _Field(
        spec.name,
        tuple(mark for mark in marks if isinstance(mark, Metric)),
        inner if is_record else None,
        depth,
        by,
        UNSERVED not in marks and len(by) == depth,
        spec.default is not None and not spec.name.startswith("_"),
    )


def _without_tables(hint: Any) -> tuple[Any, int]:
    """Return the type of the entries of tables in tables, and how many tables there are."""
    depth = 0
    if get_origin(hint) in (Union, UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    while get_origin(hint) is dict:
        hint, depth = get_args(hint)[1], depth + 1
    return hint, depth


def _families(kind: type[Counters], section: str, outer: tuple[str, ...]) -> Iterator[Family]:
    section = kind.TITLE or section
    for field in _fields(kind):
        for metric in field.metrics:
            labels = (*outer, *metric.by, *(metric.labels or ()))
            yield Family(section, metric.name, metric.type, labels, metric.help)
        if field.record is not None and field.is_served:
            yield from _families(field.record, section, (*outer, *field.by))


def _collect(tree: Counters, outer: tuple[str, ...], found: dict[str, list[Sample]]) -> None:
    for field in _fields(type(tree)):
        value = getattr(tree, field.name)
        if value is None:
            continue
        for metric in field.metrics:
            fixed = tuple((metric.labels or {}).values())
            rows = found.setdefault(metric.name, [])
            rows += [((*outer, *own, *fixed), each) for own, each in _samples(metric, value)]
        if field.record is not None and field.is_served:
            _collect_records(value, outer, field.depth, found)


def _collect_records(
    value: Any, outer: tuple[str, ...], depth: int, found: dict[str, list[Sample]]
) -> None:
    if not depth:
        _collect(value, outer, found)
        return
    for key, entry in value.items():
        _collect_records(entry, (*outer, str(plain(key))), depth - 1, found)


def _samples(metric: Metric, value: Any) -> Iterator[Sample]:
    if isinstance(value, Enum):
        for each in type(value):
            yield (str(each.value),), int(each is value)
    elif isinstance(value, str):
        yield (value,), 1
    elif not isinstance(value, Mapping):
        yield (), value
    elif not metric.by:
        yield (), len(value)
    else:
        yield from _rows(metric, value, len(metric.by))


def _rows(metric: Metric, table: Mapping[Any, Any], depth: int) -> Iterator[Sample]:
    """Yield the entries of a table, and of those in it, with the values of ``depth`` labels."""
    rows = {str(plain(key)): entry for key, entry in table.items()}
    if depth == 1 or metric.is_joined:
        rows = {**dict.fromkeys(metric.known, 0), **rows}
    for key, entry in rows.items():
        if depth > 1 and not metric.is_joined:
            for labels, value in _rows(metric, entry, depth - 1):
                yield (key, *labels), value
        elif entry is not None:
            yield tuple(key.split("_", depth - 1)), entry


def _copied(value: Any) -> Any:
    match value:
        case Counters():
            return value.snapshot()
        case dict():
            return {key: _copied(entry) for key, entry in value.items()}
        case list():
            return list(value)
    return value


def _require_all(kind: type[Counters], content: Any) -> None:
    """Raise `ValueError` for a figure that is missing: a default would make a 0 of it."""
    for field in _fields(kind):
        if isinstance(content, Mapping) and field.name in content and field.record is not None:
            parts = [content[field.name]]
            for _ in range(field.depth):
                parts = [entry for part in parts for entry in part.values()]
            for part in parts:
                _require_all(field.record, part)
        elif field.is_required and (not isinstance(content, Mapping) or field.name not in content):
            raise ValueError(f"{kind.__name__} without `{field.name}`")
