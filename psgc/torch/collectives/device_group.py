"""A group of ranks that each have a GPU of their own: what a lane's thread asks of it, and how it ends when the job does.

Collectives run on the group's stream, behind what ``compute`` has been given so far; the lane's thread sleeps until they are over, so that what it does next
is in the plan's order, and what other buckets have on ``compute`` never waits for links. A collective cannot end without all members; so the thread looks
whether the job has failed meanwhile, and aborts the library's communicator then, or when the step's time is over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch

from psgc.codecs.none import NoneCodec
from psgc.errors import GroupError, PsgcError, UsageError
from psgc.program.backends import Facts, backend_of
from psgc.program.checks import take_turn
from psgc.program.groups import Array
from psgc.torch.collectives.connecting import meeting_store, reason
from psgc.torch.device.collectives import DeviceCollectives, packed_bytes
from psgc.torch.device.elements import DeviceElements, HeldPayload
from psgc.torch.device.engine import Engine
from psgc.torch.device.launches import aligned
from psgc.torch.device.runtime import Event
from psgc.torch.device.sent import STATUS_BYTES, Sent
from psgc.transport.host import host_id
from psgc.worker.collectives.breaking import fail
from psgc.worker.device import bytes_of
from psgc.worker.session import Session

logger = logging.getLogger(__name__)
FIRST_SLEEP_S, MOST_SLEEP_S = 20e-6, 1e-3
CHECK_S: Final = 0.1  # how often a thread that waits looks whether the job has failed


class DeviceGroup:
    """See the module's text, and psgc.program.groups.DeviceGroup. process_group: of the members, on the engine's device."""

    def __init__(self, session: Session, members: tuple[int, ...], engine: Engine, process_group: Any) -> None:
        self.members, self.index = members, members.index(session.rank)
        self._session, self._engine, self._process_group = session, engine, process_group
        self._collectives = DeviceCollectives(engine, process_group, self.index, len(members))
        self._issuing = threading.Lock()
        self._ended = False

    def __str__(self) -> str:
        return f"group of ranks {', '.join(map(str, self.members))} on {self._engine.name}"

    def raw(self, device: object, lo: int, hi: int, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        assert isinstance(device, DeviceElements)
        if device.engine is not self._engine:  # a group connects one GPU of each member
            held = np.empty(hi - lo, NoneCodec(_name(device.slice(lo, hi).dtype)).array_dtype)
            device.to_host(lo, hi, held)
            self.raw_array(held, _name(device.slice(lo, hi).dtype), op, cuts, root, divisor)
            device.from_host(lo, hi, held)
            return
        self._reduce(op, device.slice(lo, hi), cuts, root, divisor)

    def raw_array(self, array: Array, dtype: str, op: str, cuts: Sequence[int] = (), root: int = 0, divisor: int = 1) -> None:
        on_device = self._engine.empty(array.size, getattr(torch, dtype))
        bits = array.nbytes // max(1, array.size) * 8
        self._engine.put(array.view(f"int{bits}"), on_device.view(getattr(torch, f"int{bits}")))
        self._reduce(op, on_device, cuts, root, divisor)
        array[:] = self._engine.fetch(on_device)

    def exchange(
        self, device: object, place: tuple[int, ...], op: str, outgoing: Sequence[Sequence[tuple[Any, int]]], coming: Sequence[Sequence[int]],
        root: int = 0,
    ) -> list[list[Any]]:  # fmt: skip
        assert isinstance(device, DeviceElements)
        if device.engine is not self._engine:  # a group connects one GPU of each member
            away = [[(bytes_of(payload), bound) for payload, bound in each] for each in outgoing]
            received = self.exchange(DeviceElements(self._engine, None, None, _no_elements), place, op, away, coming, root)
            return [[payload.to_host() for payload in each] for each in received]
        leaving = self._held(device, place, outgoing)
        sizes = [[aligned(STATUS_BYTES + bound) for bound in bounds] for bounds in coming]
        totals, own, collectives = [sum(each) for each in sizes], leaving[self.index], self._collectives
        if op == "all_gather":
            largest = max(packed_bytes(own), *totals)
            incoming, starts = device.room(place, len(totals) * largest), [member * largest for member in range(len(totals))]
            work = partial(collectives.share, own, incoming)
        elif op == "broadcast":
            incoming, starts = device.room(place, totals[root]), [0] * len(totals)
            work = partial(collectives.hand_out, own, incoming, root)
        else:
            incoming, starts = device.room(place, sum(totals)), [0, *accumulate(totals)]
            others = [[] if member == self.index else each for member, each in enumerate(leaving)]
            work = partial(collectives.exchange, others, incoming, totals)
        self._run(f"{op} of payloads", work)
        found: list[list[Any]] = []
        for start, bounds, each in zip(starts, coming, sizes, strict=False):
            places = [start + before for before in accumulate([0, *each])]
            memory = [incoming[at : at + STATUS_BYTES + bound] for at, bound in zip(places, bounds, strict=False)]
            found.append([HeldPayload(self._engine, Sent(one)) for one in memory])
        return found

    def _held(
        self, device: DeviceElements, place: tuple[int, ...], outgoing: Sequence[Sequence[tuple[Any, int]]]
    ) -> list[list[torch.Tensor]]:
        """The payloads on this rank's GPU; each is brought there once, whichever members it is for."""
        brought: dict[int, torch.Tensor] = {}
        for payload, bound in (one for each in outgoing for one in each):
            if id(payload) not in brought:
                brought[id(payload)] = device.held(payload, bound, (*place, len(brought)))
        return [[brought[id(payload)] for payload, _ in each] for each in outgoing]

    def abort(self) -> None:
        """End what is under way on this group, from any thread: it raises, and so does whatever comes later."""
        self._ended = True
        with contextlib.suppress(RuntimeError):
            self._process_group.abort()

    def close(self) -> None:
        """Leave the group, which must be idle on this rank."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(RuntimeError):
                self._process_group.shutdown()

    def _reduce(self, op: str, flat: torch.Tensor, cuts: Sequence[int], root: int, divisor: int) -> None:
        self._run(f"{op} of {flat.numel()} {_name(flat.dtype)}", self._work(op, flat, cuts, root, divisor))

    def _run(self, what: str, work: Callable[[], None]) -> None:
        """Issue one collective and wait until it is over. Raises the error that ended the job, else GroupError."""
        take_turn(self._issuing, self, what)
        failure: RuntimeError | None = None
        try:
            if self._ended:
                raise UsageError(f"{self} is closed, but {what} was asked of it")
            self._collectives.stream.wait(self._engine.compute.record())
            work()
            done = self._collectives.stream.record()
            self._wait(done)
            self._engine.compute.wait(done)
        except RuntimeError as error:
            failure = error
            self.abort()
        finally:
            self._issuing.release()
        if failure is not None:
            fail(self._session, f"{what} in the {self}", reason(failure))

    def _work(self, op: str, flat: torch.Tensor, cuts: Sequence[int], root: int, divisor: int) -> Callable[[], None]:
        collectives = self._collectives
        return {
            "all_reduce": lambda: collectives.all_reduce(flat), "reduce": lambda: collectives.reduce(flat, root),
            "broadcast": lambda: collectives.broadcast(flat, root), "reduce_scatter": lambda: collectives.reduce_scatter(flat, cuts, divisor),
            "all_gather": lambda: collectives.all_gather(flat, cuts),
        }[op]  # fmt: skip

    def _wait(self, done: Event) -> None:
        """Sleep until the device has come to the event. Raises RuntimeError where it does not in a step's time, what ended the job where something has."""
        until, looked, sleep_s = time.monotonic() + self._session.config.step_timeout_s, time.monotonic(), FIRST_SLEEP_S
        while not done.query():
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, MOST_SLEEP_S)
            now = time.monotonic()
            if now - looked > CHECK_S:
                looked = now
                try:
                    self._session.check()
                except PsgcError:
                    self.abort()
                    raise
            if now > until:
                raise RuntimeError(f"some member has not come to it within {self._session.config.step_timeout_s:g} s")
        done.synchronize()


