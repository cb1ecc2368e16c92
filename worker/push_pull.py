"""Push and pull: carries out over the connections to servers what the client's state machine says, and gives results to whoever waits for them.

Runs in the network thread. Knows contributions, and neither codecs nor buckets. Invariant: a contribution is current from ``contribute`` until ``taken``;
once the job has failed, nothing begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psgc.config import Config
from psgc.layout import Bucket, Layout
from psgc.layout.speed import Speed
from psgc.observe.worker_trace import WorkerTrace
from psgc.transport.memory.segment import Place
from psgc.wire.frames import Header, Kind
from psgc.wire.messages import Topology
from psgc.worker.client import Action, Client, Failed, Greet, Measured, Result, Transferred, Transmit
from psgc.worker.connections.servers import Owner, ServerConnections
from psgc.worker.contributions import Contribution, Contributions, pushes_elements
from psgc.worker.residuals.transfers import Transfer
from psgc.worker.tickets import StepTicket

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Transferring:
    """Transfers that one call waits for."""

    ticket: StepTicket
    left: int


class PushPull:
    """See the module's text. Without servers until ``begin``."""

    def __init__(self, config: Config, trace: WorkerTrace | None, owner: Owner) -> None:
        self._config, self._owner = config, owner
        self.connections = ServerConnections(config, trace, owner, self._apply, self._posted)
        self.client: Client | None = None
        self.contributions = Contributions()
        self._unmeasured: list[Callable[[Speed], None]] = []  # calls that wait until the connections have been measured

    def begin(self, topology: Topology, began: float) -> None:
        """Everyone is there: connect to the servers. began: when this worker began to join the job."""
        config = self._config
        self.client = Client(
            topology.rank, config.job, topology.epoch, len(topology.servers), config.credit_bytes, config.credit_parts,
            silence_s=config.silence_s, incarnation=topology.incarnation,
        )  # fmt: skip
        self.connections.connect(topology, self.client, began)

    def add(self, layout: Layout, steps: int) -> None:
        """A layout has been agreed: make its slots. steps: as of ``Client.add_layout``."""
        assert self.client is not None
        self.client.add_layout(layout.served, self.contributions.add(layout, self.client.rank), steps)

    def steps(self, layout: Layout) -> int:
        """How many steps of the layout this rank has taken; none is under way."""
        assert self.client is not None
        return max((self.client.parts[part.key].step for _, part in layout.served.parts()), default=0)

    def retire(self, layout: Layout) -> None:
        """See ``Network.retire``."""
        self.contributions.remove(layout)
        if not self._owner.outcome.failed and self.client is not None and any(True for _ in layout.served.parts()):
            self._apply(self.client.retire(layout.id))

    def with_speed(self, call: Callable[[Speed], None]) -> None:
        """Call it with the speed of the slowest connection, once that has been measured."""
        if self.client is not None and self.client.measured:
            call(self.client.speed)
        else:
            self._unmeasured.append(call)

    def in_place(self, key: int) -> bool:
        """See ``Servers``."""
        assert self.client is not None
        return self.connections.links[self.client.parts[key].place.server].route.transport.copies

    def memory(self, layout: Layout, bucket: Bucket) -> Place | None:
        """See ``Session.memory``."""
        keys = [part.key for part in bucket.parts]
        if bucket.over_groups or not pushes_elements(layout.scheme(bucket)) or all(map(self.in_place, keys)):
            return None
        return self.contributions.row(keys)

    def contribute(self, contribution: Contribution) -> None:
        """See ``Servers``."""
        if self._owner.outcome.failed:
            return
        client, key = self.client, contribution.key
        assert client is not None
        self.contributions.current[key] = contribution
        if contribution.priority is not None:
            client.prioritise([key], contribution.priority)
        actions = client.submit(
            key, time.monotonic(), contribution.payload_bytes, nonfinite=contribution.nonfinite, skip=contribution.skip,
            previous_skipped=contribution.previous_skipped, rescale=contribution.rescale,
        )  # fmt: skip
        self._apply(actions)

    def taken(self, key: int) -> None:
        """See ``Servers``."""
        if not self._owner.outcome.failed and self.client is not None:
            del self.contributions.current[key]
            self.client.taken(key)

    def transfer(self, transfers: list[Transfer], ticket: StepTicket) -> None:
        """See ``Network.transfer``."""
        if self._owner.outcome.failed or not transfers:
            ticket.finish()
            return
        assert self.client is not None
        left = _Transferring(ticket, len(transfers))
        for transfer in transfers:
            transfer.owner = left
        self._apply(self.client.transfer(transfers, time.monotonic()))

    def _apply(self, actions: list[Action]) -> None:
        """Carry out what the client's state machine says."""
        for action in actions:
            if isinstance(action, Transmit):
                place = self.contributions.place(action.header.key) if action.payload else None
                self.connections.send(action.server, action.header, b"" if action.body is None else action.body, place)
            elif isinstance(action, Result):
                self.contributions.current[action.key].then(action.flags, action.payload)
            elif isinstance(action, Greet):
                self.connections.greet(action.server, Kind.HELLO)
            elif isinstance(action, Transferred):
                self._transferred(action.transfer)
            elif isinstance(action, Measured):
                self._measured()
            elif isinstance(action, Failed):
                self._owner.end_job(action.text)

    def _posted(self, server: int, header: Header) -> Any:
        """Where a payload that this server has begun to send is to be received; None: anywhere."""
        contribution = self.contributions.current.get(header.key)
        if contribution is None or contribution.result is None or len(contribution.result) != header.payload_bytes:
            return None
        return contribution.result if self.client is not None and self.client.awaits(server, header) else None

    def _measured(self) -> None:
        assert self.client is not None
        logger.info("connections measured bytes_per_s=%d round_trip_us=%d", *self.client.speed)
        waiting, self._unmeasured = self._unmeasured, []
        for call in waiting:
            call(self.client.speed)

    @staticmethod
    def _transferred(transfer: Transfer) -> None:
        transfer.owner.left -= 1
        if transfer.owner.left == 0:
            transfer.owner.ticket.finish()
