"""Carries out what a server's state machine says: sums in the engine, commits in memory and at the standby, messages to workers.

Runs in the server's one thread, and knows neither the scheduler nor how connections come to be. Invariant: nothing that follows from a commit leaves before
the standby has it, where there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from psgc.config import Config
from psgc.errors import PsgcError, RemoteProtocolError
from psgc.layout import Layout, key_text
from psgc.observe.server_trace import ServerTrace
from psgc.processes.cores import usable_cores
from psgc.processes.mailbox import Mailbox
from psgc.processes.pool import threads_of
from psgc.server.blocks import Written
from psgc.server.engine import Engine, Folded, KeyWork
from psgc.server.replica import Replica
from psgc.server.state import NOTHING_KEPT, Close, Commit, Effect, Fault, Fold, Restore, Retire, Send, SendResidual, ServerState, specs_of
from psgc.server.step import KeepLate, Kept
from psgc.server.store import KeyShape, KeyStore, Store
from psgc.server.weights.kept import AnswerCommit, KeptWeights, VersionCommit
from psgc.transport.link import Link
from psgc.transport.link_set import LinkSet
from psgc.wire.frames import HEADER_BYTES

logger = logging.getLogger(__name__)
NO_LATE_REPLICAS: Final = (
    "PSGC_REPLICAS=1 here and PSGC_BACKUP_WORKERS at the workers: late contributions have no replicas; unset one of the two everywhere"
)


class Serving:
    """See the module's text. state: None until the scheduler has admitted this server; replica: of its standby, if it has one. fault: takes what ends the job.
    stepped: told of every commit."""

    def __init__(
        self, config: Config, store: Store, links: LinkSet, mailbox: Mailbox, trace: ServerTrace | None, fault: Callable[[Fault], None],
        stepped: Callable[[], None],
    ) -> None:  # fmt: skip
        self._config, self._links, self._mailbox, self._trace = config, links, mailbox, trace
        self._fault, self._stepped = fault, stepped
        self.store = store
        self.state: ServerState | None = None
        self.replica: Replica | None = None
        self._works: dict[int, KeyWork] = {}
        self.engine = Engine(config.server_threads or threads_of(usable_cores()), self._from_pool, self._broken, trace)
        self.wire_bytes = 0

    @property
    def index(self) -> str:
        """This server's number, in sentences."""
        return "?" if self.state is None else str(self.state.index)

    def close(self) -> None:
        self.engine.close()
        if self.replica is not None:
            self.replica.close()

    def apply(self, effects: Iterable[Effect]) -> None:
        """Do what the state machine says, but for what must wait for the standby."""
        replica = self.replica
        self.do(effects if replica is None else [effect for effect in effects if not self._waits(effect, replica)])

    def _waits(self, effect: Effect, replica: Replica) -> bool:
        """Whether it waits for the standby. What is committed goes there at once, before it is asked what must wait for that."""
        if replica.held.holds(effect):
            return True
        if isinstance(effect, Commit | VersionCommit | AnswerCommit | Restore):
            self._commit(effect)
            return True
        return False

    def do(self, effects: Iterable[Effect]) -> None:
        small: list[tuple[Fold, KeyWork, KeyStore]] = []
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Close):
                self._end_connection(effect)
            elif isinstance(effect, Fold) and effect.key in self.store.weights:
                self.engine.update(effect, self.store.weights[effect.key])
            elif isinstance(effect, Fold):
                work, store = self._works[effect.key], self.store.keys[effect.key]
                if work.spec.at_once:
                    small.append((effect, work, store))
                else:
                    self.engine.start(effect, work, store)
            elif isinstance(effect, Commit | VersionCommit | AnswerCommit | Restore):
                self._commit(effect)
            elif isinstance(effect, KeepLate):
                self._keep_late(effect)
            elif isinstance(effect, SendResidual):
                self._send_residual(effect)
            elif isinstance(effect, Retire):
                self._retire(effect)
            else:
                self._fault(effect)
        for fold in small:  # in this thread: the result leaves at once, and is the acknowledgement
            self._fold_here(*fold)

    def _commit(self, commit: Commit | VersionCommit | AnswerCommit | Restore) -> None:
        """Make it durable, here and on the standby."""
        weights = self.store.weights.get(commit.key)
        written: Iterator[Written] = iter(())
        if isinstance(commit, Restore):
            written = self._restore(commit)
        elif isinstance(commit, Commit):
            store = self.store.keys[commit.key]
            store.commit(commit)
            written = store.written(commit)
        elif weights is not None:
            weights.commit(commit)
            written = weights.written(commit)
        if self.replica is not None:
            self.replica.committed(commit.key, written)
        if not isinstance(commit, Restore):
            self._stepped()

    def _fold_here(self, fold: Fold, work: KeyWork, store: KeyStore) -> None:
        try:
            folded = self.engine.run(fold, work, store)
        except Exception as error:  # as in the pool: whatever it is, the job hears of it
            self._broken(error)
        else:
            self._folded(folded)

    def _send(self, send: Send) -> None:
        link: Link = send.peer
        place = None if send.result_slot is None else self.store.place(send.header.key, send.result_slot)
        self.wire_bytes += HEADER_BYTES + send.header.payload_bytes
        if self._trace is not None:
            self._trace.sending(link.proof.rank, send.header)
        link.send(send.header, send.body, place)
        self._links.touch(link)

    def _end_connection(self, close: Close) -> None:
        """The loop forgets it in its next turn."""
        link: Link = close.peer
        if not link.closed:
            logger.debug("connection closed rank=%d peer=%s: %s", link.proof.rank, link.peer, close.why)
            if close.answered:
                link.flush()
            link.fail(close.why)
            self._links.touch(link)

    def _send_residual(self, send: SendResidual) -> None:
        key, first = send.header.key, send.header.contributors
        weights = self.store.weights.get(key)
        values = (
            weights.momentum()
            if weights is not None
            else self.engine.lend(self._works[key], self.store.keys[key], send.header.step, send.add_back)
        )
        body = values[first : first + send.header.payload_bytes // 4].astype(np.float32).tobytes()
        self._send(Send(send.peer, send.header, body))

    def _restore(self, restore: Restore) -> Iterator[Written]:
        """Returns what it has written."""
        weights, numel = self.store.weights.get(restore.key), len(restore.payload) // 4
        try:
            if weights is not None:
                weights.restore(restore.first, restore.payload)
                return weights.restored(restore.first, numel)
            store = self.store.keys[restore.key]
            store.restore(restore.first, restore.payload, restore.rescale)
            return store.restored(restore.first, numel)
        except PsgcError as error:
            self._fault(Fault(f"server {self.index}: key {key_text(restore.key)}: {error}"))
            return iter(())

    def _keep_late(self, keep: KeepLate) -> None:
        try:
            self.store.keys[keep.key].keep_late(keep)
        except PsgcError as error:
            self._fault(Fault(f"server {self.index}: key {key_text(keep.key)}: {error}"))

    def _retire(self, retire: Retire) -> None:
        for key in retire.keys:
            del self._works[key]
        self.store.remove_keys(retire.keys)
        if self.replica is not None:
            for key in retire.keys:
                self.replica.committed(key, self.store.written(key))

    def _from_pool(self, folded: Folded) -> None:
        self._mailbox.put(self._folded, folded)

    def _folded(self, folded: Folded) -> None:
        if self.state is not None:
            self.apply(self.state.folded(*folded, time.monotonic()))

    def _broken(self, error: BaseException) -> None:
        logger.debug("engine", exc_info=error)
        kind = "" if isinstance(error, PsgcError) else f"{type(error).__name__}: "
        self._mailbox.put(self._fault, Fault(f"server {self.index}: {kind}{error}"))

    def add_layout(self, layout: Layout, follows: bool) -> bool:
        """Serve a layout whose kernels are loaded. follows: this process takes up what a former one has kept. Returns whether it is served."""
        state = self.state
        assert state is not None
        specs, costs = specs_of(layout, state.index, state.workers)
        by_key = {spec.key: spec for spec in specs}
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("serving layout=%d name=%s parts=%s", layout.id, layout.name, " ".join(map(key_text, by_key)))
        shapes = []
        for bucket, part in layout.served.parts():
            spec = by_key.get(part.key)
            if spec is None:
                continue
            pair = layout.scheme(bucket).rounds(part.numel)[part.round].pair
            if spec.rule is not None:
                self.store.add_weights(part.key, spec.rule, pair, spec.numel, state.workers)
                continue
            streams = layout.number, layout.seed, layout.past_steps
            self._works[part.key] = KeyWork(spec, pair, bucket.index, part.offset, spec.root is not None, *streams)
            late = (spec.backup, pair.push.payload_bound(spec.numel)) if spec.backup else (0, 0)
            shapes.append(KeyShape(part.key, pair.pull.payload_bound(spec.numel), spec.numel if spec.pull_feedback else 0, *late))
        if self._config.replicas and any(shape.late for shape in shapes):
            self._fault(Fault(f"server {state.index}: {NO_LATE_REPLICAS}"))
            return False
        self.store.add_keys(shapes)
        if self._trace is not None:
            self._trace.laid_out(layout)
        keys = [self.store.keys[shape.key] for shape in shapes]
        if follows and self.replica is not None:
            self.replica.taken_up(by_key)
        if follows and any(key.removed for key in keys):
            self._retire(Retire(tuple(by_key)))
            state.forget(layout.id)
        else:
            self.apply(state.register(layout, specs, costs, self._kept(by_key) if follows else NOTHING_KEPT))
        return True

    def _kept(self, keys: Iterable[int]) -> dict[int, Kept | KeptWeights]:
        """What a former process has kept of these keys; weights of which it has kept nothing begin anew."""
        held = {key: self.store.weights[key].kept for key in keys if key in self.store.weights}
        kept: dict[int, Kept | KeptWeights] = {key: of for key, of in held.items() if of is not None}
        return kept | {key: self.store.keys[key].kept for key in keys if key not in held}

    def hear_standby(self, replica: Replica) -> None:
        """The standby has more of what was committed."""
        now = time.monotonic()
        try:
            self.do(replica.receive(now))
        except RemoteProtocolError as error:
            self._fault(Fault(str(error)))
        replica.look(now)

    def go_alone(self) -> None:
        """The standby's machine is lost: nothing waits for it any more."""
        if self.replica is not None:
            replica, self.replica = self.replica, None
            replica.close()
            self.do(replica.held.let_go())

    def look_at_standby(self, now: float) -> tuple[list[str], list[Fault]]:
        """Make the connection to it again where that is down. Lines on one that cannot be reached, and why the job must end."""
        replica = self.replica
        if replica is None:
            return [], []
        if not replica.link.up:
            replica.look(now)
        text, over = replica.late(now, self._config.silence_s, self._config.step_timeout_s)
        return ([], [Fault(text)]) if over else ([text] if text else [], [])
