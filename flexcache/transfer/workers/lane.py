"""Lanes: what keeps the order in which copies begin on a rank's device.

Stores, loads, and loads by layer do not come behind each other, in a queue or on the device.
"""

from __future__ import annotations

from enum import Enum

from flexcache.ids import OpKind

EAGER_LOADS = 3
"""Loads that start one after the other before a store has its turn."""


class Lane(str, Enum):
    """Ops that begin and are reported in their order, and do not wait for those of other lanes."""

    LAYERS = "loads by layer"
    LOADS = "loads"
    STORES = "stores"

    @classmethod
    def of(cls, kind: OpKind, urgent: bool) -> Lane:
        if kind is OpKind.D2H:
            return cls.STORES
        return cls.LAYERS if urgent else cls.LOADS
