"""Broadcasts from one rank to all: parameters, optimizer state, objects. The root's bytes are copied, nothing is summed.

Between nodes, parameters and states travel only where ranks differ (``digests.py``). Owns the layouts that broadcasts use again and again, so that memory stays
bounded however often they are called.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch

from psgc.errors import UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.torch.session import api
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors import plain
from psgc.torch.tensors.apart import put_tensors, take_tensors
from psgc.torch.tensors.buffers import TensorsBuffer, dtype_name
from psgc.torch.tensors.declaring import declaration, spec_of
from psgc.torch.tensors.digests import ComparedTensors
from psgc.torch.tensors.rank_table import RankTable
from psgc.torch.tensors.sent import TensorExchange
from psgc.worker.session import ROOT_OF, Session

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
HEAD_BYTES: Final = 4096  # every object's first message: its length, and its beginning
CHUNK_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<Q")
_PLAIN: Final = b"\0"  # what an object's bytes begin with
_PICKLED: Final = b"\1"
_REFUSED: Final = b"\2"  # why the object is not sent follows, as text
INSTEAD: Final = "psgc.torch.Elastic gives all ranks rank 0's parameters and optimizer state; leave this call out"
BEGINNING_BYTES: Final = HEAD_BYTES - _LENGTH.size
MOST_LAYOUTS: Final = 16  # of some of a set's tensors, where the others are alike on all ranks

_calls: WeakKeyDictionary[Session, Counter[str]] = WeakKeyDictionary()  # by call and name
_known: WeakKeyDictionary[Session, dict[str, list[Any]]] = WeakKeyDictionary()  # see ``_number``


@uncompiled
def broadcast_parameters(params: NamedTensors, root_rank: int = 0, prefix: str = "Parameter.") -> None:
    """Overwrite every tensor with the root's. Between nodes only those travel that are not the same on all ranks, bit for bit.

    params: a ``state_dict()``, ``named_parameters()``, or any mapping or pairs of names and tensors, the same on every rank. None
    values are ignored. Raises UsageError for a value that is no tensor, LayoutMismatch if ranks differ, naming the first tensor.
    """
    given: Any = params
    if not isinstance(given, Iterable):
        raise UsageError(
            f"broadcast_parameters: expected (name, tensor) pairs, got a {type(given).__name__}; pass model.state_dict() or model.named_parameters()"
        )
    pairs = params.items() if isinstance(params, Mapping) else params
    named: list[tuple[str, torch.Tensor]] = []
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError(f"broadcast_parameters: expected (name, tensor) pairs, got {type(pair).__name__}; pass named_parameters()")
        name, value = pair
        if not isinstance(name, str):
            raise UsageError(f"broadcast_parameters: the name {name!r} is a {type(name).__name__}, expected text; pass named_parameters()")
        if value is not None and not isinstance(value, torch.Tensor):
            raise UsageError(f"broadcast_parameters: {name!r} is a {type(value).__name__}, not a tensor; send it with broadcast_object")
        if value is not None:
            named.append((name, value))
    refuse_replaceable(_checked_root(root_rank), "broadcast_parameters", INSTEAD)
    _agree_on_root(_checked_root(root_rank), f"broadcast_parameters.{prefix}", root_rank, "broadcast_parameters")
    broadcast_tensors(named, root_rank, prefix)


@uncompiled
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, prefix: str = "Parameter.", allow_pickle: bool = False
) -> None:
    """Give every rank the root's ``optimizer.state_dict()``: options and state, in its dtypes, also where a rank has no state yet.

    Tensors travel as broadcasts, the rest as an object (see ``broadcast_object``, also on allow_pickle).
    """
    check_optimizer(optimizer, "broadcast_optimizer_state")
    refuse_replaceable(api.current_session(), "broadcast_optimizer_state", INSTEAD)
    _broadcast_optimizer(api.current_session(), optimizer, root_rank, prefix, allow_pickle)


def _broadcast_optimizer(session: Session, optimizer: torch.optim.Optimizer, root_rank: int, prefix: str, allow_pickle: bool) -> None:
    own: list[torch.Tensor] = []
    skeleton: Any = take_tensors(optimizer.state_dict(), own)
    for index, tensor in enumerate(own):  # before any rank waits for another
        dtype_name(tensor, f"broadcast of the optimizer's state, tensor {index}")
    skeleton = _broadcast_object(session, skeleton if session.rank == root_rank else None, root_rank, f"{prefix}optimizer", allow_pickle)
    tensors, state = own, None
    if session.rank != root_rank:
        tensors = []
        state = put_tensors(skeleton, tensors)
        if _compares(session):
            _fill(tensors, own)
    named = [(f"state.{index}", tensor) for index, tensor in enumerate(tensors)]
    broadcast_tensors(named, root_rank, f"{prefix}optimizer.")
    if state is not None:
        load_optimizer(optimizer, state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``load_state_dict`` of what another rank's ``state_dict()`` has given, bit for bit. torch casts state to its parameter's dtype: master weights in float32
    beside a model in bfloat16 would be rounded on all ranks but one."""
    optimizer.load_state_dict(dict(state))
    given = state.get("state")
    if not isinstance(given, dict):
        return  # a state_dict() of its own kind
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state.get("param_groups", ()) for number in group.get("params", ())]
    sent = [
        (number, parameter)
        for number, parameter in zip(numbers, parameters, strict=False)
        if number in given and parameter in optimizer.state
    ]
    if any(_has_another_dtype(given[number], parameter) for number, parameter in sent):
        told = optimizer.state_dict()["state"]
        for number, parameter in sent:
            optimizer.state[parameter] = _as_sent(given[number], optimizer.state[parameter], told.get(number))


