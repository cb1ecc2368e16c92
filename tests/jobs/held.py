"""One process that pushes changes to held tensors under every rule, alone or in a job, and prints what comes of each push and each refusal. Run by tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

import psgc.torch as psgc
from psgc.errors import PsgcError

RULES = ("add", "average", "nesterov:lr=1,momentum=0.5", "delayed:learners=2,lr=1,momentum=0.5", "nesterov:lr=1,momentum=0.5,round=0")
FLOATS: list[dict[str, torch.Tensor]] = [
    {"w": torch.tensor([1.0, 2.0, -4.0]), "s": torch.tensor(2.0)},
    {"w": torch.tensor([1.0, 0.0, 0.5], dtype=torch.bfloat16)},
    {"s": torch.tensor(1, dtype=torch.int16)},
    {},
    {"w": torch.ones(3, dtype=torch.float64, requires_grad=True), "s": torch.tensor(-1.0)},
]


def lists(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in values.items()}


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except PsgcError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def diloco() -> list[float]:
    """Of a training whose outer momentum is saved after two rounds, and goes on in another one."""
    states = list[Any]()
    for _ in ("first", "resumed"):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer: Any = psgc.DiLoCo(model, inner, every=1, on="servers", outer="nesterov:lr=1,momentum=0.5")
        if states:
            outer.load_state_dict(states[0])
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            outer.step()
        states.append(outer.state_dict())
    return model.weight.flatten().tolist()


def main() -> None:
    psgc.init()
    found: dict[str, Any] = {}
    for number, rule in enumerate(RULES):
        held = psgc.HeldTensors({"w": torch.tensor([1.0, 2.0, 3.0]), "s": torch.tensor(0.0)}, f"floats{number}", rule)
        found[rule] = [lists(held.push_pull(changes)) for changes in FLOATS] + [lists(held.pull())]
    held = psgc.HeldTensors({"i": torch.tensor([100, 7], dtype=torch.int8)}, "whole")
    found["integers"] = [lists(held.push_pull({"i": torch.tensor(change)})) for change in ([100, 1], [300, -1])]
    held = psgc.HeldTensors({"w": torch.ones(3), "i": torch.zeros(2, dtype=torch.int64)}, "checked")
    found["told"] = {
        what: told(lambda change=change: held.push_pull(change))  # type: ignore[misc]
        for what, change in {
            "name": {"x": torch.ones(3)},
            "shape": {"w": torch.ones(1)},
            "scalar": {"w": torch.tensor(1.0)},
            "fraction": {"i": torch.tensor([0.5, 1.0])},
            "complex": {"w": torch.ones(3, dtype=torch.complex64)},
            "sparse": {"w": torch.ones(3).to_sparse()},
            "list": {"i": torch.ones(2, dtype=torch.int64), "w": [1.0, 2.0, 3.0]},
        }.items()
    }
    found["after"] = lists(held.push_pull({}))
    for codec in ("powersgd", "onebit/int8", "onebitt"):
        found["told"][codec] = told(lambda codec=codec: psgc.HeldTensors({"w": torch.ones(3)}, "again", compression=codec))  # type: ignore[misc]
    found["again"] = lists(psgc.HeldTensors({"w": torch.ones(3)}, "again").values)
    found["momentum"] = diloco()
    print("found", json.dumps(found), flush=True)
    psgc.shutdown()


main()
