"""What a member costs the scheduler, and a contribution a server, does not grow with their number. Counted in lines of Python, which no load changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.server.state import Fold, ServerState, specs_of
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import Declare
from psgc.wire.reports import Report
from tests.scheduler.talk import Job, declaration, register, sent

FEW, MANY = 64, 512
ALLOWED = 1.2  # of what one of few costs
JOB, EPOCH = 1, 1


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of Python ``work`` runs; each turn of a comprehension is one, too."""
    count = 0

    def each(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def registrations(size: int) -> float:
    job = Job(size, 1)

    def work() -> None:
        job.join("s0", register("server"))
        for node in range(size):
            job.join(f"w{node}", register(node=node))

    lines = lines_of(work)
    assert job.membership.roster.complete
    return lines / size


def joined(size: int) -> Job:
    job = Job(size, 1)
    job.join("s0", register("server"))
    for node in range(size):
        job.join(f"w{node}", register(node=node))
    return job


def barriers(size: int) -> float:
    job = joined(size)
    actions: list[Any] = []
    lines = lines_of(lambda: [actions.extend(job.say(f"w{node}", Kind.BARRIER, step=1)) for node in range(size)])
    assert len(sent(actions, Kind.BARRIER)) == size
    return lines / size


def heartbeats(size: int) -> float:
    job = joined(size)
    report = Report(1, 1)

    def work() -> None:
        for beat in range(4):
            for node in range(size):
                job.say(f"w{node}", Kind.HEARTBEAT, step=beat * 10 + node)
                job.say(f"w{node}", Kind.REPORT, report)

    return lines_of(work) / (4 * size)


def declarations(size: int) -> float:
    job, declared = joined(size), declaration()
    digest = Declare(declared.name, declared.digest(), ())

    def work() -> None:
        for node in range(1, size):
            job.say(f"w{node}", Kind.DECLARE, digest, plan=1)

    return lines_of(work) / size


def waits(size: int) -> float:
    """Ticks while one is missing."""
    job = Job(size, 1)
    for node in range(size):
        job.join(f"w{node}", register(node=node))
    job.run(3)
    return lines_of(lambda: job.run(30)) / size


def server_of(size: int, count: int = 3, connect: bool = True) -> tuple[ServerState, list[int]]:
    """A server of ``count`` keys, to which everyone is connected; and the keys."""
    tensors = tuple(TensorSpec(f"t{i}", (16,), "float32") for i in range(count))
    layout = build_layout(
        Declaration("t", "plan", tensors, "none", True, used=tuple(range(count)), fuse_bytes=0), layout_id=1, servers=1, workers=size
    )
    state = ServerState(0, size, JOB, EPOCH)
    state.register(layout, *specs_of(layout, 0, size))
    for rank in range(size if connect else 0):
        state.joined(f"peer {rank}", rank)
    return state, [part.key for _, part in layout.parts()]


def push(state: ServerState, key: int, step: int, rank: int) -> list[Any]:
    header = Header(Kind.PUSH, Flag.WANT_RESULT, JOB, EPOCH, 1, key, step, 0, 0, rank, 0, 1.0, 64)
    return state.receive(f"peer {rank}", header, b"", 0.0)


def ticks(size: int) -> float:
    """Of a server, while keys await ranks."""
    state, keys = server_of(size)
    for key in keys:
        push(state, key, 1, 0)
    return lines_of(lambda: [state.tick(float(second)) for second in range(4)])


def contributions(size: int) -> float:
    """Two steps of three keys."""
    state, keys = server_of(size)
    results = 0

    def carry_out(effects: list[Any]) -> None:
        nonlocal results
        for effect in effects:
            if isinstance(effect, Fold):
                carry_out(state.folded(effect.key, effect.last, 64, False, effect.slot, 0.0))
            elif effect.__class__.__name__ == "Send":
                results += effect.header.kind == Kind.RESULT

    def work() -> None:
        for step in (1, 2):
            for key in keys:
                for rank in reversed(range(size)):
                    carry_out(push(state, key, step, rank))

    lines = lines_of(work)
    assert results == 2 * len(keys) * size
    return lines / (2 * len(keys) * size)


@pytest.mark.parametrize(
    "cost", [registrations, barriers, heartbeats, declarations, waits, contributions, ticks], ids=lambda cost: cost.__name__
)
def test_what_one_of_many_costs_is_what_one_of_few_costs(cost: Callable[[int], float]) -> None:
    few, many = cost(FEW), cost(MANY)
    assert many <= ALLOWED * few, f"{few:.0f} lines for one of {FEW}, {many:.0f} for one of {MANY}"


def test_a_ranks_first_connection_costs_the_same_however_many_keys_there_are() -> None:
    """All ranks come at once to a server's process that takes another's place, and has all of its keys."""
    few, many = (server_of(4, keys, connect=False)[0] for keys in (3, 300))
    assert lines_of(lambda: few.joined("peer 0", 0)) == lines_of(lambda: many.joined("peer 0", 0))


def test_on_a_new_connection_a_result_may_be_sent_again() -> None:
    state, (key, *_) = server_of(1)
    (fold,) = [effect for effect in push(state, key, 1, 0) if isinstance(effect, Fold)]
    state.folded(fold.key, fold.last, 64, False, fold.slot, 0.0)
    assert state.keys[key].state.queued == 1  # type: ignore[union-attr]
    state.joined("another peer", 0)
    assert state.keys[key].state.queued == 0  # type: ignore[union-attr]