def _has_another_dtype(sent: Any, parameter: torch.Tensor) -> bool:
    found: list[torch.Tensor] = []
    take_tensors(sent, found)
    return any(tensor.dtype != parameter.dtype for tensor in found)


def _as_sent(sent: Any, held: Any, told: Any) -> Any:
    """What the optimizer holds, with tensors as they were sent. What ``state_dict()`` converts stays as it was loaded: told is not what is held."""
    if isinstance(sent, dict) and isinstance(held, dict) and isinstance(told, dict):
        held.update({key: _as_sent(sent[key], held[key], told[key]) for key in sent if key in held and key in told})
    elif type(sent) in (list, tuple) and type(sent) is type(held) is type(told) and len(sent) == len(held) == len(told):
        return type(sent)(map(_as_sent, sent, held, told))
    elif type(sent) is type(held) is torch.Tensor and told is held:
        return sent.to(held.device)
    return held


def _fill(tensors: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
    """Begin with what this rank has in the same places, which need not travel if the root has the same."""
    for tensor, mine in zip(tensors, own, strict=False):
        if tensor.shape == mine.shape and tensor.dtype == mine.dtype:
            tensor.copy_(mine)


def broadcast_from_root(model: torch.nn.Module, optimizer: torch.optim.Optimizer, prefix: str) -> None:
    """Give every rank rank 0's parameters, buffers and optimizer state, before the first step. Once in a job. Buffers that are not saved, too, which
    ``state_dict()`` leaves out; what modules save besides tensors is each rank's own."""
    session = _checked_root(0)
    broadcast_tensors(list(first_values(model).items()), 0, prefix)
    _broadcast_optimizer(session, optimizer, 0, prefix, False)


def first_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of which rank 0's are to be everyone's, by name. Of buffers that the module does not save (masks, tables), those that can
    travel: the others are as each rank has made them."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved or _can_be_written(buffer)}
    return {**dict(module.named_parameters()), **buffers}


def _can_be_written(buffer: torch.Tensor) -> bool:
    """Whether a broadcast can: one that psgc carries, no element of which lies where another does."""
    try:
        dtype_name(buffer, "")
    except UsageError:
        return False
    return all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


@uncompiled
def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, allow_pickle: bool = False) -> Any:
    """The root's object on every rank; what the others pass does not matter. The root gets its own object back.

    The object is of plain types (``psgc/torch/tensors/plain.py`` lists them: numbers, text, containers, tensors, arrays); tensors come back on the
    CPU. Anything else only with allow_pickle=True, or PSGC_ALLOW_PICKLE=1, on every rank: the object is then pickled, and unpickling runs whatever code the
    root, or whoever can alter what it sends, puts into it. Size may change from call to call. Raises UsageError on every rank for what is not plain, and on a
    rank that was sent a pickle and does not allow it.
    """
    session = _checked_root(root_rank)
    refuse_replaceable(session, "broadcast_object", INSTEAD)
    return _broadcast_object(session, obj, root_rank, name or "object", allow_pickle)


