"""A learner's connection to its syncer: a thread that keeps it up, makes it again for as long as it takes, and carries what the conversation says.

The training thread hands payloads over and looks for answers; it never waits here unless it asks to. The connection of a learner that was refused is closed for
good, and the training thread hears why the next time it asks.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import zmq

from psgc.config import Config
from psgc.errors import JobFailed, RemoteProtocolError
from psgc.processes.mailbox import Mailbox
from psgc.transport.host import host_id
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Place
from psgc.transport.pacing import PacedLink
from psgc.transport.registry import FALLBACK
from psgc.transport.security.handshake import NONCE_BYTES, WorkerProof
from psgc.transport.selection import transport
from psgc.transport.server_link import Route, ServerLink
from psgc.transport.watch import Watch
from psgc.wire.learners import Enrol, learner_key, learner_number
from psgc.worker.learner.contact import Contact, Silence, Wait
from psgc.worker.learner.conversation import Conversation, Message, Values

logger = logging.getLogger(__name__)
TICK_S: Final = 0.25
LINGER_S: Final = 2.0


class LearnerClient:
    """at: the syncer's "tcp://host:port". held, bring: as of ``Conversation``. The connection's thread calls ``bring``; nobody writes to what is held."""

    def __init__(self, config: Config, at: str, enrol: Enrol, held: list[Any], bring: Callable[[int, Any, Any, Any], Any]) -> None:
        self._config, self._at = config, at
        self._talk = Conversation(enrol, held, bring)
        self._changed = threading.Condition()
        self._mailbox, self._watch = Mailbox(), Watch()
        by = transport(FALLBACK)
        self._links = LinkSet(PacedLink.of(config.link_mbit, config.link_fd) if config.link_mbit else None)
        number = learner_number(enrol.name)
        key = learner_key(config.token, number)

        def proof() -> WorkerProof:
            return WorkerProof(by.label, 0, 0, number, key, host_id(), secrets.token_bytes(NONCE_BYTES), encrypt=config.encrypt)

        self._link = ServerLink(Route(0, by, at, False, by.dialer(at, config), proof), self._links)
        self._number = number
        self._contact = Contact(time.monotonic(), TICK_S)  # both threads tick: whichever goes on first after this process did not run
        self._silence = Silence()
        self._wait: Wait | None = None  # of the training thread; the connection's says so
        self._begun = self._leaves = False  # the syncer has been reached; this learner has nothing more to say
        self._thread = threading.Thread(target=self._run, name="psgc-learner", daemon=True)
        self._thread.start()

    @property
    def wire_bytes(self) -> int:
        """Sent and received."""
        return self._link.wire_bytes

    # the training thread

    def push(self, fragment: int, version: int, payload: Any, held: Any) -> None:
        """As of ``Conversation``. Raises JobFailed if this learner was refused."""
        with self._changed:
            self._check()
            messages = self._talk.push(fragment, version, payload, held)
        self._mailbox.put(self._send, messages)

    def took(self, fragment: int, held: Any) -> None:
        """As of ``Conversation``."""
        with self._changed:
            self._talk.took(fragment, held)

    def waits(self, fragment: int) -> bool:
        """Whether the fragment's last push was not answered yet. Raises JobFailed if this learner was refused."""
        with self._changed:
            self._check()
            return self._talk.waits(fragment)

    def answer(self, fragment: int, wait: bool) -> Values | None:
        """The values that answer the fragment's last push; once. wait: until they are there; else None may come. Raises JobFailed if this learner was refused,
        or where the syncer was out of reach for too long (PSGC_STEP_TIMEOUT_S; at first PSGC_REGISTER_TIMEOUT_S)."""
        with self._changed:
            try:
                while True:
                    self._check()
                    if fragment in self._talk.answers or not wait:
                        return self._talk.answers.pop(fragment, None)
                    now = time.monotonic()
                    self._wait = self._wait or Wait(fragment, now)
                    self._contact.tick(now, self._wait, self._silence)
                    self._give_up_if_late(now)
                    self._changed.wait(TICK_S)
            finally:
                self._wait = None

    def close(self) -> None:
        """Tell the syncer, if it is reached, and end the thread."""
        self._mailbox.put(self._leave)
        self._thread.join(self._config.step_timeout_s)

    def _check(self) -> None:
        if self._talk.failed:
            raise JobFailed(f"learner {self._talk.enrol.name}: {self._talk.failed}")

    def _give_up_if_late(self, now: float) -> None:
        """Whoever waits gives up only while there is no connection, or none that lasts: a slow one is not late."""
        name, limit_s = self._limit_s()
        assert self._wait is not None
        late = self._contact.late(now, limit_s, self._wait.began)
        if late is not None:
            who = self._talk.enrol.name
            raise JobFailed(f"learner {who}: gave up after {late[0]:.0f} s ({name}) without the syncer at {self._at}{late[1]}: {self._why}")

    @property
    def _why(self) -> str:
        return f"{self._link.trouble.text or 'nothing comes back'}; is psgc syncer started there, and are PSGC_SYNCER, PSGC_LEARNER and PSGC_TOKEN right?"

    def _limit_s(self) -> tuple[str, float]:
        if self._begun:
            return "PSGC_STEP_TIMEOUT_S", self._config.step_timeout_s
        return "PSGC_REGISTER_TIMEOUT_S", self._config.register_timeout_s

    # the connection's thread

    def _run(self) -> None:
        try:
            self._carry()
        except Exception as error:
            logger.exception("learner %s: its connection's thread ended", self._talk.enrol.name)
            with self._changed:  # else whoever waits would do so for ever
                self._talk.failed = f"its connection to the syncer at {self._at} ended by {type(error).__name__}: {error}"
                self._changed.notify_all()
        finally:
            self._link.close(0.0)
            self._links.close()

    def _carry(self) -> None:
        leaving = 0.0
        while not self._talk.failed:
            self._links.flush()
            things = [(self._mailbox, zmq.POLLIN), (self._links, zmq.POLLIN)]
            ready = self._watch.wait(things, 0.0 if self._links.pending else TICK_S)
            if self._mailbox.fileno() in ready:
                for call, args in self._mailbox.drain(TICK_S):
                    call(*args)
            if self._links.fileno() in ready or self._links.pending:
                self._links.ready()
                self._hear()
            self._see_events()
            if self._leaves:
                leaving = leaving or time.monotonic()
                if self._talk.over or time.monotonic() - leaving > LINGER_S:
                    break

    def _leave(self) -> None:
        self._leaves = True
        with self._changed:
            messages = self._talk.leave()
        self._send(messages)

    def _hear(self) -> None:
        for header, payload in self._link.receive():
            with self._changed:
                before = self._talk.unanswered
                try:
                    messages = self._talk.receive(header, payload)
                except RemoteProtocolError as error:
                    self._talk.failed = f"the syncer at {self._at}: {error}"
                    messages = []
                if self._talk.enrolled:
                    self._begun = True
                    self._contact.answered(time.monotonic(), progress=not before or self._talk.unanswered < before)
                self._changed.notify_all()
            self._send(messages)

    def _see_events(self) -> None:
        for event in self._link.events():
            with self._changed:
                if event == "up":
                    messages = self._talk.connected()
                else:
                    self._talk.disconnected()
                    messages = []
                    self._contact.down(time.monotonic())
            self._send(messages)
        if not self._leaves:
            self._say_what_is_missing()

    def _say_what_is_missing(self) -> None:
        who, first_s = self._talk.enrol.name, self._config.silence_s
        with self._changed:
            now = time.monotonic()  # with the lock: the other thread's ticks are in this one's order
            self._contact.tick(now, self._wait, self._silence)
            wait, out = self._wait, self._contact.due(now, first_s)
            reached = self._contact.out_of_reach(now) is None
            waited = wait.due(now, first_s) if wait is not None and reached else None
            unanswered = self._talk.unanswered if wait is None and reached else 0
            silent = self._silence.due(now, self._link.wire_bytes, unanswered, self._config.dead_s)
        if out is not None:
            what = "trains on without" if wait is None and self._begun else "waits for"  # nobody trains before the first values are there
            logger.warning("learner %s %s the syncer at %s, for %.0f s so far: %s", who, what, self._at, out, self._why)
        elif waited is not None and wait is not None:
            logger.warning(
                "learner %s waits for fragment %d from the syncer at %s, for %.0f s so far: %s",
                who, wait.fragment, self._at, waited, self._why_slow,
            )  # fmt: skip
        elif silent is not None:
            logger.warning(
                "learner %s trains on without an answer of the syncer at %s, from which nothing has come for %.0f s: %s",
                who, self._at, silent, self._why_slow,
            )  # fmt: skip

    @property
    def _why_slow(self) -> str:
        """What is known of an answer that does not come, though there is a connection."""
        awaits, own = self._talk.awaits, self._talk.enrol.name
        if awaits and awaits != own:
            return f"it has no values yet, and awaits those of learner {awaits}"
        if self._link.receiving:
            return "the answer is coming in"
        if self._link.unsent:
            return f"{'the initial values are' if awaits else 'what was pushed is'} still leaving"
        return "it is connected, and does not answer"

    def _send(self, messages: Iterable[Message]) -> None:
        for header, payload in messages:
            place = None if payload is None or isinstance(payload, bytes) else Place(None, 0, payload)
            full = header._replace(job=self._config.job, sender=self._number, payload_bytes=0 if payload is None else len(payload))
            self._link.send(full, payload if place is None and payload is not None else b"", place)


__all__ = ["LearnerClient"]
