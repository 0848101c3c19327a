"""Which tier an op reads or writes below DRAM, and which worker carries it out."""

from __future__ import annotations

from flexcache.cache.plan import LOAD_OP, STORE_OP
from flexcache.ids import OpKind, TierName
from flexcache.tasks.instructions import DISK, REMOTE

WORKERS = {TierName.SSD: DISK, TierName.REMOTE: REMOTE}
LOAD_TIER = {kind: tier for tier, kind in LOAD_OP.items()}
STORE_TIER = {kind: tier for tier, kind in STORE_OP.items()}
LOWER_TIER = {**LOAD_TIER, **STORE_TIER}
WORKER_OF = {kind: WORKERS[tier] for kind, tier in LOWER_TIER.items()}
GPU_OPS = (OpKind.H2D, OpKind.D2H)
