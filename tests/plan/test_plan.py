"""Plans as JSON: what is written is read back, versions are told apart, and what is wrong is named."""

from __future__ import annotations

import gc
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.errors import UsageError
from psgc.plan.inputs.cluster import Cluster, Link
from psgc.plan.model.plan import Issue, JobShape, Plan, PlannedBucket, check_fits, plan_text
from psgc.plan.model.problem import simulate
from psgc.plan.planfile.completing import whole_plan
from psgc.plan.planfile.fits import check_job, other_inside
from psgc.plan.planfile.reading import load_plan, read_plan
from psgc.plan.planfile.runtime import why_not_run
from psgc.plan.planfile.strict import parse_strictly
from tests.plan.jobs import bucket_of, problem_of

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
PUSHED = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
PLAIN = ("flat.all_reduce",)
CLUSTER = Cluster("c", 2, 1, Link(100.0, 5.0, "PCIe"), Link(1.0, 20.0), 2)
BUCKETS = (
    PlannedBucket(("b", "a"), 30, 2, 0, "onebit/int8", PUSHED, 0, (1, 0)),
    PlannedBucket(("c",), 5, 1, -1, "none", PLAIN),
)
ORDER = {
    "inter-send": (Issue(0, 0, 1), Issue(1, 0, 0), Issue(0, 1, 1)),
    "inter-receive": (Issue(1, 0, 0), Issue(0, 0, 2), Issue(0, 1, 2)),
}
PLAN = Plan("m", "c", BUCKETS, {"step_ms": 1.5}, CLUSTER, JobShape(2, 2, 2, 1), ORDER)


def test_a_plan_is_read_back_as_it_was_written_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    text = plan_text(PLAN.to_json())
    path = tmp_path / "plan.json"
    path.write_text(text)
    again = load_plan(str(path))
    assert again == PLAN
    assert plan_text(again.to_json()) == text
    assert text == (GOLDEN / "version-2.json").read_text()
    assert not again.unknown


def test_the_same_plan_is_the_same_bytes_in_whatever_order_its_parts_were_given() -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return value if not isinstance(value, list) else [turned(one) for one in value]

    plan = replace(PLAN, prediction={"b": {"y": 1, "x": [{"q": 1, "p": 2}]}, "a": 2})
    again = read_plan(turned(json.loads(plan_text(plan.to_json()))), "p")
    assert plan_text(again.to_json()) == plan_text(plan.to_json())


@pytest.mark.parametrize("source", ["version-1", "version-1-layout"])
def test_a_plan_of_version_1_is_loaded_and_says_what_it_lacks(source: str) -> None:
    path = GOLDEN / f"{source}.json"
    document, plan = json.loads(path.read_text()), load_plan(str(path))
    assert document["version"] == 1
    assert (plan.model, plan.cluster, plan.prediction) == (document["model"], document["cluster"], document["prediction"])
    assert [bucket.to_json() for bucket in plan.buckets] == document["buckets"]
    assert (plan.machines, plan.shape, plan.issue_order) == (None, JobShape(), None)
    placed = ("the server of each part",) if source == "version-1-layout" else ()
    assert plan.unknown == ("the cluster", *placed, "the issue order")
    made = plan.to_json()
    assert made["version"] == 2
    assert read_plan(made, "p") == plan


def test_a_file_that_would_take_long_to_read_is_refused_by_counting() -> None:
    for text, said in (
        ("[" + ",".join(["[]"] * (1 << 20)) + "]", "it has 1,048,577 lists and objects, and 1,048,576 are the most that a plan may have"),
        ("[" + ",".join("1" * ((1 << 22) + 2)) + "]", "it has 4,194,305 commas, and 4,194,304 are the most that a plan may have"),
    ):
        with pytest.raises(UsageError, match=f"^plan p: {said}$"):
            parse_strictly(text, "plan p")
    assert gc.isenabled()
    assert parse_strictly(b'{"a": [1, 2]}', "p") == {"a": [1, 2]}
    assert gc.isenabled()


