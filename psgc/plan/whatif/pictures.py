"""Draws the answer to a question: over bandwidths, with faster computers, and for codecs of other speeds and sizes.

Owns the drawing; imports matplotlib only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from psgc.errors import UsageError
from psgc.plan.model.vary import Change
from psgc.plan.whatif.verdict import TRADES, Times

POINTS: Final = 17
SPEEDS: Final = (1.0, 1.5, 2.0, 3.0, 4.0)


def picture(times: Times, found: Mapping[str, Any], path: Path) -> None:
    """Three panels of the times and of what ``verdict`` found, as PNG or as the name's suffix says. Raises UsageError if it cannot be written."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("whatif: --plot needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    try:
        _bandwidths(times, panels[0])
        _faster(times, panels[1])
        _trades(found["trade_off"], panels[2])
        figure.suptitle(f"{times.name} {times.place}")
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"whatif: --plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _bandwidths(times: Times, axes: Any) -> None:
    factors = np.geomspace(0.1, 10, POINTS)
    changes = [Change(link=float(factor)) for factor in factors]
    axes.loglog(factors * times.gbps, [times.sync_ms(change) for change in changes], label="uncompressed")
    axes.loglog(factors * times.gbps, [times.method_ms(change) for change in changes], label=times.name)
    axes.axvline(times.gbps, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="Gbit/s", ylabel="backward and synchronization, ms", title="Bandwidth")
    axes.legend()


def _faster(times: Times, axes: Any) -> None:
    changes = [Change(compute=speed) for speed in SPEEDS]
    axes.plot(SPEEDS, [times.sync_ms(change) for change in changes], marker="o", label="uncompressed")
    axes.plot(SPEEDS, [times.method_ms(change) for change in changes], marker="o", label=times.name)
    axes.set(xlabel="compute, times as fast", ylabel="backward and synchronization, ms", title="Faster computers, the same link")
    axes.set_ylim(bottom=0)
    axes.legend()


def _trades(trades: Sequence[Mapping[str, float]], axes: Any) -> None:
    gains = np.array([trade["gain"] for trade in trades]).reshape(len(TRADES), len(TRADES))  # a row for each codec_factor
    limit = max(0.01, float(np.abs(gains).max()))
    axes.imshow(gains, origin="lower", cmap="RdYlGn", vmin=-limit, vmax=limit, aspect="auto")
    for row, column in np.ndindex(gains.shape):
        axes.text(column, row, f"{gains[row, column]:+.0%}", ha="center", va="center")
    names = [f"{factor:g}x" for factor in TRADES]
    axes.set_xticks(range(len(TRADES)), names)
    axes.set_yticks(range(len(TRADES)), names)
    axes.set(xlabel="bytes of payload", ylabel="time to encode and decode", title="Time saved by codecs of other speeds and sizes")