def _broadcast_object(session: Session, obj: Any, root_rank: int, name: str, allow_pickle: bool) -> Any:
    number = _number(session, f"object {name}", root_rank)
    is_root = session.rank == root_rank
    data = _written(obj, name, allow_pickle, session.config.allow_pickle) if is_root else b""
    _agree_on_root(session, f"broadcast_object.{name}", root_rank, "broadcast_object")
    head = bytearray(HEAD_BYTES)
    if is_root:
        _LENGTH.pack_into(head, 0, len(data))
        head[_LENGTH.size :] = data[:BEGINNING_BYTES].ljust(BEGINNING_BYTES, b"\0")
    own = bytes(head)
    _move(session, f"{name}.{number}.head", root_rank, HEAD_BYTES, head)
    _check_own(is_root, head == own, name, root_rank)
    (length,) = _LENGTH.unpack_from(head)
    rest = bytearray(data[BEGINNING_BYTES:]) if is_root else bytearray(max(0, length - BEGINNING_BYTES))
    _move(session, f"{name}.{number}.chunk", root_rank, CHUNK_BYTES, rest)
    whole = head[_LENGTH.size : _LENGTH.size + length] + rest
    _check_own(is_root, whole == data, name, root_rank)
    if whole[:1] == _REFUSED:
        refused = whole[1:].decode(errors="replace")
        raise UsageError(refused if is_root else f"rank {root_rank}: {refused}")
    return obj if is_root else _read(whole, root_rank, allow_pickle or session.config.allow_pickle)


def _check_own(is_root: bool, same: bool, name: str, root_rank: int) -> None:
    """Raise UsageError where the root's process has taken a dead one's place, whose object the other ranks have, and has another."""
    if is_root and not same:
        raise UsageError(
            f"broadcast of {name!r}: rank {root_rank} died once the others had this of it, and its next process has made another; start the job again, with a "
            f"script that makes the same each time"
        )


def _written(obj: Any, name: str, pickled: bool, may_pickle: bool) -> bytes:
    """What the root sends: the object, or why it is refused, so that the other ranks need not wait. pickled: whatever the object is. may_pickle: if it is not
    plain."""
    if pickled:
        return _PICKLED + pickle.dumps(obj)
    try:
        return _PLAIN + plain.encode(obj, name, "broadcast_object")
    except UsageError as error:
        return _PICKLED + pickle.dumps(obj) if may_pickle else _REFUSED + str(error).encode()


def _read(data: bytearray, root_rank: int, allow_pickle: bool) -> Any:
    """The object that ``data`` encodes. Raises UsageError for a pickle unless this rank allows pickles."""
    if data[:1] == _PLAIN:
        return plain.decode(memoryview(data)[1:])
    if not allow_pickle:
        raise UsageError(
            f"broadcast_object: rank {root_rank} sent a pickle, which is not read, for it can run code; pass allow_pickle=True "
            f"(or set PSGC_ALLOW_PICKLE=1) on every rank, or on none"
        )
    return pickle.loads(memoryview(data)[1:])


