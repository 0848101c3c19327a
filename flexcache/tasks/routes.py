"""Which tier an op reads or writes below DRAM, and which worker carries it out."""

from __future__ import annotations

from flexcache.cache.plan import LOAD_OP, STORE_OP
from flexcache.ids import OpKind, TierName
from flexcache.tasks.instructions import DISK, REMOTE

WORKERS = {TierName.SSD: DISK, TierName.REMOTE: REMOTE}
STAGED_LOAD_TIER = {kind: tier for tier, kind in LOAD_OP.items()}
"""Loads that end in DRAM."""
LOAD_TIER = {**STAGED_LOAD_TIER, OpKind.DISK2D: TierName.SSD}
RECORDING_TIER = {kind: tier for tier, kind in STORE_OP.items()} | {OpKind.COMMIT: TierName.SSD}
"""Ops at whose end a tier has the blocks."""
STORE_TIER = {**RECORDING_TIER, OpKind.D2DISK: TierName.SSD}
LOWER_TIER = {**LOAD_TIER, **STORE_TIER}
WORKER_OF = {kind: WORKERS[tier] for kind, tier in (STAGED_LOAD_TIER | RECORDING_TIER).items()}
GPU_LOADS = (OpKind.H2D, OpKind.DISK2D)
GPU_STORES = (OpKind.D2H, OpKind.D2DISK)
GPU_OPS = GPU_LOADS + GPU_STORES

ENDS = {
    OpKind.H2D: (TierName.CPU, TierName.GPU),
    OpKind.D2H: (TierName.GPU, TierName.CPU),
    OpKind.DISK2H: (TierName.SSD, TierName.CPU),
    OpKind.H2DISK: (TierName.CPU, TierName.SSD),
    OpKind.REMOTE2H: (TierName.REMOTE, TierName.CPU),
    OpKind.H2REMOTE: (TierName.CPU, TierName.REMOTE),
    OpKind.DISK2D: (TierName.SSD, TierName.GPU),
    OpKind.D2DISK: (TierName.GPU, TierName.SSD),
}
"""Where each op that moves bytes reads and writes."""
