"""A worker that calls every collective of its groups beside the script's own torch.distributed, or fails in one as its argument says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import torch
from torch import distributed as dist

import psgc.torch as psgc
from psgc.errors import PsgcError
from psgc.program.groups import Groups
from psgc.torch.collectives.groups import job_groups
from psgc.torch.session.api import current_session
from tests.program.collectives import check_every_method
from tests.torch.limited import limit_step

DTYPES = ("int32", "float32", "bfloat16", "float64")


def beside(rank: int, size: int) -> None:
    """Flat, local and inter groups, one after the other and in two threads, before and after the script makes a process group of its own."""
    groups, asked = job_groups(current_session()), threading.active_count()
    assert job_groups(current_session()) is groups
    flat, local, inter = tuple(range(size)), (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    assert threading.active_count() == asked, "nothing runs before a group is asked for"
    check_every_method(groups, flat)
    assert not dist.is_initialized(), "groups initialise nothing for the script"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    check_every_method(groups, local, DTYPES)
    total = torch.full((5,), float(rank))
    dist.all_reduce(total)
    assert total.tolist() == [6.0] * 5
    errors: list[BaseException] = []

    def check(members: tuple[int, ...]) -> None:
        try:
            check_every_method(groups, members, DTYPES)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=check, args=(members,)) for members in (local, inter)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    check_every_method(groups, (rank,), ("float32",))
    group, payload = groups.group(flat), bytes(range(9))
    place = np.zeros(9, np.uint8)
    group.exchange(
        [memoryview(payload)] * 4,
        [None if index == rank else place if index == (rank + 1) % 4 else np.zeros(9, np.uint8) for index in range(4)],
    )
    assert place.tobytes() == payload, "a payload that is read-only is sent as well"
    dist.destroy_process_group()


def publish(rank: int, _: Groups) -> None:
    """Each rank publishes a value of the largest size, which no packing makes smaller, and looks up all others' before and after they are there."""
    session, values = current_session(), [np.random.default_rng(other).bytes(64 << 10) for other in range(psgc.size())]
    if rank == 0:
        assert session.lookup("value 1") == values[1]
    session.publish(f"value {rank}", values[rank])
    for _ in range(2):
        for other, value in enumerate(values):
            assert session.lookup(f"value {other}") == value
        psgc.barrier()
    if rank == 1:
        time.sleep(0.5)
        session.publish("value 1", b"another")
    session.lookup("value that nobody publishes")


def die(rank: int, groups: Groups) -> None:
    """Rank 3 is killed in a collective. Rank 2 waits for it; rank 1 waits for both; rank 0 waits for rank 2, which still lives."""
    for members in ((0, 1, 2, 3), (0, 2) if rank % 2 == 0 else (1, 3), (0, 1) if rank < 2 else (2, 3)):
        groups.group(members).maximum(np.zeros(1, np.int32))
    if rank == 3:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(1000)
    members = {0: (0, 2), 1: (0, 1, 2, 3), 2: (2, 3)}[rank]
    payloads = [np.zeros(4, np.uint8) for _ in members]
    groups.group(members).exchange(payloads, [payload.copy() for payload in payloads])
    print("got what nobody has sent")


def be_absent(rank: int, groups: Groups) -> None:
    """Rank 1 never comes to a collective."""
    group = groups.group((0, 1))
    group.maximum(np.zeros(1, np.int32))
    if rank == 1:
        time.sleep(1000)
    limit_step(group, 3.0)
    group.all_reduce(np.zeros(3, np.float32), "float32")


def never_connect(rank: int, groups: Groups) -> None:
    """Rank 1 never asks for the group."""
    if rank == 1:
        time.sleep(1000)
    groups.group((0, 1))


def break_rules(rank: int, groups: Groups) -> None:
    """Two threads issue on one group."""
    group, errors, told = groups.group((0, 1)), [], threading.Event()

    def issue() -> None:
        try:
            group.all_reduce(np.zeros(3, np.float32), "float32")
        except PsgcError as error:
            errors.append(str(error))
            told.set()

    if rank == 0:
        threads = [threading.Thread(target=issue) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert told.wait(200), "one of them waits for rank 1, so the other is refused"
        (error,) = errors
        assert error.startswith("group of ranks 0, 1: all_reduce of 3 float32 while another thread's collective is under way"), error
    psgc.barrier()
    if rank == 1:
        group.all_reduce(np.zeros(3, np.float32), "float32")
    else:
        threads[0].join()
        threads[1].join()
    psgc.barrier()


def main(how: str) -> None:
    psgc.init()
    if how == "beside":
        beside(psgc.rank(), psgc.size())
    else:
        globals()[how](psgc.rank(), job_groups(current_session()))
    psgc.shutdown()
    print("fine", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
