"""Draws the figures of a comparison."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.router.simulate.comparison import Comparison

_FORMATS = (".png", ".svg", ".pdf")
_PANELS = {
    "time to first token, mean (s)": "ttft_mean_s",
    "p99 (s)": "ttft_p99_s",
    "time to last token, mean (s)": "e2e_mean_s",
    "prompt tokens found cached": "hit_rate",
}
_COLOUR, _FIRST_COLOUR = "#8d99ae", "#2a9d5c"


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work is done.

    Raises:
        ConfigError: The format is unknown.
        MissingDependencyError: matplotlib is missing.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: a plot ends with one of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("a plot needs matplotlib: pip install '.[bench]'")


def write_plot(comparison: Comparison, title: str, path: Path) -> None:
    """Draw a bar per policy and figure.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    names = list(comparison.policies)
    figure = Figure(figsize=(12, 1.6 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    for axis, (label, field) in zip(axes, _PANELS.items(), strict=True):
        values = [getattr(comparison.policies[name], field) for name in names]
        colours = [_FIRST_COLOUR, *[_COLOUR] * (len(names) - 1)]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
