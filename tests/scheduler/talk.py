"""A scheduler's state machine that tests talk to, and what they look for in its answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from psgc import __version__
from psgc.layout import Declaration, TensorSpec
from psgc.scheduler.actions import Action, End, Log, Send
from psgc.scheduler.membership import Membership
from psgc.wire.frames import SCHEDULER_SENDER, Header, Kind
from psgc.wire.messages import Declare, ErrorCode, Register, decode_json, encode_body

JOB = 77
SILENCE_S, DEAD_S, REGISTER_S, STEP_S = 5.0, 15.0, 300.0, 600.0


def register(role: Any = "worker", node: int = 0, local_rank: int = 0, **other: Any) -> Register:
    pid = 1000 + 10 * node + local_rank if role == "worker" else 2000 + node
    fields = {
        "version": __version__, "host": f"boot/{node}", "hostname": f"host{node}", "pid": pid, "pid_started": 1,
        "nodes": 2, "servers": 1, "node": node, "local_rank": local_rank,
    }  # fmt: skip
    if role == "server":
        fields |= {"node": 0, "address": f"tcp://host{node}:9", "local_address": f"psgc/{node}"}
    return Register(role, **(fields | other))


@dataclass
class Job:
    """A Membership and the words said to it; ``now`` is moved by hand."""

    nodes: int = 2
    servers: int = 1
    now: float = 100.0
    dead: set[int] = field(default_factory=set)  # pids
    here: set[int] = field(default_factory=set)  # pids on the scheduler's own host
    declared: dict[str, Declaration] = field(default_factory=dict)  # the last of each peer
    launched: bool = False
    again: bool = False
    replicas: bool = False
    membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.membership = Membership(
            self.nodes, self.servers, JOB, self.now, self._alive, SILENCE_S, DEAD_S, REGISTER_S, STEP_S, launched=self.launched, again=self.again,
            replicas=self.replicas,
        )  # fmt: skip

    def _alive(self, register: Register) -> bool | None:
        return False if register.pid in self.dead else True if register.pid in self.here else None

    def say(self, peer: str, kind: Kind, body: Any = None, **fields: Any) -> list[Action]:
        data = body if isinstance(body, bytes) else b"" if body is None else encode_body(body)
        header = Header(kind, **{"job": JOB, "payload_bytes": len(data), **fields})
        return self.membership.receive(peer.encode(), header, data, self.now)

    def declare(self, peer: str, declaration: Declaration, plan: int = 1) -> list[Action]:
        """What a worker's coordinator does: its digest, and if it is asked, or another worker is, the whole declaration. All that the
        scheduler said, but its questions."""
        self.declared[peer] = declaration
        actions = self.say(
            peer, Kind.DECLARE, Declare(declaration.name, declaration.digest(), declaration.unused, declaration.members), plan=plan
        )
        asked = [a for a in actions if isinstance(a, Send) and a.header.kind == Kind.DECLARE]
        said = [action for action in actions if action not in asked]
        for question in asked:
            whole = self.declared[question.peer.decode()]
            said += self.say(question.peer.decode(), Kind.DECLARATION, whole.to_json(), plan=question.header.plan)
        return said

    def join(self, peer: str, register: Register) -> list[Action]:
        return self.say(peer, Kind.REGISTER, replace(register, nodes=self.nodes, servers=self.servers))

    def tick(self, after: float = 0.0) -> list[Action]:
        self.now += after
        return self.membership.tick(self.now)

    def run(self, seconds: int) -> list[Action]:
        """A tick a second; what each asked for, together."""
        return [action for _ in range(seconds) for action in self.tick(1)]

    def hear_everyone(self) -> None:
        for member in self.membership.roster:
            if not member.left:
                self.say(member.peer.decode(), Kind.HEARTBEAT)


def complete(nodes: int = 2, servers: int = 1) -> Job:
    """A job whose workers are w0, w1, ... and whose servers are s0, s1, ..."""
    job = Job(nodes, servers)
    for index in range(servers):
        job.join(f"s{index}", register("server", index, index=index))
    for node in range(nodes):
        job.join(f"w{node}", register(node=node))
    assert job.membership.agreements is not None
    return job


def sent(actions: list[Action], kind: Kind) -> dict[str, Any]:
    """Bodies (headers where there is none) of the messages of a kind, by receiver."""
    found: dict[str, Any] = {}
    for action in actions:
        if isinstance(action, Send) and action.header.kind == kind:
            assert action.header.sender == SCHEDULER_SENDER
            assert action.header.payload_bytes == len(action.body)
            found[action.peer.decode()] = decode_json(action.body, "body") if action.body else action.header
    return found


def logged(actions: list[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Log))


def end_of(actions: list[Action]) -> End | None:
    return next((action for action in actions if isinstance(action, End)), None)


def aborted(actions: list[Action]) -> str:
    """The text of the ABORT that everyone got."""
    texts = {body["text"] for body in sent(actions, Kind.ABORT).values()}
    assert len(texts) == 1, actions
    return str(texts.pop())


def refused(actions: list[Action], code: ErrorCode) -> str:
    """The text of the one ERROR reply; nothing else was sent."""
    assert [a.header.kind for a in actions if isinstance(a, Send)] == [Kind.ERROR]
    (notice,) = sent(actions, Kind.ERROR).values()
    assert notice["code"] == code, notice
    return str(notice["text"])


def declaration(name: str = "model", numel: int = 10, **fields: Any) -> Declaration:
    return Declaration(name, "adhoc", (TensorSpec("layer.weight", (numel,), "float32"),), "none", True, **fields)
