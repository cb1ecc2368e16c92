"""The page: whole, nothing from elsewhere, everything that a reader asks, and of a sane size however large the model is."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.inputs.profile import CostCurve, Profile, TensorProfile
from psgc.plan.model.job import Job
from psgc.plan.model.lanes import Span
from psgc.plan.model.problem import Problem, codec_costs
from psgc.plan.model.quality import LENIENTLY
from psgc.plan.report.assessment import assess
from psgc.plan.report.drawing import WIDTH, blocks
from psgc.plan.report.report import report

CURVE = CostCurve((1.0, 1 << 18), (10.0, 1000.0), (10.0, 1000.0))


def page(tensors: int = 4, method: str = "psgc", name: str = "layer") -> str:
    made = tuple(TensorProfile(f"{name}{index}", 1 << 20, 1000.0 * index) for index in range(tensors))
    profile = Profile("four", made, "a machine", "2026-01-01", "made up", codecs={"onebit": {"cpu": CURVE}})
    cluster = Cluster("pair", nodes=2, gpus_per_node=1, intra=Link(100, 5), inter=Link(1, 20), source="measured by hand")
    problem = Problem(profile, cluster, codec_costs("onebit", profile, 2))
    return report(assess(Job(problem, ("a note",)), method, compare=True, standard=LENIENTLY))


class Tags(HTMLParser):
    """The tags that are open, and what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    text = page()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.references
    assert "<script" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text


def test_the_page_fits_phones_and_follows_light_and_dark() -> None:
    text = page()
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 42rem" in text


def test_the_page_answers_what_a_reader_asks() -> None:
    text = page()
    for words in (
        "Compress: with onebit", "backward", "inter-send", "hipress", "the best found uncompressed", "other buckets could make the step", "no plan is faster",
        "if it were uncompressed", "a machine", "made up", "measured by hand", "1 Gbit/s, 20 us", "a note", "layer0",
    ):  # fmt: skip
        assert words in text, words


def test_methods_that_miss_for_one_reason_are_told_in_one_line() -> None:
    assert "<p>hitopkcomm, hipress: codec onebit: the profile has no times for it on gpu; measure them with psgc profile</p>" in page()


def test_pieces_of_work_have_tooltips() -> None:
    assert re.search(r"<rect [^>]*><title>\d+: layer[^<]*, comp@cpu[^<]* to [^<]* ms</title></rect>", page())


def test_names_cannot_break_the_page() -> None:
    text = page(name='<b>"&')
    assert '<b>"' not in text
    assert "&lt;b&gt;&quot;&amp;0" in text


@pytest.mark.parametrize("method", ["psgc", "fp32"])
def test_three_hundred_tensors_are_a_page_of_less_than_two_megabytes(method: str) -> None:
    text = page(300, method)
    assert len(text) < 2e6
    if method == "fp32":
        assert "Reasons are given for the 64 largest; 236 smaller ones are left out" in text


def spans(*pieces: tuple[int, float, float]) -> list[Span]:
    return [Span("gpu", bucket, 0, "comp@gpu", start, us) for bucket, start, us in pieces]


def test_what_cannot_be_seen_apart_is_drawn_as_one() -> None:
    assert len(blocks(spans((0, 0, 10), (1, 20, 10)), unit_us=1.0)) == 2
    assert [block[2:] for block in blocks(spans((0, 0, 10), (0, 10.2, 10)), unit_us=1.0)] == [(0, 20.2, 2)]
    assert len(blocks(spans((0, 0, 10), (1, 10, 10)), unit_us=1.0)) == 2  # another bucket's, and wide enough to be seen
    (merged,) = blocks(spans((0, 0, 0.1), (1, 0.2, 0.1), (2, 0.3, 0.1)), unit_us=1.0)
    assert (merged.action, merged.pieces) == ("several buckets", 3)


def test_a_strip_has_a_few_rectangles_a_unit_at_most() -> None:
    many = spans(*((index % 7, index * 0.01, 0.009) for index in range(100_000)))
    assert len(blocks(many, unit_us=1000 / WIDTH)) <= 4 * WIDTH


def test_nothing_is_lost_in_drawing() -> None:
    many = spans(*((index % 3, index * 0.7, 0.5) for index in range(500)))
    drawn = blocks(many, unit_us=1.0)
    assert sum(block.pieces for block in drawn) == len(many)
    assert all(any(block.start_us <= span.start_us and span.end_us <= block.end_us for block in drawn) for span in many)


def test_the_verdict_stands_first() -> None:
    text = page()
    body = text[text.index("</style>") :]
    assert body.index("Compress: with onebit") < body.index("Beside other methods") < body.index("Buckets")