def _no_elements() -> torch.Tensor:
    raise AssertionError("a place for payloads has no elements")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def connected(session: Session, members: tuple[int, ...], engine: Engine, store: Any) -> DeviceGroup:
    """A group whose members have all been reached: they connect with the first collective, which is done here. Raises what the library raises."""
    index = members.index(session.rank)
    made = engine.runtime.process_group(store, index, len(members), 2 * session.config.step_timeout_s)
    try:
        group = DeviceGroup(session, members, engine, made)
        ones = engine.brought(np.ones(len(members), np.float32))
        group._collectives.stream.wait(engine.compute.record())
        group._collectives.all_reduce(ones)
        group._collectives.stream.record().synchronize()
        engine.compute.wait(group._collectives.stream.record())
        if engine.fetch(ones).tolist() != [float(len(members))] * len(members):
            raise GroupError("a first sum over the group is wrong")
    except BaseException:
        with contextlib.suppress(RuntimeError):
            made.abort()
        raise
    return group


def facts_of(session: Session, engine: Engine | None) -> Facts:
    """What this rank tells the others of where its gradients lie. engine: of their device, None for the CPU."""
    gpu, nccl = ("", "") if engine is None else (engine.runtime.gpu, engine.runtime.nccl)
    return Facts(host_id(), gpu, nccl, session.config.collectives, session.config.encrypt)


class GpuToGpu:
    """A ``Carrier``, by NCCL."""

    name, on_gpus = "gpu", True

    def takes(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> bool:
        session.publish(f"gpu {name}: {session.rank}", facts_of(session, engine).encode())
        told = {member: Facts.decode(bytes(session.lookup(f"gpu {name}: {member}"))) for member in members}
        backend = backend_of(told)
        where = "from GPU to GPU" if backend.on_device else "through the hosts' memory"
        logger.info("collectives of ranks %s go %s: %s", ", ".join(map(str, members)), where, backend.reason)
        return backend.on_device

    def connect(self, session: Session, members: tuple[int, ...], name: str, engine: Engine | None) -> DeviceGroup:
        assert engine is not None
        return connected(session, members, engine, meeting_store(session, members, f"store {name}"))
