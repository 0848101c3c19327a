"""Scrapes of Prometheus metrics, and what becomes of samples over several of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Is:
    """The value that a sample must have in the end."""

    value: float


class Changes:
    """A sample must have had several values over the scrapes."""


CHANGES = Changes()
Expected = Mapping[str, float | Is | Changes]
"""Sample, without its prefix, to what becomes of it; a number: by how much it grows."""


def _moved(look: dict[str, float]) -> dict[str, float]:
    return {sample: value for sample, value in look.items() if value and "_bucket" not in sample}


class Scrapes:
    """The metrics at each scrape.

    Args:
        read: Returns them as text.
        prefix: What all names begin with.
    """

    def __init__(self, read: Callable[[], str], prefix: str) -> None:
        self._read = read
        self._prefix = prefix
        self.looks: list[dict[str, float]] = []

    def look(self) -> dict[str, float]:
        look = {}
        for family in text_string_to_metric_families(self._read()):
            for sample in family.samples:
                name = sample.name.removeprefix(self._prefix)
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                look[f"{name}{{{labels}}}" if labels else name] = sample.value
        self.looks.append(look)
        return look

    def look_until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        """Scrape until something shows; only that scrape is kept."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.look()):
            missed = self.looks.pop()
            assert time.monotonic() < deadline, f"it did not show: {_moved(missed)}"
            time.sleep(0.02)

    def check(self, expected: Expected) -> None:
        for sample, change in expected.items():
            values = [look.get(sample, 0.0) for look in self.looks]
            match change:
                case Changes():
                    assert len(set(values)) > 1, f"{sample} was {values[-1]} all the time"
                case Is(value):
                    assert values[-1] == value, sample
                case _:
                    assert values[-1] - values[0] == pytest.approx(change), sample