def test_a_newer_version_and_no_version_are_refused_in_a_line() -> None:
    for version, said in (
        (3, "p: field version is 3, expected one of 1 and 2: a newer psgc wrote it"),
        (10**20, "field version is 1000.*, expected one of 1 and 2: a newer"),
        *(
            (wrong, "field version is .*, expected one of 1 and 2; make the plan anew with psgc plan")
            for wrong in (0, -1, True, "2", 2.0, None)
        ),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            read_plan({**PLAN.to_json(), "version": version}, "p")
        assert "\n" not in str(raised.value)


def test_no_json_and_no_file_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    good = plan_text(PLAN.to_json())
    for text, said in (
        ("{", "not valid JSON"),
        ("\udcff", "not valid JSON"),
        (good.replace('"model": "m"', '"model": "m", "model": "n"'), "field 'model' is there twice"),
        (good.replace("1.5", "NaN"), "NaN is no number"),
        (good.replace("1.5", "-Infinity"), "-Infinity is no number"),
        (good.replace("1.5", "1e999"), "the number 1e999 is too large"),
        (good.replace("1.5", "9" * 100_000), "a whole number of 100000 digits is too large"),
        (good.replace("1.5", "[" * 100_000 + "]" * 100_000), "nested too deeply"),
        (good.replace("1.5", "[" * 40 + "]" * 40), "nested too deeply: 32 levels"),
        (good + " " * (16 << 20), "it is longer than 16 MiB"),
        ("[]", 'expected an object with a list "buckets"'),
    ):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UsageError, match=said) as raised:
            load_plan(str(path))
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 600
    with pytest.raises(UsageError, match="No such file"):
        load_plan(str(tmp_path / "y"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numel": -1}, r"buckets\[0\]: field numel is -1"),
        ({"numel": 10**25}, r"buckets\[0\]: field numel is 10000"),
        ({"numel": True}, "field numel is True"),
        ({"parts": 0}, "field parts is 0"),
        ({"parts": 31}, "field parts is 31, expected no more than its 30 elements"),
        ({"numel": 10**9, "parts": 10**6}, "field parts is 1000000, expected .* 65,536 at most"),
        ({"priority": "high"}, "field priority is 'high'"),
        ({"priority": 10**20}, "field priority is 10000"),
        ({"codec": ""}, "field codec is ''"),
        ({"codec": "int8\n\x1b[2J"}, r"field codec is 'int8\\n\\x1b\[2J'"),
        ({"tensors": []}, r"field tensors is \[\]"),
        ({"tensors": "a"}, "field tensors is 'a'"),
        ({"tensors": ["a" * 2000]}, "field tensors is 'aaaa.*, expected a text on one line"),
        ({"tensors": ["\ud800"]}, r"field tensors is '\\ud800'"),
        ({"option": ["flat.all_reduced"]}, "unknown action 'flat.all_reduced'"),
        ({"option": ["flat.all_reduce", "flat.all_reduce"]}, "'flat.all_reduce' cannot stand after flat.all_reduce"),
        ({"option": ["decomp@gpu"]}, "'decomp@gpu' cannot stand at the beginning"),
        ({"option": ["comp@gpu", "flat.all_gather.c"]}, "ends before every rank has the sum"),
        ({"option": []}, "no action ends before"),
        ({"tensors": ["c"]}, "tensor 'c' stands in two places"),
        ({"part": 3}, "unknown field 'part'; expected some of codec"),
        ({"servers": [0]}, r"field servers is \[0\], expected a list of 2 servers"),
        ({"servers": [0, 2]}, "field servers has 2, expected a whole number of at least 0 and below 2, the cluster's servers"),
        ({"servers": [0, -1]}, "field servers has -1"),
        ({"servers": [0, True]}, "field servers has True"),
        ({"servers": {"0": 1}}, "field servers is .*, expected a list"),
        ({"option": ["flat.all_reduce"]}, "field servers is given, but the option flat.all_reduce has no servers"),
    ],
)
def test_what_is_wrong_in_a_bucket_is_named(change: dict[str, Any], said: str) -> None:
    document = PLAN.to_json()
    document["buckets"][0].update(change)
    with pytest.raises(UsageError, match=said):
        read_plan(document, "p.json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cluster", "espresso", "field cluster is 'espresso', expected an object"),
        ("cluster", {**CLUSTER.to_json(), "nodes": 0}, "p: cluster: field nodes is 0"),
        ("cluster", {**CLUSTER.to_json(), "nodes": 10**6, "gpus_per_node": 10**6}, "field cluster has 1,000,000,000,000 workers"),
        ("cluster", {**CLUSTER.to_json(), "inter": {"gbps": -1, "latency_us": 0}}, "field inter.gbps is -1"),
        ("cluster", {**CLUSTER.to_json(), "racks\n": 3}, r"cluster: unknown field 'racks\\n'"),
        ("cluster", {**CLUSTER.to_json(), "intra": {"gbps": 1, "latency_us": 0, "kind": 5}}, "field intra.kind is 5"),
        ("cluster", {"name": "x", "workers": 0}, "field workers is 0"),
        ("cluster", {"name": "x", "racks": 0}, "unknown field 'racks' beside no nodes"),
        ("cluster", {"name": ["x"]}, "field cluster.name is"),
        ("issue-order", {}, "p: unknown field 'issue-order'; expected some of version, model, cluster, buckets, issue_order, prediction"),
        ("model", 7, "field model is 7"),
        ("model", "two\nlines", "field model is 'two"),
        ("prediction", [], r"field prediction is \[\]"),
        ("issue_order", [], r"field issue_order is \[\], expected an object"),
        ("issue_order", {"intra": 3}, r"issue_order\['intra'\] is 3"),
        ("issue_order", {"gpu": []}, "unknown lane 'gpu'; expected some of inter-receive, inter-send, intra"),
        ("issue_order", {"inter-send": [[0, 0]]}, r"\[0\] is \[0, 0\], expected \[bucket, part, step\]"),
        ("issue_order", {"inter-send": [[0, 0, 1.0]]}, "whole numbers"),
        ("issue_order", {"inter-send": [[2, 0, 1]]}, "but the plan has 2 buckets"),
        ("issue_order", {"inter-send": [[0, 2, 1]]}, "but the bucket has 2 parts"),
        ("issue_order", {"inter-send": [[0, 0, -1]]}, "but the bucket's option has 4 actions"),
        ("issue_order", {"inter-send": [[0, 0, 0]]}, "comp@cpu does not use this lane"),
        ("issue_order", {"inter-receive": [[0, 0, 1]]}, "flat.push.c does not use this lane"),
        ("issue_order", {"inter-send": [[0, 0, 1], [0, 0, 1]]}, "which the lane has twice"),
        ("issue_order", {"inter-send": [[0, 0, 1]]}, r"lane inter-send lacks \[0, 1, 1\], flat.push.c of the bucket of 'b'"),
    ],
)
def test_what_is_wrong_beside_the_buckets_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        read_plan({**PLAN.to_json(), field: value}, "p")
    assert "\n" not in str(raised.value)


