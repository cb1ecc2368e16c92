"""One rank's values for all: parameters, optimizer state, any object. A broadcast copies bytes; it is not a sum with zeros."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.errors import UsageError
from psgc.layout import Declaration, TensorSpec
from psgc.torch.api import current_session
from psgc.torch.buffers import GradientBucket, as_array, spec_of

HEAD_BYTES: Final = 4096  # the first packet of an object: its length, and as much of it as fits
CHUNK_BYTES: Final = 1 << 20  # the packets after it; keys of fixed size keep the servers' memory bounded
LENGTH_BYTES: Final = 8


class _Tensors(GradientBucket):
    """A bucket of plain tensors: their values instead of their gradients."""

    def load(self) -> NDArray[Any]:
        flat = self._staging()
        for tensor, piece in self._pieces(flat):
            piece.view(tensor.shape).copy_(tensor.detach())
        return as_array(flat)

    def store(self, skipped: bool) -> None:
        with torch.no_grad():
            for tensor, piece in self._pieces(self._staging()):
                tensor.copy_(piece.view(tensor.shape))


class _Packet:
    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)

    def load(self) -> NDArray[Any]:
        return self.array

    def store(self, skipped: bool) -> None:
        """The bytes are where they are wanted."""


def broadcast_parameters(
    params: dict[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0, prefix: str = "Parameter."
) -> None:
    """Overwrite the tensors with ``root_rank``'s, in place. ``params``: a state_dict, or named tensors; what is no tensor is left out."""
    pairs = list(params.items() if isinstance(params, dict) else params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError("broadcast_parameters takes a state_dict or (name, tensor) pairs, e.g. model.named_parameters()")
    named = [(name, tensor) for name, tensor in pairs if isinstance(tensor, torch.Tensor) and tensor.numel()]
    if not named:
        return
    session = current_session()
    _check_root(root_rank)
    specs = tuple(spec_of(f"{prefix}{name}", tensor) for name, tensor in named)
    # Another set of tensors under the same prefix is another layout.
    digest = hashlib.sha256(repr([(s.name, s.shape, s.dtype) for s in specs]).encode()).hexdigest()[:12]
    layout = session.declare(_declaration(f"broadcast:{prefix}{digest}.{root_rank}", specs, root_rank))
    tickets = []
    for bucket in layout.buckets:
        tensors: list[Any] = [named[i][1] for i in bucket.tensors]
        tickets.append(session.submit(layout, bucket.index, _Tensors(tensors, "none", bucket.dtype), skip=session.rank != root_rank))
    session.wait(tickets)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """``root_rank``'s object on every rank. Pickled: ranks trust each other; servers only see bytes. Any size, bounded server memory."""
    session = current_session()
    _check_root(root_rank)
    name = name or "object"
    data = pickle.dumps(obj) if session.rank == root_rank else b""
    room = HEAD_BYTES - LENGTH_BYTES
    head = _Packet(HEAD_BYTES)
    head.array[:LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(LENGTH_BYTES, "little"), np.uint8)
    head.array[LENGTH_BYTES : LENGTH_BYTES + len(data[:room])] = np.frombuffer(data[:room], np.uint8)
    _exchange(head, f"{name}.head", root_rank)
    length = int.from_bytes(head.array[:LENGTH_BYTES].tobytes(), "little")
    pieces = [head.array[LENGTH_BYTES : LENGTH_BYTES + min(length, room)].tobytes()]
    for start in range(room, length, CHUNK_BYTES):
        chunk = _Packet(CHUNK_BYTES)
        part = data[start : start + CHUNK_BYTES]
        chunk.array[: len(part)] = np.frombuffer(part, np.uint8)
        _exchange(chunk, f"{name}.chunk", root_rank)
        pieces.append(chunk.array[: min(CHUNK_BYTES, length - start)].tobytes())
    return obj if session.rank == root_rank else pickle.loads(b"".join(pieces))


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, prefix: str = "Parameter.") -> None:
    """Give every rank ``root_rank``'s optimizer state and options. Works before the first step, when there is no state yet."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS keeps state that cannot be broadcast; use another optimizer")
    state = broadcast_object(_on_cpu(optimizer.state_dict()), root_rank, name=f"{prefix}optimizer")
    if current_session().rank != root_rank:
        optimizer.load_state_dict(state)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def _exchange(packet: _Packet, name: str, root: int) -> None:
    session = current_session()
    spec = TensorSpec(name, (len(packet.array),), "uint8")
    ticket = session.submit_named(_declaration(f"broadcast:{name}.{root}", (spec,), root), packet, skip=session.rank != root)
    session.wait([ticket])


def _declaration(name: str, specs: tuple[TensorSpec, ...], root: int) -> Declaration:
    return Declaration(name, "broadcast", specs, "none", mean=False, root=root)


def _check_root(root: int) -> None:
    if not 0 <= root < current_session().size:
        raise UsageError(f"root_rank={root}, but ranks go from 0 to {current_session().size - 1}")
