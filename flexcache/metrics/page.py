"""Renders the documentation page of metrics from their catalogs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flexcache.metrics.catalog import describe_metrics
from flexcache.metrics.metric import Metric


def render(head: str, *catalogs: Mapping[str, Sequence[Metric[Any]]]) -> str:
    """Return the page as Markdown: its head, then one table per section of the catalogs."""
    described = [row for catalog in catalogs for row in describe_metrics(catalog)]
    sections = []
    for title, rows in groupby(described, lambda row: row["section"]):
        lines = [
            f"\n## {title}\n",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{row['name']}` | {row['type']} | {row['labels']} | {row['meaning']} |"
            for row in rows
        ]
        sections.append("\n".join(lines) + "\n")
    return head + "".join(sections)