def test_an_issue_order_in_which_ranks_would_wait_for_each_other_for_ever_is_refused() -> None:
    ring = PlannedBucket(("a",), 5, 1, 0, "none", PLAIN)
    other = replace(ring, tensors=("b",))
    one, two = Issue(0, 0, 0), Issue(1, 0, 0)
    plan = Plan("m", "c", (ring, other), {}, CLUSTER, JobShape(2, 2, 2, 1), {"inter-send": (one, two), "inter-receive": (one, two)})
    assert read_plan(plan.to_json(), "p") == plan
    crossed = replace(plan, issue_order={"inter-send": (one, two), "inter-receive": (two, one)})
    with pytest.raises(UsageError, match=r"issue_order: \[0, 0, 0\] waits for itself: the lanes, or a part's steps, contradict each other"):
        read_plan(crossed.to_json(), "p")
    scattered = replace(ring, option=("flat.reduce_scatter", "flat.all_gather"))
    first, second = Issue(0, 0, 0), Issue(0, 0, 1)
    backwards = replace(plan, buckets=(scattered,), issue_order=dict.fromkeys(("inter-send", "inter-receive"), (second, first)))
    with pytest.raises(UsageError, match="waits for itself"):
        read_plan(backwards.to_json(), "p")


def test_an_order_without_its_cluster_and_more_parts_than_any_plan_has_are_refused() -> None:
    document = {**PLAN.to_json(), "cluster": {"name": "c", "workers": 2, "servers": 2}}
    with pytest.raises(UsageError, match="field issue_order is given, but no cluster whose lanes it is of"):
        read_plan(document, "p")
    many = [{**BUCKETS[1].to_json(), "tensors": [f"t{n}"], "numel": 1 << 17, "parts": 1 << 16} for n in range(17)]
    with pytest.raises(UsageError, match="buckets have 1,114,112 parts together, at most 1,048,576"):
        read_plan({**PLAN.to_json(), "issue_order": None, "buckets": many}, "p")


