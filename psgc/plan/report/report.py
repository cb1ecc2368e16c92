"""A plan as one HTML page: its assessment, its step as a picture, and its buckets with the reasons for their options.

The page is self-contained: it loads no scripts, fonts, pictures or other pages. It follows the reader's light or dark theme and the window's
width. Owns the page; ``assessment``, ``reasons`` and ``drawing`` provide its contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from psgc.plan.inputs.cluster import Link
from psgc.plan.model.costs import CodecCosts
from psgc.plan.model.lanes import overlap, spans
from psgc.plan.model.plan import PlannedBucket
from psgc.plan.model.problem import simulate
from psgc.plan.report.assessment import Assessment
from psgc.plan.report.drawing import colour, strips
from psgc.plan.report.incomparable import incomparable
from psgc.plan.report.reasons import Reason, reasons, sentence
from psgc.plan.report.sentences import about_held_back, about_memory, about_quality, about_running, from_best, verdict, verified
from psgc.plan.report.wording import elements, longer, ms, percent, tensors_text

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2a7; --other: #89a }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; background: #fff; color: #222 }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin-top: 2rem }
.verdict { padding: .8rem 1rem; border-left: .4rem solid var(--other); background: var(--soft); font-size: 1.1rem } .pays { border-color: var(--accent) }
.figures { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 }
.figures div { flex: 1 1 9rem; padding: .5rem .8rem; border: 1px solid var(--line); border-radius: .4rem }
.figures b { display: block; font-size: 1.3rem } small { opacity: .7 }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .5rem; text-align: left; vertical-align: top }
tr { border-bottom: 1px solid var(--line) } .buckets td, .facts td { overflow-wrap: anywhere } code { font-size: .85em }
.number { text-align: right } td.number { white-space: nowrap } .bar { width: 60% } .buckets .word, .facts th { white-space: nowrap }
.bar i { display: block; height: .6rem; background: var(--other); border-radius: .2rem } .bar .mine { background: var(--accent) }
.lanes svg { display: block; width: 100%; height: 1.6rem; background: var(--soft) } .label { margin-top: .5rem; font-size: .9rem }
.axis { display: flex; justify-content: space-between; font-size: .8rem; opacity: .7 }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .4rem }
@media (prefers-color-scheme: dark) { body { background: #15181c; color: #dde } }
@media (max-width: 42rem) {
  .buckets thead { display: none } .buckets tr { display: block; padding: .5rem 0 }
  .buckets td { display: block; padding: .1rem 0; text-align: left } .buckets td::before { content: attr(data-is) " "; opacity: .6 }
}
"""


def report(assessed: Assessment) -> str:
    """The page."""
    title = f"Plan for {assessed.problem.profile.model or 'a model'} on {assessed.problem.cluster.name}"
    body = "".join(
        (
            f'<h1>{escape(title)}</h1>{_verdict(assessed)}', _figures(assessed), _methods(assessed),
            _picture(assessed), _buckets(assessed), _facts(assessed),
        )
    )  # fmt: skip
    return page_of(title, body)


def page_of(title: str, body: str) -> str:
    """A page with this body, which is HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _verdict(assessed: Assessment) -> str:
    pays = " pays" if assessed.gain > assessed.margin else ""
    beside = (
        *about_quality(assessed),
        *about_memory(assessed.found.buckets),
        about_running(assessed),
        *about_held_back(assessed),
        verified(assessed.problem),
    )
    lines = "".join(f"<p>{escape(_sentence(line))}</p>" for line in beside)
    return f'<p class="verdict{pays}">{escape(_sentence(verdict(assessed)))}</p>{lines}'


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _figures(assessed: Assessment) -> str:
    steps, step = assessed.steps_us, assessed.found.step_us
    figures = [
        (f"{ms(step)} ms", f"the step, by {assessed.method}"),
        (f"{ms(steps['uncompressed'])} ms", "the best found uncompressed"),
        (f"{ms(steps['fp32'])} ms", "uncompressed, tensor by tensor (fp32)"),
        (f"{ms(assessed.bounds.any_us)} ms", "no plan is faster, in this model"),
        (percent(overlap(spans(assessed.simulated))), "of communication behind backward"),
    ]
    boxes = "".join(f"<div><b>{escape(value)}</b><small>{escape(what)}</small></div>" for value, what in figures)
    return f'<div class="figures">{boxes}</div><p>{escape(_sentence(from_best(assessed)))}</p>'


def _methods(assessed: Assessment) -> str:
    """Every method's step, and how much less time this plan takes."""
    step, slowest = assessed.found.step_us, max(assessed.steps_us.values()) or 1.0
    rows = "".join(
        f'<tr><td class="bar">{escape(name)}<i{" class=mine" if name == assessed.method else ""} style="width:{us / slowest:.1%}"></i></td>'
        f'<td class="number">{ms(us)} ms</td><td class="number">{_gain(name, assessed.method, step, us)}</td></tr>'
        for name, us in sorted(assessed.steps_us.items(), key=lambda item: item[1])
    )
    missing = "".join(f"<p>{escape(line)}</p>" for line in incomparable(assessed.rivals))
    head = '<tr><th>plan by</th><th class="number">step</th><th class="number">this plan takes</th></tr>'
    return f"<h2>Beside other methods</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>{missing}"


