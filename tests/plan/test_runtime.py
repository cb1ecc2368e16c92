"""Plans as the runtime runs them: what it carries and what it refuses, and that a layout and its plan are the same thing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgc.codecs import BLOCK
from psgc.errors import CodecError, LayoutMismatch, RemoteProtocolError, UsageError
from psgc.layout import BucketSpec, Declaration, Layout, TensorSpec, build_layout, compare, equal_parts, full_parts
from psgc.plan.model.plan import NOT_KNOWN, JobShape, Plan, PlannedBucket
from psgc.plan.planfile import runtime
from psgc.plan.planfile.reading import read_plan
from psgc.plan.planfile.runtime import ENCODED, PLAIN, check_runs, load_runnable, plan_of, planned_buckets
from psgc.program.ranks import Ranks

CODECS = ("none", "int8", "onebit/int8", "topk:k=0.01", "shared", "bf16")
PLAIN_NODES = ("intra.reduce_scatter", "inter.push", "inter.pull", "intra.all_gather")
ENCODED_NODES = ("intra.reduce", "comp@cpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.broadcast")
ON_GPUS = tuple((f"comp@{a}", "flat.push.c", "flat.pull.c", f"decomp@{b}") for a, b in (("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")))
EXTENTS = (1, 7, 4096, 4097, 12288, 70001)


@st.composite
def tensor_sets(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    drawn = draw(st.lists(st.tuples(st.sampled_from((0, *EXTENTS)), st.integers(0, 1)), min_size=1, max_size=8))
    return tuple(TensorSpec(f"t{i}", (extent,), "float32", group) for i, (extent, group) in enumerate(drawn))


@st.composite
def planned(draw: st.DrawFn) -> tuple[Plan, tuple[TensorSpec, ...]]:
    """A plan that can be run, and its tensors."""
    tensors = draw(tensor_sets())
    buckets = []
    for group in (0, 1):
        left = list(draw(st.permutations([t for t in tensors if t.group == group and t.numel])))
        while left:
            count = draw(st.integers(1, len(left)))
            members, left = left[:count], left[count:]
            numel = sum(t.numel for t in members)
            parts = draw(st.integers(1, min(5, -(-numel // BLOCK))))
            codec = draw(st.sampled_from(CODECS))
            priority = draw(st.integers(-3, 3))
            names = tuple(t.name for t in members)
            encoded = [ENCODED] if codec == "shared" else [ENCODED, ENCODED_NODES, *ON_GPUS]
            options = [PLAIN, PLAIN_NODES] if codec == "none" else encoded
            buckets.append(PlannedBucket(names, numel, parts, priority, codec, draw(st.sampled_from(options))))
    return Plan("m", "c", tuple(draw(st.permutations(buckets)))), tensors


def declared(plan: Plan, tensors: tuple[TensorSpec, ...], shape: JobShape = NOT_KNOWN) -> Declaration:
    return Declaration("m", "plan", tensors, "none", True, buckets=planned_buckets(plan, tensors, shape))


def laid_out(declaration: Declaration, servers: int = 2) -> Layout:
    return build_layout(declaration, layout_id=1, servers=servers, workers=2, used_by_all=frozenset())


@given(planned())
def test_a_layout_has_the_plans_buckets_the_most_urgent_first(made: Any) -> None:
    plan, tensors = made
    layout = laid_out(declared(plan, tensors))
    of = {tuple(tensors[i].name for i in b.tensors): b for b in layout.buckets}
    assert len(of) == len(plan.buckets)
    for wanted in plan.buckets:
        bucket = of[wanted.tensors]
        slices = [part.numel for part in bucket.parts if part.round == 0]
        assert (bucket.numel, bucket.priority, len(slices)) == (wanted.numel, wanted.priority, wanted.parts)
        assert bucket.codec.split(":")[0] == wanted.codec.split(":")[0]
        assert sum(slices) == wanted.numel
    assert all(a.priority >= b.priority for a, b in pairwise(layout.buckets))


@given(st.integers(1, 300_000), st.integers(1, 40))
def test_equal_parts_end_at_blocks_and_differ_by_a_block_at_most(numel: int, parts: int) -> None:
    parts = min(parts, -(-numel // BLOCK))
    sizes = equal_parts(numel, parts)
    assert (len(sizes), sum(sizes)) == (parts, numel)
    assert all(size % BLOCK == 0 for size in sizes[:-1])
    blocks = [-(-size // BLOCK) for size in sizes]
    assert max(blocks) - min(blocks) <= 1
    assert min(sizes) > 0


@given(planned(), st.integers(1, 3))
def test_the_plan_of_a_layout_gives_the_same_layout(made: Any, servers: int) -> None:
    plan, tensors = made
    first = laid_out(declared(plan, tensors), servers)
    again = read_plan(json.loads(json.dumps(plan_of(first, servers).to_json())), "p")
    assert again.shape == JobShape(2, servers)
    assert laid_out(declared(again, tensors), servers) == first, "in a job whose servers are not known they are in turn"
    shifted = build_layout(declared(again, tensors, again.shape), layout_id=2, servers=servers, workers=2, used_by_all=frozenset())
    assert [part.server for _, part in shifted.parts()] == [part.server for _, part in first.parts()], "wherever another's turn begins"
    with pytest.raises(UsageError, match=f"for a job of {servers} servers .2 workers., this job has {servers + 1}"):
        declared(again, tensors, JobShape(2, servers + 1))


@given(tensor_sets(), st.sampled_from(CODECS), st.sampled_from((1, 65536, 1 << 20)), st.data())
def test_so_does_the_plan_of_a_layout_that_nobody_planned(tensors: Any, codec: str, size: int, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(tensors)))))
    default = Declaration(
        "m", "plan", tensors, codec, True, order=order, used=order, part_bytes=size, fuse_bytes=size, min_compress_bytes=500
    )
    first = build_layout(default, layout_id=1, servers=2, workers=2, used_by_all=frozenset(order[1:]))
    if first.buckets:
        again = read_plan(json.loads(json.dumps(plan_of(first).to_json())), "p")
        assert laid_out(declared(again, tensors)) == first


def test_a_part_that_is_not_like_the_others_is_written_with_their_size() -> None:
    tensors = (TensorSpec("w", (10 * BLOCK,), "float32"),)
    default = Declaration("m", "plan", tensors, "none", True, order=(0,), used=(0,), part_bytes=4 * 4 * BLOCK, min_compress_bytes=0)
    layout = laid_out(default)
    assert [part.numel for part in layout.buckets[0].parts] == full_parts(10 * BLOCK, 4 * BLOCK) == [4 * BLOCK, 4 * BLOCK, 2 * BLOCK]
    (bucket,) = plan_of(layout).to_json()["buckets"]
    assert (bucket["parts"], bucket["part_numel"]) == (3, 4 * BLOCK)


TWO = (TensorSpec("a", (9000,), "float32"), TensorSpec("b", (3,), "float32"))
PLAN = Plan("m", "c", (PlannedBucket(("b", "a"), 9003, 2, 0, "int8", ENCODED),))


def changed(**change: Any) -> Plan:
    return replace(PLAN, buckets=(replace(PLAN.buckets[0], **change),))


def test_what_is_pushed_to_servers_is_encoded_and_decoded_where_the_plan_says() -> None:
    """The layout says it only where it is not the CPU: declarations of plans that do not mention GPUs are the same bytes as before there was a choice."""
    for option, device in zip((ENCODED, *ON_GPUS), ("", "gpu", "gpu/cpu", "cpu/gpu"), strict=True):
        declaration = declared(changed(option=option), TWO)
        assert Declaration.from_json(json.loads(json.dumps(declaration.to_json()))) == declaration
        layout = laid_out(declaration)
        assert layout.buckets[0].device == device and ("device" in layout.to_json()) == bool(device)
        assert Layout.from_json(layout.to_json()) == layout
        assert plan_of(layout).buckets[0].option == option
    open_ = laid_out(replace(declared(PLAN, TWO), buckets=(), codec="int8", min_compress_bytes=0))
    assert plan_of(open_).buckets[0].option == ENCODED and plan_of(open_, on_gpu=True).buckets[0].option == ON_GPUS[0]
    strange = json.loads(json.dumps(declared(PLAN, TWO).to_json()))
    strange["buckets"][0]["device"] = "tpu"
    with pytest.raises(RemoteProtocolError, match="bucket BucketSpec"):
        Declaration.from_json(strange)


def test_gpus_encode_with_codecs_that_have_a_gpu_side(monkeypatch: pytest.MonkeyPatch) -> None:
    option = ("intra.reduce_scatter", "comp@gpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.all_gather")
    check_runs(changed(option=option, codec="bf16"), "p")
    check_runs(changed(option=ON_GPUS[0], codec="bf16"), "p")
    for codec in ("powersgd:rank=2", "shared", "topk:k=0.01,momentum=dgc", "onebit/relay"):
        check_runs(changed(option=ON_GPUS[0], codec=codec, parts=1), "p")
        with pytest.raises(
            UsageError,
            match=r"p: buckets\[0\] \(of 'b'\): codec .* keeps a state where it encodes, so it decodes there, too, not by comp@gpu",
        ):
            check_runs(changed(option=ON_GPUS[1], codec=codec, parts=1), "p")
    with pytest.raises(UsageError, match=r"p: buckets\[0\] \(of 'b'\): action 'comp@gpu', but codec onebit:residual=int8 has no GPU side"):
        check_runs(changed(option=ON_GPUS[0], codec="onebit:residual=int8", parts=1), "p")
    monkeypatch.setattr(runtime, "backends", lambda codec: ("cpu", "cuda") if codec.name == "int8" else ("cpu",))
    for broken in (option, ON_GPUS[0]):
        with pytest.raises(UsageError, match=r"action 'comp@gpu', but codec bf16 has no GPU side"):
            check_runs(changed(option=broken, codec="bf16"), "p")
    check_runs(changed(option=ON_GPUS[1], codec="int8/bf16"), "p")
    with pytest.raises(UsageError, match=r"action 'decomp@gpu', but codec bf16 has no GPU side"):
        check_runs(changed(option=ON_GPUS[2], codec="int8/bf16"), "p")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"option": PLAIN}, "codec int8, but flat.push flat.pull encodes nothing"),
        ({"codec": "onebitt"}, r"buckets\[0\] \(of 'b'\): unknown codec 'onebitt'"),
        ({"priority": 1 << 31}, "priority 2147483648, expected a number between -2147483648"),
    ],
)
def test_a_bucket_that_cannot_be_run_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed(**change).to_json()))
    with pytest.raises(UsageError, match=said):
        load_runnable(str(path))


@pytest.mark.parametrize(
    ("change", "tensors", "said"),
    [
        ({}, TWO[:1], "it has a tensor 'b', this model has none such"),
        ({}, (*TWO, TensorSpec("c", (1,), "float32")), "no bucket has tensor 'c' of this model"),
        ({}, (replace(TWO[0], shape=(8999,)), TWO[1]), "the bucket of 'b' has 9003 elements, in this model it has 9002"),
        ({}, (TWO[0], replace(TWO[1], group=1)), "tensor 'a' is of parameter group 0, but shares a bucket of the plan with 'b' of 1"),
        (
            {},
            (replace(TWO[0], dtype="bfloat16"), TWO[1]),
            "tensor 'a' is of dtype bfloat16, but shares a bucket of the plan with 'b' of float32",
        ),
        ({"parts": 4}, TWO, "tensor 'b': its bucket of 9003 elements is cut into 4 parts; .* so plan at most 3"),
        ({"part_numel": 4095}, TWO, "cut into 2 parts of 4095; plan parts of a multiple of 4096 that add up to it"),
        ({"part_numel": 4096}, TWO, "cut into 2 parts of 4096; plan parts of a multiple of 4096 that add up to it"),
        ({}, tuple(replace(t, dtype="int64") for t in TWO), "tensor 'b': codec int8 carries .*, not int64"),
        ({"codec": "powersgd"}, TWO, "tensor 'b': codec powersgd.* does not cut tensors, but 2 parts are planned"),
    ],
)
def test_a_plan_for_other_tensors_is_refused_naming_one(change: dict[str, Any], tensors: tuple[TensorSpec, ...], said: str) -> None:
    with pytest.raises((UsageError, CodecError), match=said):
        laid_out(declared(changed(**change), tensors))


def test_a_tensor_without_elements_need_not_be_planned() -> None:
    layout = laid_out(declared(PLAN, (*TWO, TensorSpec("empty", (0, 5), "float32"))))
    assert Counter(i for bucket in layout.buckets for i in bucket.tensors) == {0: 1, 1: 1}


def test_a_declaration_whose_buckets_leave_a_tensor_out_is_refused() -> None:
    with pytest.raises(UsageError, match="tensor 'b' is in no bucket of the plan"):
        laid_out(Declaration("m", "plan", TWO, "none", True, buckets=(BucketSpec((0,), "none", 0, 1),)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": "onebit"}, r"codec of the plan's bucket 0 \(of 'b'\) on rank 0 is int8, on rank 3 it is onebit"),
        ({"parts": 1}, r"parts of the plan's bucket 0 \(of 'b'\) on rank 0 is 2, on rank 3 it is 1"),
        ({"priority": 7}, r"priority of the plan's bucket 0 \(of 'b'\) on rank 0 is 0, on rank 3 it is 7"),
        ({"option": ON_GPUS[0]}, r"device of the plan's bucket 0 \(of 'b'\) on rank 0 is cpu, on rank 3 it is gpu"),
        ({"servers": (1, 1)}, r"servers of the plan's bucket 0 \(of 'b'\) on rank 0 is \(\), on rank 3 it is \(1, 1\)"),
        ({"tensors": ("a", "b")}, r"tensors of the plan's bucket 0 .* is \['b', 'a'\], on rank 3 it is \['a', 'b'\]"),
    ],
)
def test_ranks_with_different_plans_are_told_which_bucket_differs(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        compare(declared(PLAN, TWO, JobShape(2, 2)), 0, declared(changed(**change), TWO, JobShape(2, 2)), 3)


def test_a_rank_without_the_plan_is_found_out() -> None:
    with pytest.raises(LayoutMismatch, match="the number of the plan's buckets on rank 0 is 1, on rank 1 it is 0"):
        compare(declared(PLAN, TWO), 0, replace(declared(PLAN, TWO), buckets=()), 1)


def test_servers_behind_sums_within_nodes_are_carried_with_each_parts_server(tmp_path: Path) -> None:
    """Each part's keys lie on the server that the plan names for it."""
    path = tmp_path / "plan.json"
    chosen = Plan("m", "c", (PlannedBucket(("b", "a"), 9003, 2, 0, "int8", ENCODED_NODES, servers=(1, 0)),), shape=JobShape(3, 2))
    path.write_text(json.dumps(chosen.to_json()))
    plan = load_runnable(str(path))
    layout = build_layout(declared(plan, TWO, JobShape(3, 2)), layout_id=1, servers=2, workers=3, ranks=Ranks((1, 2)))
    (bucket,) = layout.buckets
    assert bucket.option == ENCODED_NODES
    assert [(key.server, key.contributors) for key in bucket.keys] == [(1, (0, 1)), (0, (0, 2))], "each part has another root"
    assert plan_of(layout, 2).buckets[0].servers == (1, 0)
    other = replace(chosen, buckets=(replace(chosen.buckets[0], codec="shared"),))
    path.write_text(json.dumps(other.to_json()))
    with pytest.raises(UsageError, match="codec shared runs where every rank pushes all to servers"):
        load_runnable(str(path))
