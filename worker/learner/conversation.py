"""What a learner has said and still waits for, and what it says on a new connection. Pure: no sockets, clocks, threads or numbers.

Every message may be lost with its connection; on the next one the learner enrols again and repeats what is unanswered. The syncer counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from psgc.errors import RemoteProtocolError
from psgc.wire.frames import Header, Kind
from psgc.wire.learners import INITIAL, Enrol, Enrolled
from psgc.wire.messages import Notice, decode_body, encode_body


class Message(NamedTuple):
    """payload: bytes or a uint8 array, which stays as it is until it is answered."""

    header: Header
    payload: Any = None


class Values(NamedTuple):
    """A fragment's values as they came: version, and payload."""

    version: int
    payload: Any


@dataclass(slots=True)
class Conversation:
    """held: by fragment, the values that progress is measured from, of which only ``bring`` knows more: first the learner's own, then the syncer's, and with
    a push under way, what the parameters were when it left. bring: makes the payload of initial values of a fragment, of ``held``, the payload of a push that
    is not answered, and that of an answer that was not taken yet, or None; it may raise RemoteProtocolError.

    answers: by fragment, the values that have come and were not taken yet. failed: why this learner must end, once it must. over: BYE was answered. awaits:
    the learner whose initial values the syncer awaits, as far as is known."""

    enrol: Enrol
    held: list[Any]
    bring: Callable[[int, Any, Any, Any], Any]
    answers: dict[int, Values] = field(default_factory=dict)
    failed: str = ""
    over: bool = False
    awaits: str = ""
    enrolled: bool = False  # on the present connection
    _numbers: list[int] = field(init=False)
    _unanswered: dict[int, Message] = field(default_factory=dict)  # by fragment
    _withheld: set[int] = field(default_factory=set)  # fragments whose push leaves once the syncer has values
    _leaving: bool = False

    def __post_init__(self) -> None:
        self._numbers = [INITIAL] * len(self.enrol.sizes)
        for fragment in range(len(self.enrol.sizes)):
            self._unanswered[fragment] = Message(Header(Kind.PULL, key=fragment))

    def connected(self) -> list[Message]:
        """The connection is new. A learner that must end says nothing: enrolling again would end the process that has taken its place."""
        self.enrolled = False
        return [] if self.failed else [Message(Header(Kind.REGISTER), encode_body(self.enrol))]

    def disconnected(self) -> None:
        self.enrolled = False

    def push(self, fragment: int, version: int, payload: Any, held: Any) -> list[Message]:
        """Say how far the fragment has come from the values of ``version``. The last push must have been answered."""
        assert fragment not in self._unanswered, "a fragment has one push under way"
        self._numbers[fragment] += 1
        self.held[fragment] = held
        message = Message(Header(Kind.PUSH, key=fragment, step=self._numbers[fragment], plan=version), payload)
        self._unanswered[fragment] = message
        if self.enrolled and self.awaits not in ("", self.enrol.name):
            self._withheld.add(fragment)
            return []
        return [message] if self.enrolled else []

    def took(self, fragment: int, held: Any) -> None:
        """The last answer was taken."""
        self.held[fragment] = held

    def waits(self, fragment: int) -> bool:
        """Whether an answer is to come."""
        return fragment in self._unanswered

    @property
    def unanswered(self) -> int:
        """How many fragments wait for an answer."""
        return len(self._unanswered)

    def leave(self) -> list[Message]:
        """Nothing more will be said."""
        self._leaving = True
        return [Message(Header(Kind.BYE))] if self.enrolled else []

    def receive(self, header: Header, payload: Any) -> list[Message]:
        """Handle one message. Raises RemoteProtocolError."""
        if self.failed:
            return []
        if header.kind == Kind.LAYOUT:
            return self._admitted(decode_body(Enrolled, b"" if payload is None else bytes(payload)))
        if header.kind == Kind.RESULT:
            waiting = self._unanswered.get(header.key)
            if waiting is not None and header.step == waiting.header.step and payload is not None:
                del self._unanswered[header.key]
                self.answers[header.key] = Values(header.plan, payload)
                self.awaits = ""
            return []
        if header.kind == Kind.ERROR:
            self.failed = decode_body(Notice, b"" if payload is None else bytes(payload)).text
            self.enrolled = False
            return []
        if header.kind == Kind.BYE:
            self.over = True
            return []
        raise RemoteProtocolError(f"a syncer does not send {Kind(header.kind).name}")

    def _admitted(self, enrolled: Enrolled) -> list[Message]:
        again, self.enrolled, self.awaits = self.enrolled, True, enrolled.awaits
        unanswered = list(self._unanswered.values())
        if self._leaving:
            return [] if again else [*([] if self.awaits else unanswered), Message(Header(Kind.BYE))]
        pushes = [message for message in unanswered if message.header.step != INITIAL]
        if enrolled.bring:
            # All fragments: those that an earlier syncer has answered are lost with it, too.
            self._withheld = set()
            return [*(self._brought(fragment) for fragment in range(len(self.held))), *pushes]
        if not again:
            self._withheld = {message.header.key for message in pushes} if self.awaits else set()
            return [message for message in unanswered if message.header.key not in self._withheld]
        if self.awaits:
            return []
        withheld, self._withheld = self._withheld, set()
        return [message for message in pushes if message.header.key in withheld]

    def _brought(self, fragment: int) -> Message:
        unanswered, answer = self._unanswered.get(fragment), self.answers.get(fragment)
        pushed, answered = None if unanswered is None else unanswered.payload, None if answer is None else answer.payload
        return Message(Header(Kind.PUSH, key=fragment), self.bring(fragment, self.held[fragment], pushed, answered))
