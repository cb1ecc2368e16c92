"""Where the members of a process group of torch's meet: a store of the first one's, and never torch.distributed.init_process_group, which is the script's."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore  # which torch.distributed passes on untyped

from psgc.transport.host import address_for_others, local_address_for
from psgc.worker.session import Session


def address_of(session: Session) -> str:
    """The address of this machine at which the other workers reach it: the one that it reaches the scheduler from, or DMLC_NODE_HOST. On the scheduler's
    machine, whose name may lead to the machine itself, it is the one of the default route."""
    config = session.config
    return config.node_host or (address_for_others if config.nodes > 1 else local_address_for)(config.root_host)


def meeting_store(session: Session, members: tuple[int, ...], name: str) -> Any:
    """A store of the first member's, at which all of them meet: NCCL sets, waits for and deletes keys of its own there. name: unique among the job's published
    values. Raises what torch raises."""
    timeout = timedelta(seconds=session.config.step_timeout_s)
    if members[0] == session.rank:
        address = address_of(session)
        store = TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        session.publish(name, f"{address}:{store.port}".encode())
        return store
    address, _, port = bytes(session.lookup(name)).decode().rpartition(":")
    return TCPStore(address, int(port), None, False, timeout, wait_for_workers=False)


def reason(error: BaseException) -> str:
    """What a library of torch's says, in one line and without the places in its sources."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", " ".join(str(error).split()))
    return text.split(" This is typically", 1)[0].rstrip(".")
