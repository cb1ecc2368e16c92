"""Questions to the closed model in a JSON file, and their answers against what is expected: ``psgc whatif --cases``.

    {"cases": [{"id", "quantity", "inputs": {...}, "expect": {"op": "approx|between|lt|gt", ...}}]}

Owns the file's shape and its errors, which name the case and the field. Inputs are of one or two scenarios (``run``, or ``sync`` and
``method``, or ``a`` and ``b``), of one scenario spread out (``hide_ratio``), or ``model`` and ``rank``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from psgc.errors import UsageError
from psgc.plan.inputs.architectures import architecture
from psgc.plan.whatif.closed_form import (
    METHODS,
    Scenario,
    crossover_gbps,
    encode_budget_ms,
    hide_ratio,
    overhead_pct,
    powersgd_bytes,
    reduction_pct,
    speedup,
    time_ms,
)

# a scenario's fields as the file calls them
FIELDS: Final = {
    "method": "method", "t_backward_ms": "backward_ms", "gpus": "gpus", "bw_gbps": "bandwidth_gbps", "grad_bytes": "grad_bytes",
    "encode_decode_ms": "encode_ms", "alpha_us": "alpha_us", "gamma": "gamma", "bucket_mib": "bucket_mib", "ratio": "ratio",
    "P_bytes": "p_bytes", "Q_bytes": "q_bytes", "k_frac": "k_fraction", "idx_bytes": "index_bytes",
}  # fmt: skip
COMMON: Final = ("t_backward_ms", "gpus")
NEEDED: Final = {
    "sync": ("grad_bytes",), "sync_no_overlap": ("grad_bytes",), "sync_compressed": ("grad_bytes", "ratio"),
    "powersgd": ("encode_decode_ms", "P_bytes", "Q_bytes"), "mstopk": ("encode_decode_ms", "grad_bytes", "k_frac"),
    "signsgd": ("encode_decode_ms", "grad_bytes"),
}  # fmt: skip
WHICH: Final = ("P_bytes", "Q_bytes", "total_bytes")


def run_cases(document: Any) -> dict[str, Any]:
    """Answers to a file of cases. Raises UsageError naming the case and the field that are wrong."""
    if not isinstance(document, Mapping) or not isinstance(document.get("cases"), list):
        raise UsageError('cases: expected an object with a list "cases"')
    answers: list[dict[str, Any]] = []
    for number, case in enumerate(document["cases"]):
        name = str(case.get("id", f"number {number}")) if isinstance(case, Mapping) else f"number {number}"
        try:
            answers.append(_answer(name, case))
        except UsageError as error:
            raise UsageError(f"case {name}: {error}") from None
    passed = sum(answer["pass"] for answer in answers)
    return {"cases": answers, "passed": passed, "failed": len(answers) - passed}


def _answer(name: str, case: Any) -> dict[str, Any]:
    if not isinstance(case, Mapping):
        raise UsageError("expected an object")
    inputs, quantity = case.get("inputs"), case.get("quantity")
    if not isinstance(inputs, Mapping):
        raise UsageError("field inputs: expected an object")
    ask = _QUANTITIES.get(quantity) if isinstance(quantity, str) else None
    if ask is None:
        raise UsageError(f"field quantity: {quantity!r} is none of {', '.join(_QUANTITIES)}")
    value = ask(inputs)
    return {
        "id": name, "quantity": quantity, "value": value if math.isfinite(value) else None, "pass": meets(case.get("expect"), value),
    }  # fmt: skip


def meets(expect: Any, value: float) -> bool:
    """Whether a value is as expected. Without a tolerance, ``approx`` allows a relative error of 1e-6, for rounding."""
    if not isinstance(expect, Mapping):
        raise UsageError("field expect: expected an object")
    op = expect.get("op")
    if op == "between":
        return _number(expect, "lo", "expect.") <= value <= _number(expect, "hi", "expect.")
    if op not in ("approx", "lt", "gt"):
        raise UsageError(f"field expect.op: {op!r} is none of approx, between, lt, gt")
    wanted = _number(expect, "value", "expect.")
    if op == "lt":
        return value < wanted
    if op == "gt":
        return value > wanted
    relative = _number(expect, "tol_rel", "expect.") if "tol_rel" in expect else None
    absolute = _number(expect, "tol_abs", "expect.") if "tol_abs" in expect else None
    tolerance = (
        max((relative or 0.0) * abs(wanted), absolute or 0.0) if relative is not None or absolute is not None else 1e-6 * abs(wanted)
    )
    return abs(value - wanted) <= tolerance


def scenario_of(inputs: Any, place: str, *, method: str | None = None, needs_bandwidth: bool = True) -> Scenario:
    """The scenario that an object describes. Raises UsageError naming the field."""
    if not isinstance(inputs, Mapping):
        raise UsageError(f"field {place}: expected an object")
    named = inputs.get("method", method)
    if not isinstance(named, str) or named not in METHODS:
        raise UsageError(f"field {place}.method: {named!r} is none of {', '.join(METHODS)}")
    unknown = sorted(set(inputs) - set(FIELDS))
    if unknown:
        raise UsageError(f"field {place}.{unknown[0]}: unknown; expected one of {', '.join(FIELDS)}")
    values: dict[str, Any] = {"method": named, "bandwidth_gbps": None}
    for field in (*COMMON, *NEEDED[named], *(("bw_gbps",) if needs_bandwidth else ())):
        if inputs.get(field) is None:
            raise UsageError(f"field {place}.{field}: missing, and {named} needs it")
    for field, value in inputs.items():
        if field == "method" or value is None:
            continue
        values[FIELDS[field]] = _number(inputs, field, f"{place}.")
    if values["gpus"] != int(values["gpus"]):
        raise UsageError(f"field {place}.gpus: {inputs['gpus']!r} is no whole number")
    values["gpus"] = int(values["gpus"])
    try:
        return Scenario(**values)
    except UsageError as error:
        text = str(error)
        names = {ours: theirs for theirs, ours in FIELDS.items()}
        ours = text.partition(" ")[0]
        raise UsageError(f"field {place}.{names.get(ours, ours)}: {text.partition(' ')[2]}") from None


def _number(inputs: Mapping[str, Any], field: str, place: str) -> float:
    value = inputs.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"field {place}{field}: {value!r} is no finite number")
    return float(value)


def _pair(inputs: Mapping[str, Any], first: str, second: str, *, needs_bandwidth: bool = True) -> tuple[Scenario, Scenario]:
    return tuple(  # type: ignore[return-value]
        scenario_of(inputs.get(side), f"inputs.{side}", needs_bandwidth=needs_bandwidth) for side in (first, second)
    )


def _model_bytes(inputs: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Bytes of the gradient, of all P, of all Q, and of the tensors that are sent uncompressed."""
    name = inputs.get("model")
    if not isinstance(name, str):
        raise UsageError(f"field inputs.model: {name!r} is no model's name")
    try:
        model = architecture(name)
    except UsageError as error:
        raise UsageError(f"field inputs.model: {error}") from None
    rank = _number(inputs, "rank", "inputs.")
    if rank < 1 or rank != int(rank):
        raise UsageError(f"field inputs.rank: {inputs['rank']!r} is no whole number of at least 1")
    return 4 * model.numel, *powersgd_bytes([weight.shape for weight in model.weights], int(rank))


