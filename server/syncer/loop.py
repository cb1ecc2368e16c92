"""The syncer's process: one thread does all but writing the file, for which there is another (``saver.py``), and one port listens.

Learners connect; the syncer never does. A connection that ends is its learner's to make again, and a syncer that is started again goes on from its file.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import zmq

from psgc.codecs import CodecPair, parse_codec
from psgc.config import Config
from psgc.errors import CodecError, PsgcError, RemoteProtocolError
from psgc.layout.update_rule import UpdateRule
from psgc.processes.addresses import listening_socket
from psgc.processes.mailbox import Mailbox
from psgc.processes.reminder import Reminder
from psgc.server.syncer.picture import check_place
from psgc.server.syncer.saver import Saver
from psgc.server.syncer.state import INITIAL_VALUES, Answer, Apply, Begin, Drop, Effect, Send, SyncerState, described, refused
from psgc.server.syncer.tokens import Tokens
from psgc.server.syncer.values import Values, pair_of
from psgc.transport.link import Link, Transport
from psgc.transport.link_set import LinkSet
from psgc.transport.memory.segment import Place
from psgc.transport.pacing import PacedLink
from psgc.transport.registry import FALLBACK
from psgc.transport.security.gate import Gate
from psgc.transport.security.handshake import NONCE_BYTES, ServerProof
from psgc.transport.selection import transport
from psgc.transport.watch import Watch
from psgc.wire.frames import SERVER_SENDER, Header, Kind
from psgc.wire.learners import INITIAL, Enrol
from psgc.wire.messages import ErrorCode, decode_body

logger = logging.getLogger(__name__)
TICK_S: Final = 1.0
SEE_OFF_S: Final = 1.0  # for a learner that has been told why its connection ends, to close it


@dataclass(frozen=True, slots=True)
class Settings:
    """host, port: where learners connect; "" for all addresses, 0 for a free port. learners: the file of tokens; None: everyone who has the job's. save: the
    file of the outer parameters; None: they are lost with the process. every_s: between two savings."""

    host: str
    port: int
    rule: UpdateRule
    learners: Path | None = None
    save: Path | None = None
    every_s: float = 60.0


class Syncer:
    """See the module's text. Raises PsgcError where it cannot begin: a port that is taken, a file that is wrong or cannot be written."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self._config, self._settings = config, settings
        self._tokens = Tokens(settings.learners, config.token)
        self._values = Values(settings.rule)
        self._state = SyncerState(settings.rule.canonical)
        if settings.save is not None:
            check_place(settings.save)
        listening = listening_socket(
            settings.port, settings.host
        )  # before the file is read, which a syncer that is ending there writes first
        try:
            if settings.save is not None and settings.save.exists():
                self._state = self._values.load(settings.save)
                logger.info("going on from %s: %s", settings.save, described(self._state.learners))
        except BaseException:
            listening.close()
            raise
        self.port = int(listening.getsockname()[1])
        named = replace(config, node_host=settings.host or "127.0.0.1")  # nobody is told the address: learners know it
        self._gate = Gate([transport(FALLBACK).listen_with(named, listening)], self._proof)
        self._links = LinkSet(PacedLink.of(config.link_mbit, config.link_fd) if config.link_mbit else None)
        self._keys: dict[Link, bytes] = {}
        self._codecs: dict[Link, CodecPair] = {}
        self._names: dict[Link, str] = {}  # of the learners that have enrolled
        self._watch, self.mailbox = Watch(), Mailbox()
        self._leaving: dict[Link, float] = {}  # connections on which why they end is under way, and until when they may take
        self._saver = Saver(settings.save, settings.every_s, config.silence_s, time.monotonic(), lambda: self.mailbox.put(self._saved))
        self._awaited: tuple[str, float, Reminder] = ("", 0.0, Reminder(0.0))  # whose initial values, and since when
        self._ended = ""

    def run(self) -> None:
        """Until a signal ends it. Raises PsgcError where it cannot save at the end."""
        parse_codec("none").warm()
        next_tick = time.monotonic() + TICK_S
        try:
            while not self._ended:
                self._turn(next_tick)
                if (now := time.monotonic()) >= next_tick:
                    self._tick(now)
                    next_tick = now + TICK_S
            self._saver.close(
                time.monotonic(), lambda: self._values.picture(self._state)
            )  # before the port is free for another syncer, which reads the file
        finally:
            self._links.flush()
            self._gate.close()
            for link in self._links:
                link.close()
            self._links.close()
        logger.info("ended by %s: %s", self._ended, described(self._state.learners))

    def end(self, why: str) -> None:
        self._ended = why

    def _turn(self, next_tick: float) -> None:
        for link in self._links.flush():
            self._close_if_ended(link)
        things = [(self.mailbox, zmq.POLLIN), (self._links, zmq.POLLIN), (self._gate, zmq.POLLIN)]
        ready = self._watch.wait(things, 0.0 if self._links.pending else next_tick - time.monotonic())
        for call, args in self.mailbox.drain(TICK_S) if self.mailbox.fileno() in ready else ():
            call(*args)
        for link in self._gate.serve() if self._gate.fileno() in ready else ():
            self._keys[link] = self._tokens.key(link.proof.rank)
            self._links.add(link)
        for link in self._links.ready() if self._links.fileno() in ready or self._links.pending else ():
            self._hear(link)

    def _hear(self, link: Link) -> None:
        try:
            for header, payload in link.receive():
                if link in self._leaving:
                    continue  # bytes that are not read would have its end reset the connection, and the learner not hear why
                self._apply(self._received(link, header, payload))
                if link.closed:
                    break
        except RemoteProtocolError as error:
            logger.warning("connection from %s closed: %s", link.peer, error)
            link.fail("bytes that are no message")
        self._links.received(link)
        self._close_if_ended(link)

    def _received(self, link: Link, header: Header, payload: Any) -> list[Effect]:
        enrol, number = None, link.proof.rank
        try:
            if header.kind == Kind.REGISTER:
                enrol = decode_body(Enrol, b"" if payload is None else payload.tobytes())
                self._codecs[link] = pair_of(enrol.codec, enrol.answer)
            elif header.kind == Kind.PUSH and link in self._codecs:
                self._values.decode(self._codecs[link], header.key, payload, header.step == INITIAL)
        except CodecError as error:
            return refused(link, RemoteProtocolError(str(error), ErrorCode.WRONG_CODEC))
        except RemoteProtocolError as error:
            return refused(link, error)
        effects = self._state.receive(link, number, header, enrol)
        if enrol is not None and link in self._state.peers:
            self._names[link] = enrol.name
            logger.info("enrolled learner=%s from=%s codec=%s", enrol.name, link.peer, enrol.codec)
        return effects

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.peer, effect.header._replace(payload_bytes=len(effect.body)), effect.body)
                if effect.header.kind == Kind.ERROR:
                    logger.warning("learner at %s refused: %s", effect.peer.peer, effect.body.decode())
            elif isinstance(effect, Begin):
                self._begin(effect)
            elif isinstance(effect, Apply):
                self._values.apply(effect.fragment, effect.staleness)
                self._saver.changed = self._state.begun
                if effect.staleness == INITIAL_VALUES and self._state.begun:
                    self._saver.soon()
                    self._save_if_due(time.monotonic())
            elif isinstance(effect, Answer):
                self._answer(effect)
            else:
                self._drop(effect)

    def _begin(self, begin: Begin) -> None:
        try:
            self._values.begin(begin.sizes)
        except RemoteProtocolError as error:
            before, self._state = self._state, SyncerState(self._state.rule)
            self._apply([effect for peer in before.peers for effect in refused(peer, error)])

    def _answer(self, answer: Answer) -> None:
        link: Link = answer.peer
        codecs = self._codecs[link]
        bytes_ = self._values.encoded(codecs, answer.header.key)
        header = answer.header._replace(codec=codecs.pull.codec_id, payload_bytes=bytes_.size)
        self._send(link, header, None, Place(None, 0, bytes_))

    def _send(self, link: Link, header: Header, body: bytes | None, place: Place | None = None) -> None:
        if not link.closed:
            link.send(header._replace(job=self._config.job, sender=SERVER_SENDER), body, place)
            self._links.touch(link)

    def _drop(self, drop: Drop) -> None:
        link: Link = drop.peer
        if not drop.told:
            link.fail("another connection of this learner has taken its place")
            self._close_if_ended(link)
        elif link not in self._leaving:
            self._leaving[link] = time.monotonic() + SEE_OFF_S
            self._apply(self._state.lost(link))

    def _close_if_ended(self, link: Link) -> None:
        if link.closed and self._keys.pop(link, None) is not None:
            logger.info("connection of learner=%s is gone: %s", self._names.pop(link, link.peer), link.why)
            self._links.discard(link)
            self._codecs.pop(link, None)
            self._leaving.pop(link, None)
            self._apply(self._state.lost(link))
            link.close()

    def _tick(self, now: float) -> None:
        self._gate.tick()
        try:
            if self._tokens.read_again():
                logger.info("%d learners may enrol now", len(self._tokens.names))
        except PsgcError as error:
            logger.warning("%s; the former list stays", error)
        for link, key in list(self._keys.items()):
            if link not in self._leaving and not self._tokens.admits(link.proof.rank, key):
                revoked = RemoteProtocolError("this learner's token was revoked", ErrorCode.NOT_ADMITTED)
                self._apply([*refused(link, revoked), Drop(link, told=True)])
        for link, until in list(self._leaving.items()):
            if now >= until:
                link.fail("its learner may not go on, and has not closed it")
                self._close_if_ended(link)
        self._say_who_is_awaited(now)
        self._save_if_due(now)

    def _say_who_is_awaited(self, now: float) -> None:
        if (name := self._state.awaited) != self._awaited[0]:
            self._awaited = name, now, Reminder(now)
        _, since, reminder = self._awaited
        if name and reminder.due(now, self._config.silence_s):
            here, all_ = sum(map(bool, self._state.versions)), len(self._state.versions)
            logger.warning(
                "learner %s is to bring the initial values, for %.0f s so far: %d of %d fragments have come; learners that wait for them: %d",
                name, now - since, here, all_, self._state.waiting,
            )  # fmt: skip

    def _save_if_due(self, now: float) -> None:
        if self._saver.due(now):
            self._saver.begin(now, self._values.picture(self._state))

    def _saved(self) -> None:
        self._saver.ended(time.monotonic())

    def _proof(self, transport: Transport) -> ServerProof:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return ServerProof(transport.label, 0, 0, 1 << 32, self._tokens.key, nonce, encrypt=self._config.encrypt)


def serve(config: Config, settings: Settings, told: Any = None) -> None:
    """Serve learners until SIGTERM, Ctrl-C or the end of the terminal, unless that is ignored (nohup). told: called with the port, once learners may connect.
    Raises PsgcError."""
    syncer = Syncer(config, settings)
    stop = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stop[signal.SIGHUP] = "SIGHUP"
    before = {number: signal.signal(number, lambda n, _: syncer.mailbox.put(syncer.end, stop[signal.Signals(n)])) for number in stop}
    try:
        if told is not None:
            told(syncer.port)
        syncer.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Settings", "Syncer", "serve"]
