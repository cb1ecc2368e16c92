"""Members and strangers tell a scheduler anything: it refuses it, or ends the job with a line. It never crashes, and what it writes down another process reads.

Messages begin as right ones, of every kind, and are changed: bits of the header, fields of the body, its bytes. The scheduler's state machine gets them as its
loop does. Observers, who show what members report, get its answers.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import zmq

from psgc.errors import RemoteProtocolError
from psgc.layout import Declaration, TensorSpec
from psgc.observe.live import view
from psgc.scheduler.actions import Action, End, Keep, Send
from psgc.scheduler.membership import Membership
from psgc.scheduler.records import from_json, to_json
from psgc.transport.control.dealer import message_of
from psgc.wire.frames import SERVER_SENDER, Header, Kind, pack_header
from psgc.wire.messages import Declare, ErrorCode, Lookup, Notice, Published, decode_json, encode_body, pack
from psgc.wire.reports import Observed, Report
from tests.attacks.mutations import flipped, noise, repeat
from tests.scheduler.talk import DEAD_S, JOB, REGISTER_S, SILENCE_S, STEP_S, register

MEMBERS = {b"s0": register("server", 0, index=0), b"w0": register(), b"w1": register(node=1)}
PEERS = (*MEMBERS, *MEMBERS, *MEMBERS, b"w2", b"stranger", b"\0\xff")
DECLARATIONS = tuple(
    Declaration(name, kind, (TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (7,), "float32")), codec, True, order=(0, 1), used=(0, 1))
    for name, kind, codec in (("m", "adhoc", "onebit"), ("n", "plan", "none"), ("o", "adhoc", "powersgd"))
)
BODIES: dict[Kind, list[Any]] = {
    Kind.REGISTER: [register(), register(node=1), register("server", 0, index=0), register("server", 0), register(incarnation=1, lineage=3, shrinks=True)],
    Kind.DECLARE: [Declare(one.name, one.digest(), unused) for one in DECLARATIONS for unused in ((), (1,))],
    Kind.DECLARATION: [one.to_json() for one in DECLARATIONS],
    Kind.PUBLISH: [Published.of("x", b"abc")],
    Kind.LOOKUP: [Lookup("x")],
    Kind.FAULT: [Notice(0, "why"), Notice(ErrorCode.ABSENT, "absent"), Notice(ErrorCode.FINAL, "ended")],
    Kind.ERROR: [Notice(ErrorCode.MALFORMED, "why")],
    Kind.BYE: [None, Notice(0, "")],
    Kind.HEARTBEAT: [None, Notice(0, "rank 1 is awaited")],
    Kind.REPORT: [
        Report(10_000, 5, steps=9, step_us=40_000, compute_us=30_000, waits_us=10_000, servers={"0": [0.4, 100, 0.1]}, codecs={}, residuals={"m": 0.5}),
        Report(10_000, 5, threads=2, late={"1": [40.0, 0.1]}, sums_permille=900),
    ],
}  # fmt: skip
ENDING = (Kind.FAULT, Kind.ERROR, Kind.BYE)  # most of these end the job, or a member's part in it
LIVELY = [kind for kind in BODIES if kind not in ENDING]
BARE = [kind for kind in Kind if kind not in BODIES]
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 31,
    1 << 63,
    1 << 200,
    1.5,
    float("nan"),
    "",
    "x" * 5000,
    "é\0'\"<b>",
    [],
    [[]],
    {},
    {"a": {}},
    [1, "a"],
)


class Fuzzed:
    """A job of two workers and a server, begun again when it has ended."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 100.0
        self.heard = self.refused = self.ended = self.read = 0
        self.begin()

    def begin(self) -> None:
        self.membership = self.fresh()
        if self.rng.random() < 0.8:
            for peer, one in MEMBERS.items():
                self.say(peer, Kind.REGISTER, one)

    def fresh(self) -> Membership:
        return Membership(2, 1, JOB, self.now, lambda _: None, SILENCE_S, DEAD_S, REGISTER_S, STEP_S, returns=True, data_key=bytes(32))

    def say(self, peer: bytes, kind: Kind, body: Any = None, **fields: int) -> None:
        data = [] if body is None else [encode_body(body)]
        self.hear(peer, [pack_header(Header(kind, job=JOB, payload_bytes=len(b"".join(data)), **fields)), *data])

    def agree(self) -> None:
        """What members do that mean well: a name gets its layout, or all pass a barrier."""
        if self.rng.random() < 0.3:
            for peer in (b"w0", b"w1"):
                self.say(peer, Kind.BARRIER, step=self.rng.choice([1, 1, 2, 3]))
            return
        one = replace(self.rng.choice(DECLARATIONS), name=self.rng.choice("mnopqrst"))
        for peer in (b"w1", b"w0"):
            self.say(peer, Kind.DECLARE, Declare(one.name, one.digest()), plan=1)
            self.say(peer, Kind.DECLARATION, one.to_json(), plan=1)
        for layout in range(1, 9):
            self.say(b"s0", Kind.KEYS_READY, plan=layout)

    def hear(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            header, payload = message_of([zmq.Frame(each) for each in frames], any_version=True)
        except RemoteProtocolError:
            self.refused += 1
            return
        self.heard += 1
        self.carry_out(self.membership.receive(peer, header, b"" if payload is None else payload.tobytes(), self.now))

    def carry_out(self, actions: list[Action]) -> None:
        ends = [action for action in actions if isinstance(action, End)]
        for action in actions:
            if isinstance(action, Keep):
                assert from_json(json.loads(json.dumps(to_json(action.record)))) == action.record
            elif isinstance(action, Send):
                pack_header(action.header)
                if action.header.kind == Kind.OBSERVE:
                    self.look(action)
        if ends:
            assert "\n" not in ends[0].reason
            self.ended += 1
            self.begin()

    def look(self, answer: Send) -> None:
        """As ``psgc top`` does with it."""
        view(Observed.from_body(decode_json(answer.body, "OBSERVE")))
        self.read += 1

    def tick(self) -> None:
        self.now += self.rng.choice([0.3, 1.0, 1.0, 6.0, 30.0])
        self.carry_out(self.membership.tick(self.now))

    def follow(self) -> None:
        """Another process of the scheduler goes on from what this one has written down."""
        if self.membership.agreements is None or self.membership.failed is not None:
            return
        written = [from_json(json.loads(json.dumps(to_json(record)))) for record in self.membership.records()]
        following = self.fresh()
        following.resume(written, self.now)
        if following.failed is not None:  # what was under way cannot be taken up, and it says so
            self.begin()
            return
        assert [to_json(record) for record in following.records()] == [to_json(record) for record in written]
        self.membership = following


def changed(rng: random.Random, body: Any) -> Any:
    """A value for JSON, with something in it replaced, left out or added."""
    if isinstance(body, dict) and body and rng.random() < 0.9:
        key = rng.choice(list(body))
        return {**body, key: changed(rng, body[key])} if rng.random() < 0.8 else {name: each for name, each in body.items() if name != key}
    if isinstance(body, list) and body and rng.random() < 0.7:
        place = rng.randrange(len(body))
        return [*body[:place], changed(rng, body[place]), *body[place + 1 :]]
    if isinstance(body, int) and rng.random() < 0.5:
        return body + rng.choice([-1, 1, 2])
    return rng.choice(ODD)


def anything(rng: random.Random) -> list[bytes]:
    """From a right message to noise: its frames."""
    kind = rng.choice(rng.choices((LIVELY, BARE, ENDING), (80, 18, 2))[0])
    body = b""
    if kind in BODIES and (one := rng.choice(BODIES[kind])) is not None:
        value = json.loads(encode_body(one))
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            value = changed(rng, value)
        body = json.dumps(value).encode()
        if rng.random() < 0.1:
            body = pack(body * 300 if rng.random() < 0.3 else body.ljust(1 << 14))
    chance = rng.random()
    if chance < 0.05 and body:
        body = flipped(rng, body)
    elif chance < 0.1:
        body = noise(rng)
    header = Header(
        kind, rng.choice([0, 0, rng.getrandbits(6)]), JOB, rng.choice([0, 1, 2]), rng.choice([0, 1, 2, rng.getrandbits(16)]),
        rng.choice([0, 1, rng.getrandbits(64)]), rng.choice([0, 1, 2, rng.getrandbits(40)]), 0, 0, rng.choice([0, 1, SERVER_SENDER, rng.getrandbits(32)]), 0,
        1.0, len(body) if rng.random() < 0.98 else rng.getrandbits(rng.randrange(64)),
    )  # fmt: skip
    packed = pack_header(header)
    if rng.random() < 0.1:
        packed = flipped(rng, packed)
    frames = [packed, body] if body else [packed]
    if rng.random() < 0.02:
        frames = rng.choice([[], [b""], [*frames, b"more"], frames[1:], [frames[0][:-1], *frames[1:]]])
    return frames


def fuzz(messages: int, seed: int) -> Fuzzed:
    rng = random.Random(seed)
    scheduler = Fuzzed(rng)

    def once(_: int) -> None:
        scheduler.hear(rng.choice(PEERS), anything(rng))
        chance = rng.random()
        if chance < (0.5 if scheduler.membership.failed is not None else 0.02):
            scheduler.tick()
        elif chance > 0.98:
            scheduler.agree()
        elif chance < 0.025:
            scheduler.hear(b"observer", [pack_header(Header(Kind.OBSERVE, job=JOB))])
        elif chance < 0.03:
            scheduler.follow()

    repeat(messages, once)
    return scheduler


def test_some_thousand_messages_break_nothing() -> None:
    scheduler = fuzz(6000, seed=1)
    assert scheduler.heard > 4000, "most of it was read"
    assert scheduler.ended > 10, "and some ended a job"
    assert scheduler.read > 5, "and observers saw it"


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_messages_break_nothing_and_leave_nothing_behind() -> None:
    fuzz(1_000_000, seed=int.from_bytes(os.urandom(4), "little"))
