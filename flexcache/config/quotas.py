"""Quotas as settings: which part of DRAM and SSD each tenant is sure of.

    team-a=50%,team-b=20GB/200GB,*=10%

Amounts are shares of a tier or bytes; with a slash, DRAM's and SSD's. ``*`` stands for all tenants
that are not named, together; if it is missing, they have what the others leave.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flexcache.config.values import reject
from flexcache.errors import ConfigError

OTHERS = "*"
MAX_TENANTS = 256
_BYTES = {
    "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]*)")
_SLACK = 1e-9  # of a tier: shares like three times 0.1 and 0.7 add up to a little more than 1


@dataclass(frozen=True, slots=True)
class Amount:
    """A share of a tier, or a number of bytes."""

    value: float
    is_share: bool

    def share_of(self, tier_bytes: float) -> float:
        return self.value if self.is_share else self.value / tier_bytes

    def num_blocks(self, num_blocks: int, block_bytes: int) -> int:
        """Return how many whole blocks it is, of a tier that has ``num_blocks``."""
        blocks = self.value * num_blocks if self.is_share else self.value / block_bytes
        return int(blocks + _SLACK)


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant is sure of in DRAM and on SSD."""

    tenant: str
    dram: Amount
    ssd: Amount


def parse_quotas(text: str | None) -> tuple[Quota, ...]:
    """Parse the setting ``quotas``.

    Raises:
        ConfigError: It cannot be understood, names a tenant twice, or gives away more than all.
    """
    if text is None:
        return ()
    quotas = tuple(_parse_quota(text, entry.strip()) for entry in text.split(","))
    tenants = [quota.tenant for quota in quotas]
    if twice := [tenant for tenant in tenants if tenants.count(tenant) > 1]:
        raise reject("quotas", text, f"names {twice[0]} twice")
    if len(quotas) > MAX_TENANTS:
        raise reject("quotas", text, f"must name at most {MAX_TENANTS} tenants")
    _check_shares(text, "dram", [quota.dram for quota in quotas])
    _check_shares(text, "ssd", [quota.ssd for quota in quotas])
    return quotas


def _check_shares(text: str, tier: str, amounts: Sequence[Amount]) -> None:
    total = sum(amount.value for amount in amounts if amount.is_share)
    if total > 1 + _SLACK:
        hint = f"the shares of the {tier} tier add up to {total:.4g}: must be at most 1"
        raise reject("quotas", text, hint)


def blocks_of(
    text: str | None, tier: Literal["dram", "ssd"], num_blocks: int, block_bytes: int
) -> dict[str, int]:
    """Convert the quotas of one tier to blocks, by tenant, `OTHERS` first.

    Empty without quotas, or without the tier.

    Args:
        num_blocks: Capacity of the tier.
        block_bytes: Size of a block in it.

    Raises:
        ConfigError: They come to more than the tier has, or bytes to less than a block.
    """
    quotas = parse_quotas(text)
    if not quotas or not num_blocks:
        return {}
    amounts: dict[str, Amount] = {quota.tenant: getattr(quota, tier) for quota in quotas}
    blocks = {name: each.num_blocks(num_blocks, block_bytes) for name, each in amounts.items()}
    for tenant, amount in amounts.items():
        if amount.value and not amount.is_share and not blocks[tenant]:
            what = f"less than a block of the {tier} tier to {tenant}"
            raise reject("quotas", text, f"promises {what}: one has {block_bytes:,} bytes")
    # In whole blocks: a tier set to 2 GB has a little less, and twice 1 GB of it must fit.
    total = sum(blocks.values())
    if total > num_blocks:
        raise _too_much(text, total / num_blocks, tier, float(num_blocks) * block_bytes)
    return {OTHERS: blocks.pop(OTHERS, num_blocks - total), **blocks}


def check_quotas(text: str | None, dram_gb: float | None, ssd_gb: float | None) -> None:
    """Raise `ConfigError` unless quotas can be parsed and fit tiers of these sizes, if known."""
    quotas = parse_quotas(text)
    if dram_gb is not None:
        _check_fit(text, [quota.dram for quota in quotas], "dram", dram_gb * 1e9)
    if ssd_gb is not None:
        _check_fit(text, [quota.ssd for quota in quotas], "ssd", ssd_gb * 1e9)


def _check_fit(text: str | None, amounts: Iterable[Amount], tier: str, tier_bytes: float) -> None:
    total = sum(amount.share_of(tier_bytes) for amount in amounts)
    if total > 1 + _SLACK:
        raise _too_much(text, total, tier, tier_bytes)


def _too_much(text: str | None, times: float, tier: str, tier_bytes: float) -> ConfigError:
    size = f"{tier_bytes / 1e9:.4g} GB"
    return reject("quotas", text, f"promises {times:.4g} times the {tier} tier of {size}")


def _parse_quota(text: str, entry: str) -> Quota:
    tenant, equals, amounts = entry.rpartition("=")
    tenant = tenant.strip()
    if not equals or not tenant:
        raise reject("quotas", text, f"{entry!r} must read TENANT=AMOUNT or TENANT=DRAM/SSD")
    if ";" in tenant or "\n" in tenant:
        raise reject("quotas", text, "tenants are separated by commas")
    dram, slash, ssd = amounts.partition("/")
    first = _parse_amount(text, dram)
    return Quota(tenant, first, _parse_amount(text, ssd) if slash else first)


def _parse_amount(text: str, amount: str) -> Amount:
    parts = _AMOUNT.fullmatch(amount.strip())
    if parts is None:
        raise reject("quotas", text, f"{amount.strip()!r} must be an amount like 25%, 0.25 or 20GB")
    value, unit = float(parts[1]), parts[2]
    if unit in _BYTES:
        return Amount(value * _BYTES[unit], is_share=False)
    if unit not in ("", "%"):
        raise reject("quotas", text, f"no unit {unit!r}; units: %, {', '.join(_BYTES)}")
    share = value / 100 if unit else value
    if share > 1:
        hint = "a share is at most 1 or 100%, and bytes need a unit such as GB"
        raise reject("quotas", text, f"{amount.strip()!r}: {hint}")
    return Amount(share, is_share=True)