def test_the_table_of_fields_in_the_docs_has_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    section = text[text.index("### A plan's file") :].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE))
    part = replace(BUCKETS[0], part_numel=20)
    written = {*PLAN.to_json(), *(f"buckets[].{key}" for key in part.to_json())}
    assert named == written
    cluster = next(line for line in section.splitlines() if line.startswith("| `cluster`"))
    assert all(f"`{key}`" in cluster for key in CLUSTER.to_json())


def test_300_tensors_take_less_than_a_mebibyte() -> None:
    problem = problem_of(*((400_000, 50.0 * n) for n in range(300)), servers=4)
    option = ("intra.reduce_scatter", "comp@gpu", "inter.all_to_all.c", "decomp@gpu", "comp@gpu", "inter.all_gather.c", "intra.all_gather.c",
              "decomp@gpu")  # fmt: skip
    buckets = [bucket_of(problem, n, parts=4, option=option) for n in range(300)]
    plan = whole_plan(problem, buckets, simulate(problem, buckets), {})
    assert len(plan_text(plan.to_json()).encode()) < 1 << 20
    assert read_plan(json.loads(plan_text(plan.to_json())), "p") == plan


def test_whether_this_version_runs_a_plan_is_asked_of_this_version_not_of_the_file() -> None:
    option = ("comp@gpu", "flat.push.c", "flat.pull.c", "decomp@gpu")
    on_gpu = replace(PLAN, buckets=(replace(BUCKETS[0], codec="onebit:residual=int8", option=option),), issue_order=None)
    assert "action 'comp@gpu', but codec onebit:residual=int8 has no GPU side" in str(why_not_run(on_gpu, "p"))
    assert why_not_run(read_plan({**on_gpu.to_json(), "runnable": True}, "p"), "p") is not None
    assert why_not_run(PLAN, "p") is None


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"a": 10, "b": 20}, "it has a tensor 'c', model m2 has none such; the plan is for another model .m. or another version"),
        ({"a": 10, "b": 21, "c": 5}, "the bucket of 'b' has 30 elements, in model m2 it has 31"),
        ({"a": 10, "b": 20, "c": 5, "d": 1}, "no bucket has tensor 'd'"),
    ],
)
def test_a_plan_for_another_model_names_the_tensor(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_fits(PLAN, sizes, "model m2")
    with pytest.raises(UsageError, match=said):
        check_job(PLAN, JobShape(2, 2), sizes, "model m2")


def test_a_plan_for_another_cluster_names_the_first_difference() -> None:
    sizes = {"a": 10, "b": 20, "c": 5}
    for shape, said in (
        (
            JobShape(4, 2, 2, 1),
            r"plan: it is for a job of 2 workers \(c\), this job has 4; make a plan for this job's cluster with psgc plan",
        ),
        (JobShape(2, 3, 1, 2), "for a job of 2 nodes .c., this job has 1"),
        (JobShape(2, 3, None, 2), "for a job of 1 workers on a node .c., this job has 2"),
        (JobShape(2, 1), "for a job of 2 servers .c., this job has 1"),
    ):
        with pytest.raises(UsageError, match=said):
            check_job(PLAN, shape, sizes, "this model")
    for shape in (JobShape(), JobShape(2), JobShape(2, 2), JobShape(2, 2, 2, 1)):
        check_job(PLAN, shape, sizes, "this model")
    check_job(load_plan(str(GOLDEN / "version-1-layout.json")), JobShape(7, 7), {"w": 10000, "b": 7}, "this model")


def test_nodes_whose_inside_is_not_the_plans_are_named() -> None:
    pushed = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
    buckets = (PlannedBucket(("c",), 5, 1, -1, "none", pushed),)
    four = Cluster("c", 3, 4, Link(100.0, 5.0), Link(1.0, 20.0), 1, reduce_roots=(2, 3))
    plan = Plan("m", "c", buckets, {}, four)
    as_planned, unset = ((2, 3), 0), ((), 0)
    assert other_inside(plan, (as_planned,) * 3) == ""
    line = other_inside(plan, (as_planned, unset, ((1,), 0)))
    assert line.startswith("the plan is for nodes with BYTEPS_REDUCE_ROOTS=2,3, which the workers of node 1, 2 have not: "), line
    switches = replace(plan, machines=replace(four, reduce_roots=(), pcie_switch_size=2))
    assert "BYTEPS_PCIE_SWITCH_SIZE=2, which the workers of node 0 have not" in other_inside(switches, (unset, ((), 2), ((), 2)))
    for without in (replace(plan, buckets=BUCKETS), replace(plan, machines=None), replace(plan, machines=replace(four, reduce_roots=()))):
        assert other_inside(without, (unset,) * 3) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def places_in(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in it."""
    entries = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    return [path, *(place for key, value in entries for place in places_in(value, (*path, key)))]


PLACES = places_in(PLAN.to_json())[1:]


def changed(document: Any, place: tuple[Any, ...], value: Any) -> None:
    """Put the value there, or take away what is there; nothing where the place is gone itself."""
    with suppress(LookupError, TypeError):
        for key in place[:-1]:
            document = document[key]
        if value == "gone":
            del document[place[-1]]
        else:
            document[place[-1]] = value


@given(st.lists(st.tuples(st.sampled_from(PLACES), JSON | st.just("gone")), min_size=1, max_size=3), st.booleans())
def test_a_plan_with_anything_anywhere_is_read_or_refused_in_a_line(changes: Any, old: bool) -> None:
    document = json.loads(json.dumps(PLAN.to_json() | ({"version": 1, "cluster": "c"} if old else {})))
    for place, value in changes:
        changed(document, place, value)
    check_read_or_refused(json.dumps(document))


@given(st.data())
def test_a_plans_file_with_bytes_changed_is_read_or_refused_in_a_line(data: st.DataObject) -> None:
    text = plan_text(PLAN.to_json())
    first = data.draw(st.integers(0, len(text)))
    after = data.draw(st.integers(first, min(len(text), first + 40)))
    check_read_or_refused(
        text[:first] + data.draw(st.text(max_size=6) | st.sampled_from(["NaN", "1e999", "[" * 50, '"a":', "-1"])) + text[after:]
    )


def check_read_or_refused(text: str) -> None:
    """Nothing else comes of it, and what is read is written and read again as it is."""
    try:
        plan = read_plan(parse_strictly(text, "p"), "p")
    except UsageError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert "\n" not in refusal
    assert len(refusal) < 600
    if refusal:
        return
    written = plan_text(plan.to_json())
    again = read_plan(parse_strictly(written, "p"), "p")
    assert (again.buckets, again.issue_order, again.machines) == (plan.buckets, plan.issue_order, plan.machines)
    assert plan_text(again.to_json()) == written
    why_not_run(plan, "p")
