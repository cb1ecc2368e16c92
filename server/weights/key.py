"""One key of weights: which deltas have come, when they are applied, and who gets which version of the weights.

Pure: no sockets, clocks, threads or numbers. Payloads are opaque; the loop carries out the actions that come back.

A rank's steps are its own. Its first one brings the initial values (the root's push) or awaits them (the others' skips). Each later push brings a delta and
each later skip brings nothing: both are answered with the weights as they are, a push only once its delta is in them.

Invariants: a delta is applied exactly once; an answer to a push has this push and all earlier ones of its rank in it; a version that a rank may still read, or
that is the newest, is never written; so at most one version for each rank, the newest, and the one being written exist. A rank may read its version until its
next step comes, because it sends that only after it has decoded the last answer. What of this outlives the process is committed (``kept.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from psgc.errors import RemoteProtocolError
from psgc.layout.update_rule import UpdateRule
from psgc.server.step import NO_SLOT, Fold, KeySpec, Lend, Reply, Restore, Result
from psgc.server.weights.kept import AnswerCommit, KeptWeights, VersionCommit
from psgc.server.weights.pace import Pace
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import RESIDUAL_NUMEL, ErrorCode

Action = Reply | Fold | Lend | Restore | VersionCommit | AnswerCommit


@dataclass(slots=True)
class _Rank:
    """One rank's state. step: its last step that has arrived; answered: its last answered step; applied: whether ``step``'s delta is in the weights; slot:
    the version that the rank may be reading; version: the last one that it was given; queued: whether the answer to ``answered`` has been queued on its present
    connection; heard: whether this process has heard from it, so that there is somebody to answer."""

    step: int = 0
    answered: int = 0
    applied: bool = True
    slot: int = NO_SLOT
    version: int = 0
    result: Result | None = None
    queued: bool = False
    heard: bool = True


@dataclass(slots=True)
class WeightsKey:
    """See the module's text. Methods return actions, in the order in which they must be carried out. ``step`` counts versions."""

    spec: KeySpec
    rule: UpdateRule
    workers: int
    step: int = 0
    current: int = NO_SLOT  # the newest version's buffer
    poisoned: bool = False  # a rank has pushed NaN or infinity: the weights are that from now on
    pace: Pace = field(init=False)
    _ranks: list[_Rank] = field(init=False)
    _waiting: deque[int] = field(default_factory=deque)  # ranks whose deltas have come and are not being applied, in order of arrival
    _payloads: dict[int, Any] = field(default_factory=dict)
    _applying: tuple[int, ...] = ()
    _contributors: int = 0  # pushes that made the newest version
    _payload_bytes: int = 0
    _restored: dict[int, int] = field(default_factory=dict)  # elements of the momentum that were set: first element -> rank
    _readers: Counter[int] = field(default_factory=Counter)  # version -> ranks that may read it

    def __post_init__(self) -> None:
        self.pace = Pace([0] * self.workers, self.rule.staleness)
        self._ranks = [_Rank() for _ in range(self.workers)]

    def take_up(self, kept: KeptWeights) -> None:
        """Go on from what a former process of this server has kept. Deltas that were not applied workers send again."""
        self.step, self.current, self.poisoned = kept.version, kept.slot, kept.poisoned
        self._contributors, self._payload_bytes = kept.contributors, kept.payload_bytes
        for rank, of in enumerate(kept.ranks):
            self.pace.pushes[rank], mine = of.pushes, self._ranks[rank]
            mine.step, mine.answered, mine.version, mine.heard = max(of.applied, of.answered), of.answered, of.version, False
            if mine.step == of.answered > 0 and rank not in self.pace.left:  # else it has decoded that answer
                poisoned = of.slot == NO_SLOT
                mine.result = Result(
                    of.answered, Flag.NONFINITE if poisoned else Flag.NONE, of.contributors, of.slot, 0 if poisoned else self._payload_bytes
                )
                mine.slot = of.slot
                self._readers[of.slot] += not poisoned

    def contribute(self, rank: int, header: Header, payload: Any) -> list[Action]:
        """Handle a PUSH or SKIP of this key. Repeats are acknowledged and answered, but never applied again. Raises RemoteProtocolError."""
        mine = self._ranks[rank]
        mine.heard = True
        if header.step <= mine.step:
            return self._again(rank, header.step)
        if header.step != mine.step + 1 or mine.answered != mine.step:
            raise RemoteProtocolError(
                f"worker {rank}: step {header.step} of {self.spec.describe()}, but its step {mine.step} is "
                f"{'answered' if mine.answered == mine.step else 'not answered'}; a worker sends the next step only after it decoded the last one",
                ErrorCode.WRONG_STEP,
            )
        self._check(rank, header)
        self._give_up(mine)
        mine.step, mine.queued = header.step, False
        if header.kind == Kind.SKIP:
            return [self._ack(rank, header.step), *self._release()]
        if self.poisoned or header.flags & Flag.NONFINITE:
            return self._poison(rank)
        mine.applied = False
        self._waiting.append(rank)
        self._payloads[rank] = payload
        # In a round, the acknowledgement is sent at once. Otherwise ranks that push their parts in different orders could run out of credit and deadlock.
        acks = [self._ack(rank, header.step)] if self.rule.in_rounds and self._begun else []
        return [*acks, *self._advance()]

    def folded(self, last: bool, payload_bytes: int = 0, nonfinite: bool = False, slot: int = NO_SLOT) -> list[Action]:
        """The engine has made the next version, in buffer ``slot``."""
        ranks, self._applying = self._applying, ()
        self.step += 1
        self.current, self._payload_bytes, self._contributors = slot, payload_bytes, len(ranks)
        for rank in ranks:
            self._count(rank)
        return [self._made(ranks), *(self._ack(rank, self._ranks[rank].step) for rank in ranks), *self._release(), *self._advance()]

    def pull(self, rank: int, step: int) -> list[Action]:
        """Answer a PULL, which asks after an answer that may be lost. Raises RemoteProtocolError, with PUSH_MISSING if this step never came."""
        self._ranks[rank].heard = True
        if step > self._ranks[rank].step:
            raise RemoteProtocolError(f"{self.spec.describe()}: no step {step} of worker {rank} has come", ErrorCode.PUSH_MISSING)
        return self._again(rank, step) if step == self._ranks[rank].step else []

    def leave(self, rank: int) -> list[Action]:
        """The rank has left the job in order: nobody waits for it any more."""
        if rank in self.pace.left:
            return []
        self.pace.left.add(rank)
        self._give_up(self._ranks[rank])
        return [*self._release(), *self._advance()]

    def reconnected(self, rank: int) -> None:
        """The rank has a new connection: messages that were queued on the old one may be lost."""
        self._ranks[rank].queued = False

    def residual(self, rank: int, header: Header) -> list[Action]:
        """Answer a RESIDUAL with elements of the outer momentum after the rank's last round, which no round can be changing: the next one awaits this rank.
        Raises RemoteProtocolError."""
        numel, mine = self._momentum_elements(rank, header), self._ranks[rank]
        if header.step != mine.step:
            raise RemoteProtocolError(
                f"worker {rank}: asks after the momentum after step {header.step} of {self.spec.describe()}, and is at step {mine.step}",
                ErrorCode.WRONG_STEP,
            )
        if mine.answered != mine.step:
            return []  # out of date: the worker has gone on since
        answer = Header(
            Kind.RESIDUAL,
            plan=self.spec.layout,
            key=self.spec.key,
            step=header.step,
            contributors=header.contributors,
            payload_bytes=4 * numel,
        )
        return [Lend(rank, answer)]

    def restore(self, rank: int, header: Header, payload: Any) -> list[Action]:
        """Handle a RESTORE, which sets elements of the outer momentum that the key begins with. Repeats are answered, but not set again. Raises
        RemoteProtocolError."""
        most, numel = self._momentum_elements(rank, header), header.payload_bytes // 4
        if not 1 <= numel <= most or header.payload_bytes % 4:
            raise RemoteProtocolError(
                f"worker {rank}: {header.payload_bytes} bytes for the momentum of {self.spec.describe()} from element {header.contributors} on; "
                f"expected 1 to {most} elements of 4 bytes",
                ErrorCode.BAD_PAYLOAD,
            )
        answer = Reply(rank, Header(Kind.RESTORE, plan=self.spec.layout, key=self.spec.key, contributors=header.contributors))
        if self._restored.get(header.contributors) == rank:
            return [answer]
        if any(mine.step for mine in self._ranks):
            raise RemoteProtocolError(
                f"worker {rank}: restores the momentum of {self.spec.describe()} after its initial values; every rank restores before any pushes",
                ErrorCode.WRONG_STEP,
            )
        self._restored[header.contributors] = rank
        return [Restore(self.spec.key, header.contributors, payload, 1.0), answer]

    def _momentum_elements(self, rank: int, header: Header) -> int:
        """How many elements one message may carry. Raises RemoteProtocolError if the key has no momentum there."""
        first, numel = header.contributors, self.spec.numel if self.rule.keeps_momentum else 0
        if first >= numel:
            raise RemoteProtocolError(
                f"worker {rank}: momentum of {self.spec.describe()} from element {first} on; it keeps {numel or 'none'}",
                ErrorCode.MALFORMED,
            )
        return min(RESIDUAL_NUMEL, numel - first)

    @property
    def contributions(self) -> list[int]:
        """Ranks that have not been answered."""
        return [rank for rank, mine in enumerate(self._ranks) if mine.answered < mine.step]

    def awaited(self) -> list[int]:
        """Ranks that others wait for: the root before it has brought initial values, those whose delta a round lacks, and those that are too far behind."""
        unanswered = self.contributions
        if not unanswered or self._applying:
            return []
        if not self._begun:
            return [] if self.spec.root in self._payloads or self.spec.root is None else [self.spec.root]
        if self.rule.in_rounds:
            return [rank for rank in self.pace.live() if rank not in self._payloads]
        return sorted({other for rank in unanswered for other in self.pace.holds_up(rank)})

    def wait_text(self, missing: str, more: str = "") -> str:
        """A log line on what is awaited from the ranks ``missing``. more: words on further keys that are awaited from them."""
        if not self._begun:
            return f"{self.spec.describe()}{more} has awaited its initial values from rank(s) {missing}"
        if self.rule.in_rounds:
            return f"round {self.step} of {self.spec.describe()}{more} has awaited rank(s) {missing}"
        ahead = ", ".join(map(str, self.contributions[:8]))
        bound = f"more than {self.rule.staleness} steps (PSGC_STALENESS)"
        return f"rank(s) {ahead}, {bound} ahead at {self.spec.describe()}{more}, awaited rank(s) {missing}"

    def left_text(self, gone: str) -> str:
        """Why nobody can go on, after ranks that are awaited have left."""
        return f"rank(s) {gone} left the job before the initial values of {self.spec.describe()} had come; rank 0 brings them in its first step"

    @property
    def _begun(self) -> bool:
        return self.current != NO_SLOT or self.poisoned

    def _check(self, rank: int, header: Header) -> None:
        skipped, first = header.kind == Kind.SKIP, header.step == 1
        if first and skipped == (rank == self.spec.root):
            what = f"rank {rank} must bring them" if rank == self.spec.root else f"only rank {self.spec.root} brings them"
            raise RemoteProtocolError(f"worker {rank}: initial values of {self.spec.describe()}: {what}", ErrorCode.DISAGREE)
        wanted = self.spec.pull_codec if first else self.spec.push_codec
        if not skipped and header.codec != wanted:
            raise RemoteProtocolError(
                f"worker {rank}: {self.spec.describe()} takes codec id {wanted} in step {header.step}, got {header.codec}",
                ErrorCode.WRONG_CODEC,
            )

    def _poison(self, rank: int) -> list[Action]:
        """Make the weights NaN from now on, whatever is pushed."""
        self.poisoned = True
        pushed = [*self._waiting, rank]
        self._waiting.clear()
        self._payloads.clear()
        for each in pushed:
            self._count(each)
        return [self._made(pushed), *(self._ack(each, self._ranks[each].step) for each in pushed), *self._release()]

    def _made(self, ranks: Iterable[int]) -> VersionCommit:
        """The key's weights are now the newest version, or NaN, and the deltas of these ranks are in them."""
        applied = tuple((rank, self._ranks[rank].step) for rank in ranks)
        return VersionCommit(self.spec.key, self.step, self.current, self._contributors, self._payload_bytes, self.poisoned, applied)

    def _count(self, rank: int) -> None:
        """The rank's delta is in the weights. Its first step is none."""
        mine = self._ranks[rank]
        mine.applied = True
        if mine.step > 1:
            self.pace.pushes[rank] += 1

    def _advance(self) -> list[Action]:
        """Apply what may be applied now, if nothing is being applied."""
        if self._applying or not self._waiting:
            return []
        if not self.rule.in_rounds or not self._begun:
            self._applying = (self._waiting.popleft(),)
        elif all(rank in self._payloads for rank in self.pace.live()):
            self._applying = tuple(sorted(self._waiting))
            self._waiting.clear()
        else:
            return []
        payloads = tuple(self._payloads.pop(rank) for rank in self._applying)
        lacks = self.step - min(self._ranks[rank].version for rank in self._applying) if self._begun else 0
        return [Fold(self.spec.key, self.step + 1, payloads, True, True, self._free_slot(), self.current, staleness=lacks)]

    def _free_slot(self) -> int:
        slot = 0
        while slot == self.current or self._readers[slot]:
            slot += 1
        return slot

    def _release(self) -> list[Action]:
        """Answer everyone who may go on. In a round nobody is ahead of it: an answer then has the round's deltas in it."""
        if not self._begun:
            return []
        return [
            action
            for rank, mine in enumerate(self._ranks)
            if mine.answered < mine.step and mine.applied and mine.heard and self.pace.may_go_on(rank)
            for action in self._answer(rank)
        ]

    def _answer(self, rank: int) -> list[Action]:
        mine = self._ranks[rank]
        if self.poisoned:
            mine.result = Result(mine.step, Flag.NONFINITE, self._contributors)
        else:
            mine.slot, mine.version = self.current, self.step
            self._readers[mine.slot] += 1
            mine.result = Result(mine.step, Flag.NONE, self._contributors, mine.slot, self._payload_bytes)
        mine.answered = mine.step
        _, _, contributors, slot, _ = mine.result
        return [AnswerCommit(self.spec.key, rank, mine.step, self.step, slot, contributors), self._send(rank)]

    def _send(self, rank: int) -> Reply:
        mine = self._ranks[rank]
        result = mine.result
        assert result is not None
        mine.queued = True
        header = Header(
            Kind.RESULT, result.flags, plan=self.spec.layout, key=self.spec.key, step=result.step, codec=self.spec.pull_codec,
            contributors=result.contributors, payload_bytes=result.payload_bytes,
        )  # fmt: skip
        return Reply(rank, header, result)

    def _again(self, rank: int, step: int) -> list[Action]:
        """Answer a message that has come before, or a question."""
        mine = self._ranks[rank]
        if step == mine.answered and not mine.queued:
            return [self._ack(rank, step), self._send(rank)]
        return [self._ack(rank, step), *self._release()]

    def _give_up(self, mine: _Rank) -> None:
        """The rank reads its version no more."""
        if mine.slot != NO_SLOT:
            self._readers[mine.slot] -= 1
        mine.slot, mine.result = NO_SLOT, None

    def _ack(self, rank: int, step: int) -> Reply:
        return Reply(rank, Header(Kind.ACK, plan=self.spec.layout, key=self.spec.key, step=step))
