"""How an optimizer becomes one of psgc's: the same object, of a subclass of its own class. And the names of its parameters."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

import torch

from psgc.errors import UsageError
from psgc.layout import TensorSpec
from psgc.torch.tensors.declaring import spec_of

Addition = TypeVar("Addition", bound=torch.optim.Optimizer)


def refuse_replaced_step(optimizer: torch.optim.Optimizer, by: str) -> None:
    """Raise UsageError if the script has replaced the optimizer's own step(), which ``become`` would undo. A learning-rate scheduler's replacement is
    not meant: it only counts. by: the call that the optimizer was given to."""
    replaced = optimizer.__dict__.get("step")
    if hasattr(replaced, "_wrapped_by_lr_sched"):  # what the scheduler found there
        found = getattr(replaced, "__wrapped__", None)
        replaced = None if any(vars(kind).get("step") is found for kind in type(optimizer).__mro__) else found
    if replaced is not None:
        name = getattr(replaced, "__qualname__", type(replaced).__name__)
        raise UsageError(
            f"{by}: the script has replaced the optimizer's step() by {name}, which would be lost, as psgc puts its own there; replace it after this call"
        )


def refuse_copy(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise UsageError: for ``__getstate__`` of optimizers that exchange something, whose copy could only step without its job."""
    kind = type(optimizer).__name__
    raise UsageError(
        f"this {kind} is one of psgc's, and belongs to its process and job, so it is neither copied nor pickled; copy or save its state_dict(), and make and "
        f"wrap a new {kind} that loads it"
    )


def become(optimizer: torch.optim.Optimizer, addition: type[Addition]) -> Addition:
    """From now on ``addition`` is first in the method resolution order of the optimizer's class. See ``refuse_replaced_step``."""
    scheduled = optimizer.__dict__.pop("step", None)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (addition, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    if hasattr(scheduled, "_wrapped_by_lr_sched"):
        _satisfy_scheduler(optimizer)
    return cast("Addition", optimizer)


def named_parameters_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str] = MappingProxyType({})
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Parameter group, name, and parameter. Those that are not among ``names`` are called param.GROUP.INDEX."""
    for group, options in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(options["params"]):
            yield group, names.get(parameter) or f"param.{group}.{index}", parameter


def pairs_of(given: Any, taken: Iterable[str], group: int, by: str) -> list[tuple[str, Any]]:
    """The parameters of a new group, by the names that they are given with, in pairs, or by their places. given: a group's "params". taken: by other groups.
    Raises UsageError for a name that another has."""
    pairs, names = [], set(taken)
    for index, pair in enumerate([given] if isinstance(given, torch.Tensor) else given):
        name, parameter = pair if isinstance(pair, tuple) else (f"param.{group}.{index}", pair)
        if name in names:
            raise UsageError(f"{by}: two parameters are named {name!r}; give each its own name")
        names.add(name)
        pairs.append((name, parameter))
    return pairs


def refuse_no_parameters(given: Any, by: str) -> None:
    """Raise UsageError for what has no parameters to go through, such as a model or another optimizer. by: the argument, or the call that it was given to."""
    if not isinstance(given, Iterable):
        raise UsageError(f"{by}: expected model.named_parameters(), got a {type(given).__name__}")


def parameter_spec(parameter: torch.Tensor, name: str, group: int = 0) -> TensorSpec:
    """group: of its optimizer's, where each needs buckets of its own."""
    return spec_of(parameter, name, f"parameter {name!r}", group)


def check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least 1")


def check_passes(passes: int) -> None:
    check_count("backward_passes_per_step", passes)


def trained(names: Mapping[torch.Tensor, str]) -> dict[torch.Tensor, str]:
    """Those that require a gradient now. Others stay as they are, of whatever dtype; should they require one later, they are looked at then."""
    return {parameter: name for parameter, name in names.items() if parameter.requires_grad}


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:  # fmt: skip
    """The name of each parameter of the optimizer. Raises UsageError unless ``named_parameters`` names each of them, once."""
    mine = {parameter: name for _, name, parameter in named_parameters_of(optimizer)}
    if named_parameters is None:
        return mine
    refuse_no_parameters(named_parameters, "named_parameters")
    pairs = list(named_parameters)
    if any(
        not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor))
        for pair in pairs
    ):
        raise UsageError("named_parameters: expected (name, parameter) pairs; pass model.named_parameters()")
    doubled = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if doubled:
        raise UsageError(f"named_parameters: {', '.join(map(repr, doubled[:3]))} named more than once; give each parameter its own name")
    given = {parameter: name for name, parameter in reversed(pairs)}
    unnamed = [place for parameter, place in mine.items() if parameter not in given]
    if unnamed:
        raise UsageError(f"named_parameters: {len(unnamed)} of the optimizer's parameters have no name, the first is {unnamed[0]}")
    foreign = [name for parameter, name in given.items() if parameter not in mine and parameter.requires_grad]
    if foreign:
        raise UsageError(
            f"named_parameters: {foreign[-1]!r} requires a gradient but is not in the optimizer, and so would not be averaged; "
            f"pass the names of this optimizer's parameters only"
        )
    return {parameter: given[parameter] for parameter in mine}


def _satisfy_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """A learning-rate scheduler made before had replaced the instance's step() by its own, which would apply without synchronizing;
    put ours there, marked and counted as schedulers expect."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None
        found._opt_called = True  # type: ignore[attr-defined]
        return type(found).step(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step