def _gain(name: str, mine: str, step_us: float, other_us: float) -> str:
    return "" if name == mine or not other_us else longer(step_us / other_us - 1)


def _picture(assessed: Assessment) -> str:
    """The plan's lanes, and those of the best uncompressed plan."""
    plain = simulate(assessed.problem, assessed.plain.buckets)
    return (
        f"<h2>The step</h2><p>From the first gradient's readiness, in milliseconds; each colour is a bucket.</p>"
        f"{strips(spans(assessed.simulated), assessed.found.buckets)}"
        f"<details><summary>The best found uncompressed: {ms(plain.step_us)} ms</summary>{strips(spans(plain), assessed.plain.buckets)}</details>"
    )


def _buckets(assessed: Assessment) -> str:
    """Every bucket, in the plan's order."""
    buckets = assessed.found.buckets
    why = reasons(assessed.problem, buckets)
    names = ("tensors", "elements", "parts", "codec", "option", "why")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(_bucket_row(number, bucket, why.get(number), assessed.found.step_us, names) for number, bucket in enumerate(buckets))
    left_out = len(buckets) - len(why)
    note = f"<p>Reasons are given for the {len(why)} largest; {left_out} smaller ones are left out.</p>" if left_out else ""
    return f'<h2>Buckets</h2>{note}<table class="buckets"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _bucket_row(number: int, bucket: PlannedBucket, why: Reason | None, step_us: float, names: Sequence[str]) -> str:
    swatch = f'<i class="swatch" style="background:{colour(number)}"></i>'
    cells = (
        f"{swatch}{number}: {escape(tensors_text(bucket.tensors))}", elements(bucket.numel), str(bucket.parts), escape(bucket.codec),
        f"<code>{escape(' '.join(bucket.option))}</code>", escape(sentence(bucket, why, step_us)) if why else "",
    )  # fmt: skip
    kinds = ("text", "word", "word", "word", "text", "text")
    made = "".join(f"<td data-is={name} class={kind}>{cell}</td>" for name, kind, cell in zip(names, kinds, cells, strict=True))
    return f"<tr>{made}</tr>"


def _facts(assessed: Assessment) -> str:
    """The plan's inputs, and how it was found."""
    problem, cluster, profile = assessed.problem, assessed.problem.cluster, assessed.problem.profile
    nodes = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs, {cluster.servers} servers"
    facts = [
        ("model", f"{profile.model}: {len(profile.tensors)} tensors, {elements(profile.numel)} elements, last gradient at {ms(profile.backward_us)} ms"),
        ("profile", _listed((profile.hardware, profile.date, profile.source))),
        ("cluster", f"{cluster.name}: {nodes}; within nodes {_link(cluster.intra)}, between them {_link(cluster.inter)}"),
        ("its figures", cluster.source),
        *(("codec", _codec(codec)) for codec in problem.used),
        ("choosing", f"{ms(assessed.found.select_us)} ms, {assessed.found.options_considered} options; bound {assessed.bounds.bound_ms:.3g} ms"),
        ("assumed", "; ".join(assessed.job.notes)),
    ]  # fmt: skip
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts if fact)
    return f'<h2>What this is for</h2><p>All times are simulated from these figures.</p><table class="facts"><tbody>{rows}</tbody></table>'


def _codec(codec: CodecCosts) -> str:
    return f"{codec.name}: {codec.bytes_per_element:.3g} bytes an element, times on {_listed(sorted(codec.curves))}"


def _link(link: Link) -> str:
    return f"{link.gbps:g} Gbit/s, {link.latency_us:g} us"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)
