"""The closed model: the equations by hand, the questions, and every way a file of cases can be wrong."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from psgc.errors import UsageError
from psgc.plan.whatif.cases import FIELDS, NEEDED, meets, run_cases
from psgc.plan.whatif.closed_form import (
    METHODS,
    Scenario,
    crossover_gbps,
    encode_budget_ms,
    hide_ratio,
    powersgd_bytes,
    speedup,
    time_ms,
)
from tests.plan.published import ANSWERS

SYNC = Scenario("sync", backward_ms=100, gpus=4, bandwidth_gbps=8, grad_bytes=60 * 2**20, alpha_us=50)
SIGN = Scenario("signsgd", backward_ms=100, gpus=4, bandwidth_gbps=8, grad_bytes=60 * 2**20, encode_ms=5)


def test_sync_is_max_of_backward_and_all_but_the_last_bucket_plus_that() -> None:
    # 8 Gbit/s are 1e6 bytes a ms; buckets of 25, 25 and 10 MiB; 2 * 3/4 of the bytes and 6 latencies of 0.05 ms each
    full, last = 0.3 + 1.5 * 25 * 2**20 / 1e6, 0.3 + 1.5 * 10 * 2**20 / 1e6
    assert time_ms(SYNC) == pytest.approx(max(1.07 * 100, 2 * full) + last)
    assert time_ms(replace(SYNC, bandwidth_gbps=0.8)) == pytest.approx(2 * (0.3 + 10 * (full - 0.3)) + 0.3 + 10 * (last - 0.3))
    assert time_ms(replace(SYNC, gpus=1)) == 100


def test_signsgd_gathers_a_bit_an_element_from_everyone() -> None:
    assert time_ms(SIGN) == pytest.approx(100 + 5 + 60 * 2**20 / 32 * 3 / 1e6)


def test_powersgd_sends_vectors_as_they_are_and_matrices_by_first_dimension() -> None:
    assert powersgd_bytes([(64, 3, 7, 7), (64,), (2, 5)], rank=4) == (4 * (64 * 4 + 2 * 2), 4 * (147 * 4 + 5 * 2), 4 * 64)


def test_the_crossover_is_where_both_take_as_long() -> None:
    sign = replace(SIGN, encode_ms=40)
    gbps = crossover_gbps(SYNC, sign)
    assert time_ms(SYNC.at(gbps)) == pytest.approx(time_ms(sign.at(gbps)), rel=1e-6)
    assert speedup(SYNC.at(gbps / 2), sign.at(gbps / 2)) > 1 > speedup(SYNC.at(gbps * 2), sign.at(gbps * 2))
    assert crossover_gbps(SYNC, SIGN) == math.inf  # it encodes in less than a backward loses to running beside communication
    assert crossover_gbps(SYNC, replace(SIGN, encode_ms=1e9)) == 0
    assert crossover_gbps(replace(SYNC, alpha_us=1e6), SIGN) == math.inf


def test_the_required_ratio_hides_all_but_the_last_bucket() -> None:
    slow = SYNC.at(1)
    ratio = hide_ratio(slow)
    hidden = replace(slow, method="sync_compressed", ratio=ratio)
    last = time_ms(replace(hidden, ratio=1e12)) - 1.07 * 100  # latency alone
    assert time_ms(hidden) == pytest.approx(1.07 * 100 + 1.5 * 10 * 2**20 / ratio / 1.25e5 + last)
    assert hide_ratio(SYNC.at(1e4)) == 1
    assert hide_ratio(replace(SYNC, alpha_us=1e6)) == math.inf


def test_the_encode_budget_is_what_would_make_both_equal() -> None:
    slow, method = SYNC.at(1), SIGN.at(1)
    assert time_ms(replace(method, encode_ms=encode_budget_ms(slow, method))) == pytest.approx(time_ms(slow))


def test_faster_computers_help_the_uncompressed_less() -> None:
    assert time_ms(SIGN.with_faster_compute(2)) == pytest.approx(time_ms(SIGN) - 105 / 2)
    slower = Scenario("powersgd", 100, 4, 8, encode_ms=10, p_bytes=1e6, q_bytes=1e6).with_faster_encode(2, 1.5)
    assert (slower.encode_ms, slower.p_bytes, slower.q_bytes) == (5, 3e6, 3e6)


def test_the_files_fields_are_the_scenarios() -> None:
    assert set(FIELDS.values()) == {field.name for field in fields(Scenario)}
    assert set(NEEDED) == set(METHODS)


def test_the_published_cases_come_out() -> None:
    if ANSWERS is None:
        pytest.skip("the published cases are not here: PSGC_ANSWERS names their folder")
    document = json.loads((ANSWERS / "public.json").read_text())
    result = run_cases(document)
    assert result["failed"] == 0
    for case, answer in zip(document["cases"], result["cases"], strict=True):
        assert answer["value"] == pytest.approx(case["reference_model_value"], abs=6e-5)


CASE: dict[str, Any] = {
    "id": "X1", "quantity": "time_ms", "expect": {"op": "approx", "value": 66.2, "tol_rel": 0.001},
    "inputs": {"run": {"method": "signsgd", "t_backward_ms": 50, "encode_decode_ms": 5, "grad_bytes": 64000000, "gpus": 8, "bw_gbps": 10}},
}  # fmt: skip
PAIR: dict[str, Any] = {"id": "X2", "quantity": "speedup", "expect": {"op": "gt", "value": 0}, "inputs": {"sync": CASE["inputs"]["run"]}}
MODEL: dict[str, Any] = {
    "id": "X3", "quantity": "compression_ratio", "expect": {"op": "gt", "value": 0}, "inputs": {"model": "resnet50", "rank": 4},
}  # fmt: skip

ALONE: dict[str, Any] = {"method": "sync", "t_backward_ms": 0, "grad_bytes": 64, "gpus": 1, "bw_gbps": 10}
OF_NO_TIME: dict[str, Any] = {
    "id": "X5", "quantity": "overhead_over_gammaT_pct", "expect": {"op": "gt", "value": 0},
    "inputs": dict.fromkeys(("run", "sync", "method", "a", "b"), ALONE),
}  # fmt: skip


def changed(case: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(case)
    *parents, last = path.split(".")
    target = made
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return made


def test_a_case_that_is_well_formed_is_answered() -> None:
    assert run_cases({"cases": [CASE, MODEL]})["passed"] == 2
    assert run_cases({"cases": [changed(CASE, "expect.value", 60)]})["failed"] == 1


def test_quantities_of_two_scenarios_are_as_they_are_named() -> None:
    slow = {"method": "sync", "t_backward_ms": 100, "grad_bytes": 400_000_000, "gpus": 8, "bw_gbps": 1}
    fast = slow | {"bw_gbps": 100}

    def value(quantity: str, inputs: dict[str, Any]) -> float:
        case = {"id": "X4", "quantity": quantity, "expect": {"op": "gt", "value": 0}, "inputs": inputs}
        return float(run_cases({"cases": [case]})["cases"][0]["value"])

    t_slow, t_fast = value("time_ms", {"run": slow}), value("time_ms", {"run": fast})
    assert t_slow > 5 * t_fast
    assert value("ratio_a_over_b", {"a": slow, "b": fast}) == pytest.approx(t_slow / t_fast)
    assert value("ratio_a_over_b", {"a": fast, "b": slow}) == pytest.approx(t_fast / t_slow)
    assert value("speedup", {"sync": slow, "method": fast}) == pytest.approx(t_slow / t_fast)
    assert value("reduction_pct", {"sync": slow, "method": fast}) == pytest.approx(100 * (1 - t_fast / t_slow))
    assert value("speedup", {"sync": ALONE, "method": fast}) == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (changed(CASE, "quantity", "weight"), "case X1: field quantity: 'weight' is none of time_ms"),
        (changed(CASE, "inputs", "x"), "case X1: field inputs: expected an object"),
        (changed(CASE, "inputs.run.method", "zip"), "case X1: field inputs.run.method: 'zip' is none of sync"),
        (changed(CASE, "inputs.run.gpus", None), "case X1: field inputs.run.gpus: missing"),
        (changed(CASE, "inputs.run.gpus", 2.5), "case X1: field inputs.run.gpus: 2.5 is no whole number"),
        (changed(CASE, "inputs.run.gpus", 0), "case X1: field inputs.run.gpus: is 0"),
        (changed(CASE, "inputs.run.bw_gbps", -1), "case X1: field inputs.run.bw_gbps: is -1.0"),
        (changed(CASE, "inputs.run.bw_gbps", "fast"), "case X1: field inputs.run.bw_gbps: 'fast' is no finite number"),
        (changed(CASE, "inputs.run.grad_bytes", -4), "case X1: field inputs.run.grad_bytes: is -4.0"),
        (changed(CASE, "inputs.run.speed", 4), "case X1: field inputs.run.speed: unknown"),
        (changed(CASE, "expect", None), "case X1: field expect: expected an object"),
        (changed(CASE, "expect.op", "near"), "case X1: field expect.op: 'near' is none of"),
        (changed(CASE, "expect.value", "x"), "case X1: field expect.value: 'x' is no finite number"),
        (PAIR, "case X2: field inputs.method: expected an object"),
        (changed(MODEL, "inputs.model", "alexnet"), "case X3: field inputs.model: unknown model 'alexnet'; choose one of vgg16"),
        (changed(MODEL, "inputs.rank", 0), "case X3: field inputs.rank: 0 is no whole number of at least 1"),
        (changed(CASE, "inputs.run.method", ["sync"]), "case X1: field inputs.run.method: ['sync'] is none of sync"),
        (
            changed(OF_NO_TIME, "inputs.run.gpus", 8),
            "case X5: field inputs.run.t_backward_ms: is 0, and this quantity divides by a time that is",
        ),
        (OF_NO_TIME | {"quantity": "reduction_pct"}, "case X5: field inputs.sync.t_backward_ms: is 0"),
        (OF_NO_TIME | {"quantity": "speedup"}, "case X5: field inputs.method.t_backward_ms: is 0"),
        (OF_NO_TIME | {"quantity": "ratio_a_over_b"}, "case X5: field inputs.b.t_backward_ms: is 0"),
        ("text", "case number 0: expected an object"),
    ],
)
def test_a_case_that_is_not_is_named_with_its_field(case: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_cases({"cases": [case]})
    assert words in str(caught.value)


def test_a_file_without_cases_is_refused() -> None:
    with pytest.raises(UsageError, match='expected an object with a list "cases"'):
        run_cases([])


def test_what_is_expected_is_compared_with_its_tolerance() -> None:
    assert meets({"op": "approx", "value": 100, "tol_abs": 2}, 101.9)
    assert not meets({"op": "approx", "value": 100, "tol_rel": 0.01}, 101.9)
    assert not meets({"op": "approx", "value": 100}, 100.01)
    assert meets({"op": "between", "lo": 1, "hi": 2}, 2)
    assert not meets({"op": "lt", "value": 2}, 2)