def _compression_ratio(inputs: Mapping[str, Any]) -> float:
    whole, p, q, plain = _model_bytes(inputs)
    return whole / (p + q + plain)


def _payload_bytes(inputs: Mapping[str, Any]) -> float:
    which = inputs.get("which", "total_bytes")
    if which not in WHICH:
        raise UsageError(f"field inputs.which: {which!r} is none of {', '.join(WHICH)}")
    _, p, q, _ = _model_bytes(inputs)
    return float({"P_bytes": p, "Q_bytes": q, "total_bytes": p + q}[which])


def _run(inputs: Mapping[str, Any]) -> Scenario:
    return scenario_of(inputs.get("run"), "inputs.run")


def _compared(inputs: Mapping[str, Any], first: str, second: str, divisor: str) -> tuple[Scenario, Scenario]:
    """The pair, of which ``divisor``'s time is divided by. Raises UsageError if that is 0."""
    pair = _pair(inputs, first, second)
    _check_takes_time(time_ms(pair[(first, second).index(divisor)]), f"inputs.{divisor}")
    return pair


def _overhead(inputs: Mapping[str, Any]) -> float:
    run = _run(inputs)
    _check_takes_time(run.gamma * run.backward_ms, "inputs.run")
    return overhead_pct(run)


def _check_takes_time(ms: float, place: str) -> None:
    """Raise UsageError for a time of 0, which backward's is then, too."""
    if not ms:
        raise UsageError(
            f"field {place}.t_backward_ms: is 0, and this quantity divides by a time that is then 0; expected a number above 0"
        )


_QUANTITIES: Final[dict[str, Any]] = {
    "time_ms": lambda inputs: time_ms(_run(inputs)),
    "reduction_pct": lambda inputs: reduction_pct(*_compared(inputs, "sync", "method", "sync")),
    "speedup": lambda inputs: speedup(*_compared(inputs, "sync", "method", "method")),
    "ratio_a_over_b": lambda inputs: speedup(*_compared(inputs, "a", "b", "b")),  # t(a) / t(b)
    "crossover_gbps": lambda inputs: crossover_gbps(*_pair(inputs, "sync", "method", needs_bandwidth=False)),
    "payload_bytes": _payload_bytes,
    "compression_ratio": _compression_ratio,
    "hide_ratio": lambda inputs: hide_ratio(scenario_of(inputs.get("run", inputs), "inputs", method="sync")),
    "overhead_over_gammaT_pct": _overhead,
    "encode_budget_ms": lambda inputs: encode_budget_ms(*_pair(inputs, "sync", "method")),
}
