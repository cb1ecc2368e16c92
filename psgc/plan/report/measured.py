"""A verification as one HTML page: predicted beside measured, by candidate and by lane, and the correction. The page is self-contained, as a plan's is."""

from __future__ import annotations

from html import escape
from typing import Any

from psgc.plan.report.report import page_of
from psgc.plan.report.verification import Verification, document


def page(found: Verification, plan: str) -> str:
    """plan: its name, for the title."""
    shown = document(found)
    title = f"{plan}, measured on {found.correction.cluster}"
    factors = ", ".join(f"{escape(name)} {value:.3g}" for name, value in shown["factors"].items())
    body = (
        f"<h1>{escape(title)}</h1>"
        f"<p>Whole steps, in milliseconds, of candidates that took turns in the same job: the median of their windows, beside what the profile predicted, and "
        f"what it predicts once it is corrected.</p>{_steps(shown, found)}"
        f"<p>The correction: {factors}. With it predictions are within {shown['error']:.1%} of these steps.</p>"
        f"<h2>Where the time goes</h2><p>How long each lane works in a step. What a lane was not measured for is left out.</p>"
        f"{''.join(_lanes(one) for one in shown['candidates'])}"
    )
    return page_of(title, body)


def _steps(shown: dict[str, Any], found: Verification) -> str:
    longest = max(max(one["measured_ms"], one["predicted_ms"], one["corrected_ms"]) for one in shown["candidates"]) or 1.0
    rows = "".join(
        f'<tr><td class="bar">{escape(one["name"])}{_bar(one["measured_ms"], longest, True)}{_bar(one["predicted_ms"], longest)}</td>'
        f'<td class="number">{one["measured_ms"]:,.1f}<br><small>scatter {each.scatter:.0%}</small></td>'
        f'<td class="number">{one["predicted_ms"]:,.1f}<br><small>{one["error"]:+.1%}</small></td>'
        f'<td class="number">{one["corrected_ms"]:,.1f}<br><small>{one["corrected_error"]:+.1%}</small></td></tr>'
        for one, each in zip(shown["candidates"], found.candidates, strict=True)
    )
    head = "".join(f'<th class="number">{name}</th>' for name in ("measured", "predicted", "corrected"))
    return f"<table><thead><tr><th>candidate</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _bar(ms: float, longest: float, mine: bool = False) -> str:
    return f'<i{" class=mine" if mine else ""} style="width:{ms / longest:.1%}"></i>'


def _lanes(one: dict[str, Any]) -> str:
    known = [lane for lane in one["lanes"] if lane["measured_ms"] is not None and (lane["predicted_ms"] or lane["measured_ms"])]
    longest = max((max(lane["measured_ms"], lane["predicted_ms"] or 0.0) for lane in known), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td class="bar">{escape(lane["lane"])}{_bar(lane["measured_ms"], longest, True)}{_bar(lane["predicted_ms"] or 0.0, longest)}</td>'
        f'<td class="number">{lane["measured_ms"]:,.1f}</td>'
        f'<td class="number">{"" if lane["predicted_ms"] is None else format(lane["predicted_ms"], ",.1f")}</td></tr>'
        for lane in known
    )
    farthest = (
        f"<p>Farthest from its prediction: {escape(one['farthest_lane'])}, by {one['farthest_ms']:+,.1f} ms.</p>"
        if one["farthest_lane"]
        else ""
    )
    head = '<tr><th>lane</th><th class="number">measured</th><th class="number">predicted</th></tr>'
    return f"<h3>{escape(one['name'])}</h3>{farthest}<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
