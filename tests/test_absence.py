"""A process that did not run (stopped, or its machine slept) takes that time for nobody's silence: no limit passes meanwhile."""

from __future__ import annotations

from psgc.layout import Declaration, TensorSpec, build_layout
from psgc.processes.absence import AWAY_S, Absence, younger
from psgc.server.state import ServerState, specs_of
from psgc.wire.frames import Header, Kind
from psgc.worker.connections.reach import Reach
from tests.scheduler.talk import REGISTER_S, STEP_S, complete, declaration, logged, register, sent
from tests.scheduler.talk import Job as SchedulerJob

LIMIT_S = 30
ABSENT_S = 10_000.0


def test_a_late_tick_is_an_absence_and_a_busy_machines_is_not() -> None:
    absence = Absence(1.0)
    assert [absence.ended(now) for now in (5.0, 6.0, 7.0 + AWAY_S, 100.0)] == [0.0, 0.0, 0.0, 100.0 - 7.0 - AWAY_S]
    assert younger(5.0, 93.0, 100.0) == 98.0
    assert younger(99.0, 93.0, 100.0) == 100.0, "begun after it"


def test_a_servers_step_is_late_after_the_limit_of_time_in_which_the_server_ran() -> None:
    server = ServerState(0, 2, 1, 1, step_timeout_s=LIMIT_S)
    declared = Declaration("m", "adhoc", (TensorSpec("t", (10,), "float32"),), "none", True)
    layout = build_layout(declared, layout_id=1, servers=1, workers=2)
    server.register(layout, *specs_of(layout, 0, 2))
    server.joined("w0", 0)
    ((_, part),) = layout.parts()
    server.receive("w0", Header(Kind.SKIP, job=1, epoch=1, plan=1, key=part.key, step=1, sender=0), None, 0.0)
    faults = {float(now): server.tick(float(now))[1] for now in range(10)}
    faults |= {now + ABSENT_S: server.tick(now + ABSENT_S)[1] for now in range(10, 2 * LIMIT_S)}
    late = [now for now, found in faults.items() if found]
    assert late[0] == ABSENT_S + LIMIT_S + 1, "the second in which it was stopped counts for nobody"


def test_the_schedulers_limits_wait_for_it() -> None:
    job = complete(nodes=2)
    job.say("w0", Kind.BARRIER, step=1)
    job.declare("w0", declaration())
    job.tick(1)
    assert not sent(job.tick(ABSENT_S), Kind.ABORT), "nobody is dead or late"
    for _ in range(int(STEP_S) - 2):
        job.hear_everyone()
        assert not sent(job.tick(1), Kind.ABORT)
    assert "for 601 s, more than the limit" in logged(job.run(5))


def test_a_dead_workers_next_process_is_given_as_long_as_the_scheduler_ran() -> None:
    job = SchedulerJob(nodes=2)
    job.join("s0", register("server", index=0))
    for node in range(2):
        job.join(f"w{node}", register(node=node, incarnation=1))
    job.dead.add(register(node=1).pid)
    job.tick(1)
    assert "the others wait for the process that takes its place" in logged(job.tick(1))
    job.tick(ABSENT_S)
    for _ in range(int(REGISTER_S) - 2):
        job.hear_everyone()
        assert not sent(job.tick(1), Kind.ABORT)
    assert "died and was not started again within 300 s (PSGC_REGISTER_TIMEOUT_S)" in logged(job.run(5))


def test_registration_is_given_as_long_as_the_scheduler_ran() -> None:
    job = SchedulerJob()
    job.join("w0", register(node=0))
    job.tick(1)
    assert not sent(job.tick(ABSENT_S), Kind.ABORT)


def test_a_server_that_cannot_be_reached_is_given_as_long_as_the_worker_ran() -> None:
    for reached, breaks in ((False, 0), (True, 1), (True, 4)):
        reach = Reach(0, ["tcp://10.0.0.4:4000"], 0.0, 0.0, 5.0, float(LIMIT_S), float(LIMIT_S))
        if reached:
            for _ in range(breaks):
                reach.up(0)
                reach.down(0, 0.0)
        for now in (0.0, 0.25, ABSENT_S, ABSENT_S + 0.25):
            assert reach.tick(now, lambda _: "why")[1] is None
        times = [ABSENT_S + tick / 4 for tick in range(2, 8 * LIMIT_S)]
        given_up = next(now for now in times if reach.tick(now, lambda _: "why")[1])
        assert ABSENT_S + LIMIT_S - 1 <= given_up <= ABSENT_S + LIMIT_S + 1
