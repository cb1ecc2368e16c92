"""A learner behind an address that is translated: its connection is forgotten there, and its next one comes from another port, as after minutes of silence."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import psgc.torch as psgc
from psgc.config import Config
from psgc.layout.update_rule import UpdateRule
from psgc.server.syncer.loop import Settings, Syncer


class Translation:
    """Passes bytes on from a port of its own to the syncer, each connection from another source port. at: where learners connect."""

    def __init__(self, to: int) -> None:
        self._to, self._open, self._answers, self._pairs = to, True, True, list[tuple[socket.socket, socket.socket]]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """What the syncer says does not arrive any more."""
        self._answers = False

    def forget(self) -> None:
        """Until ``remember``: the learner's connections are reset, and the syncer hears nothing of it: its ends stay open."""
        self._open = False
        for inside, _ in self._pairs:
            _reset(inside)

    def remember(self) -> None:
        self._open = self._answers = True

    def close(self) -> None:
        self._listening.close()
        for pair in self._pairs:
            for one in pair:
                one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, _ = self._listening.accept()
                if not self._open:
                    _reset(inside)
                    continue
                outside = socket.create_connection(("127.0.0.1", self._to))
                self._pairs.append((inside, outside))
                threading.Thread(target=self._pass_on, args=(inside, outside, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(outside, inside, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._answers or not answers:
                    to.sendall(data)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)  # wakes whoever receives from it
        sock.close()


@pytest.fixture
def syncer() -> Iterator[Syncer]:
    made = Syncer(Config(role="server"), Settings("127.0.0.1", 0, UpdateRule.parse("add")))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made
    made.mailbox.put(made.end, "the test")
    thread.join(100)


def moved_by(own: nn.Module, change: float) -> None:
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(change)


@pytest.mark.parametrize("answered", [True, False], ids=["between pushes", "with a push applied and its answer lost"])
def test_a_learner_comes_back_from_another_port_and_its_push_counts_once(
    alone: None, syncer: Syncer, caplog: pytest.LogCaptureFixture, answered: bool
) -> None:
    nat, own = Translation(syncer.port), nn.Linear(3, 2)
    session: Any = psgc.current_session()
    session.config = replace(session.config, silence_s=0.2)
    outside = psgc.Decoupled(own, torch.optim.SGD(own.parameters(), lr=0.1), every=1, at=nat.at, name="a")
    part, client = outside._parts[0], outside._client
    assert client is not None
    start = part.base.copy()
    before = next(iter(syncer._keys)).peer
    if not answered:
        nat.swallow()
    moved_by(own, 1.0)
    outside._leave(part)
    if answered:
        outside._take(part, wait=True)
    while syncer._state.learners["a"].pushes < 1:
        time.sleep(0.01)
    nat.forget()
    while "learner a trains on without the syncer at" not in caplog.text:
        time.sleep(0.01)
    assert [link.peer for link in syncer._keys] == [before], "the syncer has heard nothing of it"
    moved_by(own, 1.0)
    nat.remember()
    outside.finish()
    assert syncer._state.learners["a"].pushes == 2
    assert syncer._values.fragments[0] == pytest.approx(start + 2.0, abs=1e-6), "each push counts once"
    assert part.base == pytest.approx(start + 2.0, abs=1e-6)
    nat.close()