def check_optimizer(optimizer: Any, what: str) -> None:
    """Raise UsageError for what is no optimizer, such as its class or a model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise UsageError(f"{what}: the first argument is the optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1), but got {got}")


def refuse_lbfgs(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raise UsageError for an optimizer whose step evaluates the model again on its own."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(f"{what} does not work with LBFGS, which evaluates its closure several times a step; use another optimizer")


def _checked_root(root_rank: int) -> Session:
    session = api.current_session()
    if not 0 <= root_rank < session.size:
        raise UsageError(f"root_rank={root_rank}, but ranks are 0 to {session.size - 1}")
    return session


@uncompiled
def broadcast_tensors(named: Sequence[tuple[str, torch.Tensor]], root_rank: int, prefix: str, *, compare: bool = True) -> None:
    """As ``broadcast_parameters``, where all ranks are known to name the same root. compare: False, on every rank, for what nearly always differs."""
    session = _checked_root(root_rank)
    if not named:
        return
    tensors = [t.detach() for _, t in named]
    specs = tuple(spec_of(tensor, name, f"broadcast of {name!r}") for (name, _), tensor in zip(named, tensors, strict=True))
    whole = _declaration(session, f"broadcast.{prefix}{_number(session, f'tensors {prefix}', (specs, root_rank))}", specs, root_rank)
    travel: Sequence[int] = range(len(tensors))
    if compare and _compares(session):
        whole, travel = _differing(session, whole, tensors)
    if travel:
        TensorExchange(session, whole).run([tensors[index] for index in travel], skip=session.rank != root_rank)


def _differing(session: Session, whole: Declaration, tensors: Sequence[torch.Tensor]) -> tuple[Declaration, Sequence[int]]:
    """What is to be sent, the same on every rank: those of the tensors that differ between ranks, and their indices. All of them, where some differ and that
    would be one layout too many."""
    compared = ComparedTensors(session, whole.name, whole.tensors)
    compared.tell(tensors)
    session.declare(whole)  # while the digests travel; ranks that have other tensors are refused here
    differ = compared.differing()
    if len(differ) in (0, len(tensors)):
        return whole, differ
    few, name = tuple(whole.tensors[index] for index in differ), f"some of {whole.name}"
    known = _known[session].get(name, [])
    if few not in known and len(known) == MOST_LAYOUTS:
        return whole, range(len(tensors))
    return _declaration(session, f"{name} {_number(session, name, few)}", few, whole.root), differ


def _compares(session: Session) -> bool:
    """Whether ranks compare digests first, the same on all of them. On one node they do not: sending through shared memory costs less than digesting. Nor
    where a process may take a dead one's place, since it may begin with other tensors than the one whose digests were heard. Nor over BytePS's wire, whose
    tensors are numbered."""
    return session.between_nodes and session.config.wire == "psgc" and session.config.on_worker_loss == "stop"


def _declaration(session: Session, name: str, specs: tuple[TensorSpec, ...], root_rank: int) -> Declaration:
    return declaration(session, name, "broadcast", specs, "none", mean=False, root=root_rank)


def _number(session: Session, name: str, of: Any) -> int:
    """The number of this root, or of this set of tensors and its root, among those that the name has had so far: it is part of a layout's name. Counted rather
    than hashed, so that ranks that differ declare the same name, and the difference is found."""
    known = _known.setdefault(session, {}).setdefault(name, [])
    if of not in known:
        known.append(of)
    return known.index(of)


def _agree_on_root(session: Session, name: str, root_rank: int, call: str) -> None:
    """Raise UsageError, on every rank, if ranks name different roots. The first call of a name says so when it declares; later ones tell each other, since a
    rank may find all that it needs declared. To be called after what may be refused on one rank alone, which is then no call. BytePS's wire, whose tensors are
    numbered, has none of it."""
    calls = _calls.setdefault(session, Counter())
    calls[name] += 1
    if calls[name] == 1 or session.size == 1 or session.config.wire == "pslite":
        return
    table = RankTable(session, f"{ROOT_OF}{name}", 1)
    table.send(root_rank)
    first, *others = (int(root) for (root,) in table.rows())
    for rank, root in enumerate(others, 1):
        if root != first:
            raise UsageError(f"{call}: root_rank on rank 0 is {first}, on rank {rank} it is {root}; every rank must name the same")


def _move(session: Session, name: str, root_rank: int, message_bytes: int, data: bytearray) -> None:
    """Send ``data`` (on the root), or fill it, in messages of ``message_bytes``: one step of the key ``name`` each."""
    spec = TensorSpec(name, (message_bytes,), "uint8")
    wanted = _declaration(session, f"broadcast_object.{name}", (spec,), root_rank)
    padded = torch.zeros(-(-len(data) // message_bytes), message_bytes, dtype=torch.uint8)
    flat = padded.numpy().reshape(-1)
    flat[: len(data)] = np.frombuffer(data, np.uint8)
    tickets = []
    for message in padded:
        buffer = TensorsBuffer([(message_bytes,)], torch.uint8)
        buffer.bind([message])
        tickets.append(session.submit_named(wanted, buffer, skip=session.rank != root_rank))
    session.wait(tickets)
    data[:] = flat[: len(data)].tobytes()
