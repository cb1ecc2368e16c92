"""A simulated step as SVG: a strip for each lane, a rectangle for each task, coloured by bucket, with a tooltip.

Strips stretch to the page's width, so labels and axis are HTML beside them. Rectangles that are too narrow to be seen are merged with their
neighbours, so a strip has some thousands of rectangles at most, however many tensors there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from psgc.plan.model.lanes import BACKWARD, LANES, Span
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.report.wording import bucket_title, ms

WIDTH: Final = 1000  # of a strip, in its own units
HEIGHT: Final = 10
NARROW: Final = 0.5  # units; a narrower gap or rectangle cannot be seen
GOLDEN_ANGLE: Final = 137.508  # degrees: neighbours in a plan get hues far apart
MIXED: Final = -2
TICKS: Final = 4


class Block(NamedTuple):
    """Spans drawn as one rectangle. bucket: MIXED for those of several."""

    bucket: int
    action: str
    start_us: float
    end_us: float
    pieces: int


def colour(bucket: int) -> str:
    """A bucket's colour; readable on white and on black."""
    return f"hsl({bucket * GOLDEN_ANGLE % 360:.0f} 60% 55%)" if bucket >= 0 else "#888"


def blocks(spans: Iterable[Span], unit_us: float) -> list[Block]:
    """One lane's spans as rectangles; spans that cannot be told apart at ``unit_us`` a unit of width are merged."""
    drawn: list[Block] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        block = Block(span.bucket, span.action, span.start_us, span.end_us, 1)
        joined = _joined(drawn[-1], block, NARROW * unit_us) if drawn else None
        if joined is None:
            drawn.append(block)
        else:
            drawn[-1] = joined
    return drawn


def _joined(before: Block, block: Block, narrow_us: float) -> Block | None:
    """Both merged; None if they can be told apart."""
    if block.start_us - before.end_us > narrow_us:
        return None
    same = before[:2] == block[:2]
    if not same and max(before.end_us - before.start_us, block.end_us - block.start_us) > narrow_us:
        return None
    bucket, action = before[:2] if same else (MIXED, "several buckets")
    return Block(bucket, action, before.start_us, max(before.end_us, block.end_us), before.pieces + block.pieces)


def strips(spans: Sequence[Span], buckets: Sequence[PlannedBucket]) -> str:
    """The lanes that do any work, one under the other, from the first gradient's readiness to the end of the step."""
    step_us = max((span.end_us for span in spans), default=0.0)
    if step_us == 0:
        return "<p>Nothing takes any time.</p>"
    drawn = [_strip(lane, [span for span in spans if span.lane == lane], buckets, step_us) for lane in LANES]
    return f'<div class="lanes">{"".join(drawn)}{_axis(step_us)}</div>'


def _strip(lane: str, spans: Sequence[Span], buckets: Sequence[PlannedBucket], step_us: float) -> str:
    busy = sum(span.us / span.threads for span in spans)
    if busy == 0:
        return ""
    rectangles = "".join(_rectangle(block, buckets, step_us) for block in blocks(spans, step_us / WIDTH))
    label = f"{lane} <small>{ms(busy)} ms, {busy / step_us:.0%} of the step</small>"
    return (
        f'<div class="label">{label}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(lane)}: works {ms(busy)} of {ms(step_us)} ms">{rectangles}</svg>'
    )


def _rectangle(block: Block, buckets: Sequence[PlannedBucket], step_us: float) -> str:
    scale = WIDTH / step_us
    width = max((block.end_us - block.start_us) * scale, NARROW)
    return (
        f'<rect x="{block.start_us * scale:.2f}" width="{width:.2f}" height="{HEIGHT}" fill="{_fill(block)}">'
        f"<title>{escape(_tooltip(block, buckets))}</title></rect>"
    )


def _fill(block: Block) -> str:
    return "#999" if block.action == BACKWARD else colour(block.bucket)


def _tooltip(block: Block, buckets: Sequence[PlannedBucket]) -> str:
    whose = f"{bucket_title(block.bucket, buckets[block.bucket])}, {block.action}" if block.bucket >= 0 else block.action
    several = f", {block.pieces} pieces" if block.pieces > 1 else ""
    return f"{whose}{several}: {ms(block.start_us)} to {ms(block.end_us)} ms"


def _axis(step_us: float) -> str:
    ticks = "".join(f"<span>{ms(step_us * tick / TICKS)}</span>" for tick in range(TICKS + 1))
    return f'<div class="axis">{ticks}</div>'
