"""One key's state over its steps: which ranks have contributed, when their payloads are folded, and which messages answer them.

Pure: no sockets, clocks, threads or numbers. Payloads are opaque; the loop carries out the actions that come back.

Invariants: ``step`` is the one being collected; ``result`` is the outcome of ``step - 1`` and is kept until every rank of the key has
contributed to ``step`` (so each of them has decoded it), but for ranks that are absent; a contribution is never counted twice; nothing depends on arrival
order; a result is queued at most once on a rank's connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from psgc.errors import RemoteProtocolError, raised_alone
from psgc.layout import key_text
from psgc.layout.update_rule import UpdateRule
from psgc.server.actions import Action, Commit, Fold, KeepLate, Kept, Lend, Reply, Restore
from psgc.server.late import NOTHING_LATE, Late
from psgc.server.records import NO_SLOT, Contribution, Result
from psgc.wire.frames import Flag, Header, Kind
from psgc.wire.messages import RESIDUAL_NUMEL, ErrorCode

FOLD_RANKS: Final = 8  # ranks folded in one pass; part of the published order of sums
SMALL_BYTES: Final = 64 << 10  # of a pass's payloads, and of the sum in float32: tens of microseconds of work
_F32: Final = struct.Struct("<f")
_MAX_RESCALE: Final = 3e38


@dataclass(frozen=True, slots=True)
class KeySpec:
    """The constants of a key, given at registration. ranks: the ranks that contribute to each step by a push or a skip, ascending: all, or those that push
    their nodes' sums; root: the only rank that pushes in a broadcast; None for sums; at_once: the loop carries out the key's
    Folds at once, so that the contribution that completes a step is answered with the result; backup: how many ranks' contributions a step need not wait
    for (``late.py``)."""

    key: int
    numel: int
    ranks: Sequence[int]
    push_codec: int
    pull_codec: int
    divisor: int = 1
    root: int | None = None
    pull_feedback: bool = False
    layout: int = 0
    name: str = ""
    rule: UpdateRule | None = None  # of weights; ``root`` is then the rank that brings their initial values
    at_once: bool = False
    backup: int = 0

    def describe(self) -> str:
        return f"key {key_text(self.key)} ({self.name})"


@dataclass(slots=True)
class KeyState:
    """See the module's text. Methods return actions, in the order in which they must be carried out."""

    spec: KeySpec
    step: int = 1
    contributions: dict[int, Contribution] = field(default_factory=dict)
    wants: set[int] = field(default_factory=set)
    result: Result | None = None
    queued: int = 0  # bits: ranks on whose present connection ``result`` has been queued
    next_block: int = 0
    poisoned: bool = False  # a contribution of this step is not finite
    fresh: bool = True  # the accumulator is still empty
    folding: bool = False
    last_slot: int = NO_SLOT  # the newest result with a payload, and with it the newest residual
    add_back: bool = False
    rescale: float = 1.0  # of the residual's unit, since the residual was last written; a binary32, as headers carry it
    restored: dict[int, int] = field(default_factory=dict)  # elements restored before the first step: first element -> rank
    withdrawn: set[int] = field(
        default_factory=set
    )  # ranks of whose contribution the sum is past, but whose present process has not contributed yet
    absent: set[int] = field(default_factory=set)  # ranks without a process: steps are complete without them
    without: set[int] = field(default_factory=set)  # absent ranks that the sum under way is past
    new: set[int] = field(default_factory=set)  # ranks whose present process has not come to this step yet, having taken another's place
    late: Late | None = (
        None  # of a key whose steps do not wait for every rank; then no process takes another's place, and no rank is absent
    )

    def __post_init__(self) -> None:
        if self.spec.backup:
            self.late = Late(self.spec.backup)

    def take_up(self, kept: Kept) -> None:
        """Go on from what a former process of this server has kept. The step that was under way begins again: workers still have its payloads."""
        self.step = 1 if kept.result is None else kept.result.step + 1
        self.result, self.last_slot = kept.result, kept.newest
        self.add_back, self.rescale = kept.add_back, kept.rescale
        if self.late is not None:
            self.late.take_up(kept.late)

    def contribute(self, rank: int, header: Header, payload: Any) -> list[Action]:
        """Handle a PUSH or SKIP of this key. Repeats are acknowledged and answered, but never added. Raises RemoteProtocolError."""
        self._check_contributor(rank)
        if header.step < self.step - 1 and rank in self.new:
            raise RemoteProtocolError(
                f"worker {rank}, whose process has taken a dead one's place, begins a step in which {self.spec.describe()} was synchronised twice or "
                f"more before; the first result is gone: give what one step of psgc.torch.Elastic synchronises several times a name each time",
                ErrorCode.WRONG_STEP,
            )
        if header.step == self.step - 1 and self.late is not None and self.late.owes(rank):
            return self._take_late(self.late, rank, header, payload)
        if header.step < self.step:
            return self._answer_repeat(rank, header.step)
        if header.step > self.step:
            raise RemoteProtocolError(
                f"worker {rank}: contribution to step {header.step}, but {self.spec.describe()} is at step {self.step}; "
                f"a worker sends the next step only after it decoded the last one",
                ErrorCode.WRONG_STEP,
            )
        if self.late is not None and self.late.owes(rank):
            raise RemoteProtocolError(
                f"worker {rank}: contribution to step {header.step} of {self.spec.describe()} before that to step {header.step - 1}",
                ErrorCode.WRONG_STEP,
            )
        self.new.discard(rank)
        if rank in self.withdrawn:
            self.withdrawn.discard(rank)
            self.wants.add(rank)
            return [self._ack(rank, header.step), *self._advance()]
        if rank in self.contributions or rank in self.without:  # also where the step is being completed without a rank that has come back
            self.wants.add(rank)
            return [self._ack(rank, header.step)]
        contribution = self._checked(rank, header, payload)
        self._check_agreement(self.step, rank, contribution, islice(self.contributions.items(), 1))  # those that are here agree with it
        if header.flags & Flag.WANT_RESULT:
            self.wants.add(rank)
        if self.late is not None and self.late.closed:
            self.late.tardy.setdefault(rank, contribution)
            return [self._ack(rank, header.step)]
        self.contributions[rank] = contribution
        self.poisoned |= contribution.nonfinite
        if self.late is not None:
            self.late.dropped = contribution.previous_skipped and not self.spec.pull_feedback
        if self.late is not None and self._may_close(self.late):
            self.late.closed, self.late.held_up_by = True, -1
        actions = self._advance()
        over = self.step > header.step or (self.spec.at_once and not self.withdrawn and self._all_settled)
        return actions if over and header.flags & Flag.WANT_RESULT else [self._ack(rank, header.step), *actions]

    def pull(self, rank: int, step: int) -> list[Action]:
        """Answer a PULL with the kept result. No answer yet if the step is not complete, and none if the result is queued on this connection
        already. Raises RemoteProtocolError, with PUSH_MISSING if this rank's push never came."""
        self._check_contributor(rank)
        late = self.late
        owes = late is not None and late.owes(rank)
        if self.result is not None and step == self.result.step and not owes:
            return [self._ack(rank, step) if self._is_queued(rank) else self._answer(rank)]
        if late is not None and owes and late.earlier is not None and step == late.earlier.step:
            return [self._ack(rank, step) if late.queued >> rank & 1 else self._answer_earlier(late, late.earlier, rank)]
        if step == self.step and (rank in self.contributions or (late is not None and rank in late.tardy)) and rank not in self.withdrawn:
            self.wants.add(rank)
            return [self._ack(rank, step)]
        if step < self.step and not (owes and step == self.step - 1):
            return []  # out of date: the worker has decoded that result since
        raise RemoteProtocolError(f"{self.spec.describe()}: no push of step {step} from worker {rank} has come", ErrorCode.PUSH_MISSING)

    def reconnected(self, rank: int) -> None:
        """The rank has a new connection: messages that were queued on the old one may be lost."""
        self.queued &= ~(1 << rank)
        if self.late is not None:
            self.late.queued &= ~(1 << rank)

    def replaced(self, rank: int) -> None:
        """Another process has taken the rank's place. What the former one has contributed to this step does not count: the new one may still have to take the
        step before, whose result is kept until it comes to this one. Where the sum is past the rank already, it stays as it is, with the former one's
        contribution or, if the rank was absent, without any, and what comes stands for that."""
        self.wants.discard(rank)
        self.reconnected(rank)
        self.new.add(rank)
        was_absent = rank in self.absent
        self.absent.discard(rank)
        if not self.contributions or (self.folding and self.next_block == self._blocks - 1):
            return  # of a step that is being completed all ranks with a process are known to have taken the one before
        if self.spec.ranks.index(rank) // FOLD_RANKS < self.next_block + self.folding:
            if was_absent and rank in self.without:
                first = next(iter(self.contributions.values()))
                self.contributions[rank] = Contribution(None, True, False, first.previous_skipped, first.rescale)
            self.withdrawn.add(rank)
        elif rank in self.contributions:
            del self.contributions[rank]
            self.poisoned = any(contribution.nonfinite for contribution in self.contributions.values())

    def leave_out(self, rank: int) -> list[Action]:
        """The rank's process has died, and the job goes on without it: its contribution counts where it has come, and is not awaited. A broadcast's root is
        awaited: nobody else has its values."""
        self.wants.discard(rank)
        self.reconnected(rank)
        if rank == self.spec.root:
            return []
        self.absent.add(rank)
        self.withdrawn.discard(rank)
        return self._advance() if self.contributions else []

    def residual(self, rank: int, header: Header) -> list[Action]:
        """Answer a RESIDUAL with elements of the residual as of this rank's last step. Changes nothing. Raises RemoteProtocolError."""
        numel = self._residual_elements(rank, header)
        if header.step >= self.step:
            raise RemoteProtocolError(
                f"worker {rank}: asks after the residual after step {header.step} of {self.spec.describe()}, which is at step {self.step}",
                ErrorCode.WRONG_STEP,
            )
        if header.step < self.step - 1 or rank in self.contributions:
            return []  # out of date: the worker has gone on since
        pending = self.add_back or (bool(header.flags & Flag.PREVIOUS_SKIPPED) and self._last_had_payload)
        answer = Header(
            Kind.RESIDUAL, plan=self.spec.layout, key=self.spec.key, step=header.step, contributors=header.contributors,
            rescale=self.rescale, payload_bytes=4 * numel,
        )  # fmt: skip
        return [Lend(rank, answer, self.last_slot if pending else NO_SLOT)]

    def restore(self, rank: int, header: Header, payload: Any) -> list[Action]:
        """Handle a RESTORE, which sets elements of the residual that the key begins with. Repeats are answered, but not set again. Raises
        RemoteProtocolError."""
        first, numel = header.contributors, header.payload_bytes // 4
        most = self._residual_elements(rank, header)
        answer = Reply(rank, Header(Kind.RESTORE, plan=self.spec.layout, key=self.spec.key, contributors=first))
        if self.restored.get(first) == rank:
            return [answer]
        if not 1 <= numel <= most or header.payload_bytes % 4:
            raise RemoteProtocolError(
                f"worker {rank}: {header.payload_bytes} bytes for the residual of {self.spec.describe()} from element {first} on; expected "
                f"1 to {most} elements of 4 bytes",
                ErrorCode.BAD_PAYLOAD,
            )
        if self.step > 1 or self.contributions:
            raise RemoteProtocolError(
                f"worker {rank}: restores the residual of {self.spec.describe()} after its first step has begun; "
                f"every rank restores before any of them pushes",
                ErrorCode.WRONG_STEP,
            )
        self.restored[first] = rank
        self.rescale = header.rescale
        return [Restore(self.spec.key, first, payload, self.rescale), answer]

    def folded(self, last: bool, payload_bytes: int = 0, nonfinite: bool = False, slot: int = NO_SLOT) -> list[Action]:
        """The engine has carried out the Fold under way."""
        self.folding = False
        if not last:
            self.fresh = False
            if self.late is not None and self.late.folded < len(self.late.slots):
                self.late.folded += FOLD_RANKS
            else:
                self.next_block += 1
            return self._advance()
        flags = Flag.NONFINITE if nonfinite else Flag.NONE
        kept = NO_SLOT if nonfinite else slot
        return self._commit(Result(self.step, flags, self._contributors(), kept, 0 if nonfinite else payload_bytes))

    def awaited(self) -> list[int]:
        """Ranks whose contribution to the present step is missing; empty while no rank has contributed."""
        if not self.contributions:
            return []
        missing = [rank for rank in self.spec.ranks if not self._settled(rank) or rank in self.withdrawn]
        late = self.late
        return late.awaited if late is not None and self._needs_no_more(late, len(missing)) else missing

    def wait_text(self, missing: str, more: str = "") -> str:
        """A log line on what is awaited from the ranks ``missing``. more: words on further keys that are awaited from them."""
        return f"step {self.step} of {self.spec.describe()}{more} has awaited rank(s) {missing}"

    def left_text(self, gone: str) -> str:
        """Why the step cannot end, after ranks that are awaited have left."""
        return f"rank(s) {gone} left the job, but step {self.step} of {self.spec.describe()} awaits them: every rank must run the same number of steps"

    def _check_contributor(self, rank: int) -> None:
        if rank not in self.spec.ranks:
            ranks = ", ".join(map(str, self.spec.ranks[:8])) + (" ..." if len(self.spec.ranks) > 8 else "")
            raise RemoteProtocolError(
                f"worker {rank}: {self.spec.describe()} is contributed to by rank(s) {ranks}, which have the sums of their nodes, not by this one",
                ErrorCode.NO_CONTRIBUTOR,
            )

    def _residual_elements(self, rank: int, header: Header) -> int:
        """How many elements one message may carry. Raises RemoteProtocolError if the key has no residual there."""
        first = header.contributors
        if not self.spec.pull_feedback or first >= self.spec.numel:
            raise RemoteProtocolError(
                f"worker {rank}: residual of {self.spec.describe()} from element {first} on; it keeps "
                f"{self.spec.numel if self.spec.pull_feedback else 'none'}",
                ErrorCode.MALFORMED,
            )
        return min(RESIDUAL_NUMEL, self.spec.numel - first)

    @property
    def _last_had_payload(self) -> bool:
        return self.result is not None and self.result.slot != NO_SLOT

    def _checked(self, rank: int, header: Header, payload: Any) -> Contribution:
        skipped, nonfinite = header.kind == Kind.SKIP, bool(header.flags & Flag.NONFINITE)
        root = self.spec.root
        if root is not None and skipped == (rank == root):
            what = "the root must push" if rank == root else f"only the root, rank {root}, pushes"
            raise RemoteProtocolError(f"worker {rank}: broadcast {self.spec.describe()}: {what}", ErrorCode.DISAGREE)
        if not skipped and header.codec != self.spec.push_codec:
            raise RemoteProtocolError(
                f"worker {rank}: {self.spec.describe()} is registered with codec id {self.spec.push_codec}, got {header.codec}",
                ErrorCode.WRONG_CODEC,
            )
        previous_skipped, raised = bool(header.flags & Flag.PREVIOUS_SKIPPED), bool(header.flags & Flag.RAISED)
        return Contribution(
            None if skipped or nonfinite else payload, skipped, nonfinite, previous_skipped, header.rescale, raised, header.payload_bytes
        )

    def _check_agreement(self, step: int, rank: int, said: Contribution, others: Iterable[tuple[int, Contribution]]) -> None:
        """Raise RemoteProtocolError unless the others say the same of the step before ``step``."""
        for other, seen in others:
            if (seen.previous_skipped, seen.rescale) != (said.previous_skipped, said.rescale):
                if said.previous_skipped != seen.previous_skipped and (said.raised or seen.raised):
                    text = raised_alone(rank if said.raised else other, f"step {step - 1} of {self.spec.describe()}")
                    raise RemoteProtocolError(text, ErrorCode.DISAGREE)
                raise RemoteProtocolError(
                    f"ranks disagree on step {step} of {self.spec.describe()}: rank {other} says previous step "
                    f"{'skipped' if seen.previous_skipped else 'applied'}, rescale {seen.rescale:g}; rank {rank} says "
                    f"{'skipped' if said.previous_skipped else 'applied'}, {said.rescale:g}; skip steps and set learning rates alike everywhere",
                    ErrorCode.DISAGREE,
                )

    def _may_close(self, late: Late) -> bool:
        """Whether the step under way need not wait for anybody any more."""
        return self._needs_no_more(late, len(self.spec.ranks) - len(self.contributions)) and not late.awaited

    def _needs_no_more(self, late: Late, missing: int) -> bool:
        """Whether the step may be closed without ``missing`` ranks, once everything has come that the last one was closed without. A sum of skips alone waits
        for all: SKIPPED says that every rank has skipped, and leaves gradients as they are."""
        return missing <= late.most and (not missing or bool(late.awaited or self._contributors()))

    def _take_late(self, late: Late, rank: int, header: Header, payload: Any) -> list[Action]:
        """The last step was closed without this."""
        contribution = self._checked(rank, header, payload)
        self._check_agreement(header.step, rank, contribution, () if late.first is None else (late.first,))
        actions: list[Action] = [self._keep_late(late, rank, contribution)]
        actions.append(self._answer(rank) if header.flags & Flag.WANT_RESULT else self._ack(rank, header.step))
        if self.contributions and self._may_close(late):
            late.closed, late.held_up_by = True, rank
        return actions + self._advance() if self.contributions else actions

    def _keep_late(self, late: Late, rank: int, contribution: Contribution) -> KeepLate:
        assert self.result is not None
        if (
            self.result.flags & Flag.NONFINITE
        ):  # all others have dropped their contributions to that step, and this rank will, residual and all
            contribution = Contribution(None, True, False, contribution.previous_skipped, contribution.rescale)
        slot = late.take(rank, contribution)
        return KeepLate(slot, contribution.payload, Commit(self.spec.key, self.result, False, self.add_back, self.rescale, late.kept))

    def _fold_late(self, late: Late) -> Fold | None:
        """The next block of late contributions, which come before all others in a sum; None if none is left. All of them have come."""
        slots = late.slots[late.folded : late.folded + FOLD_RANKS]
        if not slots or self._is_poisoned:
            return None
        rest = late.slots[late.folded + FOLD_RANKS :]
        unit = 1.0 if rest else next(iter(self.contributions.values())).rescale
        return Fold(self.spec.key, self.step, (), self.fresh, last=False, rescale=unit, late=tuple(slots))

    @property
    def _is_poisoned(self) -> bool:
        return self.poisoned or (self.late is not None and self.late.poisoned)

    @property
    def _blocks(self) -> int:
        return -(-len(self.spec.ranks) // FOLD_RANKS)

    def _advance(self) -> list[Action]:
        """Fold the next block if it is complete and nothing is being folded."""
        late = self.late
        while not self.folding:
            if late is not None and late.awaited:
                return []
            if late is not None and (fold := self._fold_late(late)) is not None:
                self.folding = True
                return [fold]
            ranks = self.spec.ranks[self.next_block * FOLD_RANKS : (self.next_block + 1) * FOLD_RANKS]
            if not all(map(self._settled, ranks)):
                return []
            came = (
                [self.contributions[rank] for rank in ranks if rank in self.contributions]
                if self.absent or late is not None
                else map(self.contributions.__getitem__, ranks)
            )
            payloads = tuple(c.payload for c in came if c.payload is not None)
            if self.next_block == self._blocks - 1 and self.withdrawn:
                return []
            if self.absent:
                self.without.update(self.absent.intersection(ranks).difference(self.contributions))
            if self.next_block == self._blocks - 1:
                return self._complete(payloads)
            if payloads and not self._is_poisoned:
                self.folding = True
                return [Fold(self.spec.key, self.step, payloads, self.fresh, last=False)]
            self.next_block += 1
        return []

    def _complete(self, payloads: tuple[Any, ...]) -> list[Action]:
        """Complete the step: every rank has contributed and all earlier blocks are folded."""
        self._carry_forward()
        contributors = self._contributors()
        if contributors == 0:
            return self._commit(Result(self.step, Flag.SKIPPED, 0))
        if self._is_poisoned:
            return self._commit(Result(self.step, Flag.NONFINITE, contributors))
        self.folding = True
        add_back = self.last_slot if self.add_back else NO_SLOT
        slot = 1 - max(self.last_slot, 0)
        return [Fold(self.spec.key, self.step, payloads, self.fresh, True, slot, add_back, self.rescale, divisor=self._divisor)]

    def _settled(self, rank: int) -> bool:
        """Whether nothing of the rank is awaited in this step, unless its contribution is withdrawn."""
        return rank in self.contributions or rank in self.absent or (self.late is not None and self.late.closed)

    @property
    def _all_settled(self) -> bool:
        missing = len(self.spec.ranks) - len(self.contributions)
        if self.late is not None:
            return self.late.closed
        return not missing or bool(self.absent and missing == len(self.absent.difference(self.contributions)))

    @property
    def _divisor(self) -> int:
        """Of a mean over ranks: those that the step is with. Else as the layout says."""
        return self.spec.divisor - len(self.without) if self.spec.divisor == len(self.spec.ranks) else self.spec.divisor

    def _carry_forward(self) -> None:
        """Note whether the ranks applied the last step; it takes effect at the next step that has a payload."""
        first = next(iter(self.contributions.values()))
        if first.previous_skipped and self.spec.pull_feedback and self._last_had_payload:
            self.add_back = True
        product = max(-_MAX_RESCALE, min(self.rescale * first.rescale, _MAX_RESCALE))
        self.rescale = _F32.unpack(_F32.pack(product))[0]

    def _commit(self, result: Result) -> list[Action]:
        residual = result.slot != NO_SLOT and self.spec.pull_feedback
        if result.slot != NO_SLOT:
            self.last_slot, self.add_back, self.rescale = result.slot, False, 1.0
        late = self.late
        if late is not None:
            late.completed(self.result, self.queued, self.spec.ranks, self.contributions)
        self.result, self.queued = result, 0
        self.step += 1
        self.contributions.clear()
        self.without.clear()
        self.next_block, self.fresh, self.poisoned = 0, True, False
        wants, self.wants = sorted(self.wants), set()
        kept = NOTHING_LATE if late is None else late.kept
        commit = Commit(self.spec.key, result, residual, self.add_back, self.rescale, kept)
        if late is None:
            return [commit, *(self._answer(rank) for rank in wants)]
        return [commit, *(self._answer(rank) for rank in wants if rank not in late.tardy), *self._keep_tardy(late, wants)]

    def _keep_tardy(self, late: Late, wants: Sequence[int]) -> list[Action]:
        """Keep what has come while its step was being completed."""
        actions: list[Action] = []
        for rank, contribution in late.tardy.items():
            actions.append(self._keep_late(late, rank, contribution))
            actions += [self._answer(rank)] if rank in wants else []
        late.tardy.clear()
        return actions

    def _contributors(self) -> int:
        return sum(not c.skipped for c in self.contributions.values()) + (0 if self.late is None else self.late.contributors)

    def _answer_repeat(self, rank: int, step: int) -> list[Action]:
        ack: list[Action] = [self._ack(rank, step)]
        late = self.late
        if self.result is not None and step == self.result.step and not self._is_queued(rank):
            ack.append(self._answer(rank))
        elif (
            late is not None and late.earlier is not None and step == late.earlier.step and late.owes(rank) and not late.queued >> rank & 1
        ):
            ack.append(self._answer_earlier(late, late.earlier, rank))
        return ack

    def _is_queued(self, rank: int) -> bool:
        return bool(self.queued >> rank & 1)

    def _ack(self, rank: int, step: int) -> Reply:
        return Reply(rank, Header(Kind.ACK, plan=self.spec.layout, key=self.spec.key, step=step))

    def _answer(self, rank: int) -> Reply:
        assert self.result is not None
        self.queued |= 1 << rank
        return self._reply(rank, self.result)

    def _answer_earlier(self, late: Late, earlier: Result, rank: int) -> Reply:
        """The last step was closed without the rank, which may not have got the result before it."""
        late.queued |= 1 << rank
        return self._reply(rank, earlier)

    def _reply(self, rank: int, result: Result) -> Reply:
        header = Header(
            Kind.RESULT, result.flags, plan=self.spec.layout, key=self.spec.key, step=result.step, codec=self.spec.pull_codec,
            contributors=result.contributors, payload_bytes=result.payload_bytes,
        )  # fmt: skip
        return Reply(rank, header, result)


__all__ = [
    "FOLD_RANKS", "NO_SLOT", "SMALL_BYTES", "Action", "Commit", "Contribution", "Fold", "KeepLate", "Kept", "KeySpec", "KeyState", "Lend", "Reply", "Restore",
    "Result",
]  # fmt: skip
