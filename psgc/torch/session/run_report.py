"""The log lines of a run: one when gradients get a layout, one every PSGC_LOG_STEPS steps, and a summary at the end.

Owns the figures of this rank's steps and the wording. Must not know gradients: whoever synchronises them waits through ``RunReport.wait``.
The lines of rank 0's start and summary go to the logger ``psgc.run``, which is heard at the default log level, too.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, Literal

from psgc.codecs.registry import SCRIPT_CODEC
from psgc.layout import Layout
from psgc.layout.update_rule import UNBOUNDED
from psgc.observe.figures import Spent
from psgc.worker.session import Session, Ticket

logger = logging.getLogger(__name__)
run_logger = logging.getLogger("psgc.run")
RECENT_STEPS: Final = 4096  # the median step time is taken over these, so that memory stays bounded
# Ranks whose waiting differs by less were about equally fast: the least that is worth a name.
CLEAR_S: Final = 0.5
CLEAR_SHARE: Final = 0.02


class _Steps:
    """Steps of one optimizer. The first step is not timed, because it declares layouts and may compile kernels.

    by: what a step is counted by. told: whether a step() was seen. spent: of the training thread's time, until the last one."""

    def __init__(self) -> None:
        self.by: Literal["step()", "means"] = "step()"
        self.count = 0
        self.waited_s = 0.0
        self.began = self.last = 0.0
        self.told = False
        self.spent = Spent()
        self.durations: deque[float] = deque(maxlen=RECENT_STEPS)

    def over(self, now: float) -> None:
        self.count += 1
        if self.count == 1:
            self.began = now
        else:
            self.durations.append(now - self.last)
        self.last = now


class Rare:
    """Of a front end that exchanges once in many steps: what is told at the run's end. every: how many steps; left: what it means that it was not finished;
    empty: nothing, where nobody is to exchange with."""

    def __init__(self, name: str, every: int, left: str) -> None:
        self.name, self.every, self._left = name, every, left
        self.steps = 0
        self._settled, self._finished = True, False

    def stepped(self, settled: bool) -> None:
        """settled: whether nothing is left to exchange after the step."""
        self.steps += 1
        self._settled = settled

    def finished(self, apart: bool) -> None:
        """Nothing is left. apart: something was."""
        self._settled = self._finished = True
        if apart and not self.steps:
            self._say_never_stepped()

    def saved(self) -> None:
        """A state has all that is left, for a run that goes on from it."""
        self._settled = True

    def tell_end(self) -> None:
        if not self.steps and not self._finished:
            self._say_never_stepped()
        elif self._left and not self._settled:
            logger.warning("%s: %s; leave its block, or call finish(), at the end", self.name, self._left)

    def _say_never_stepped(self) -> None:
        if self._left:
            logger.warning(
                "%s: the step() of its inner optimizer was never called, so that nothing was exchanged: train by the optimizer that it was given",
                self.name,
            )


class RunReport:
    """For one session: how long its optimizers' steps took, and how many bytes they sent."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.proxy(session)
        self._steps: dict[str, _Steps] = {}  # by optimizer
        self._left: Counter[str] = Counter()  # results that the script went on without step(), by optimizer
        self._every = session.config.log_steps
        self._rare: dict[str, Rare] = {}  # by the layouts' name, without a fragment's number

    def exchanged_rarely(self, name: str, every: int, left: str) -> Rare:
        """Layouts of this name (``name.0``, ...) are each exchanged once in so many steps, and what is counted of them is exchanges. left: see ``Rare``."""
        self._rare[name] = Rare(name, every, left)
        return self._rare[name]

    def laid_out(self, layout: Layout) -> None:
        """An optimizer's tensors have buckets: say how they travel."""
        if self._session.config.solo or not layout.buckets:
            return
        rare = self._rare.get(layout.name.partition(".")[0])
        travels = described(layout, self._session.rank, "a step" if rare is None else f"once in {_count(rare.every, 'step')}")
        if self._session.figures is not None:
            self._session.figures.laid_out(travels)
        if self._session.rank == 0:
            run_logger.info("%s", travels)

    def wait(self, name: str, tickets: Iterable[Ticket]) -> None:
        """Wait for the last buckets of the layout ``name`` that are under way. Raises what the session's ``wait`` raises."""
        began = time.monotonic()
        if self._session.figures is not None:
            self._session.figures.waits(began, counts=bool(self._steps_of(name).count))
        with self._session.rest.in_trainers_stead():  # backward's end may be in a thread of autograd's
            self._session.wait(tickets)
        self.waited(name, time.monotonic() - began)

    def waited(self, name: str, waited_s: float, rested: bool = True) -> None:
        """The trainer has waited for so long for gradients of the layout ``name``; a step may take several such trips. rested: it has done so in the session's
        waits."""
        steps = self._steps_of(name)
        if self._session.figures is not None:
            self._session.figures.means_came(waited_s, time.monotonic(), bool(steps.count), rested)
        if self._session.trace is not None:
            self._session.trace.waited(name, waited_s)
        if steps.count:
            steps.waited_s += waited_s
            self._session.note_waited(waited_s)

    def held(self, tensors: int, codec: str) -> None:
        """Servers hold so many more tensors, whose changes travel by this codec. Rank 0 says so."""
        config = self._session.config
        if self._session.rank == 0:
            ahead = "any number of steps" if config.staleness == UNBOUNDED else f"{config.staleness} step(s)"
            run_logger.info(
                "asynchronous training: %d server(s) hold %d tensors, changes travel by %s; a worker may be %s ahead of the slowest",
                config.servers, tensors, codec, ahead,
            )  # fmt: skip

    def left_to_script(self, name: str) -> None:
        """Averaged gradients of the layout ``name`` were in p.grad, and the script went on without step()."""
        self._left[name] += 1

    def means_came(self, name: str, waited_s: float) -> None:
        """A step's averaged gradients of the layout ``name`` are there, for which the trainer has waited for so long, and step() may or may not follow: from
        now on its steps are counted by these."""
        self.waited(name, waited_s, rested=False)
        steps = self._steps_of(name)
        steps.by = "means"
        self._count_step(name, steps)

    def step_over(self, name: str) -> None:
        """The trainer has applied a step of the layout ``name``."""
        steps = self._steps_of(name)
        steps.told = True
        if steps.by == "step()":
            self._count_step(name, steps)

    def _count_step(self, name: str, steps: _Steps) -> None:
        now = time.monotonic()
        steps.over(now)
        figures = self._session.figures
        if figures is not None:
            before, steps.spent = steps.spent, figures.spent(self._session.rest.rested_s(now))
            figures.step_over(steps.durations[-1] if steps.durations else None, now, steps.spent, before)
        if self._every and steps.count % self._every == 0 and self._session.rank == 0 and logger.isEnabledFor(logging.INFO):
            recent = list(steps.durations)[-self._every :]
            counted = self._session.statistics()
            gradient, plain = counted.get("gradient_bytes", 0), counted.get("uncompressed_bytes", 0)
            logger.info(
                "%s step=%d step_ms=%.1f bytes=%d ratio=%.2f waited_s=%.1f of_s=%.1f slowest_rank=%s", name, steps.count,
                1e3 * statistics.median(recent or [0.0]), gradient, plain / gradient if gradient else 1.0, steps.waited_s, now - steps.began,
                self._clearly_slowest(counted, now - steps.began),
            )  # fmt: skip

    @staticmethod
    def _clearly_slowest(counted: dict[str, int], elapsed_s: float) -> str:
        """The rank that has waited clearly less than another one, or none."""
        apart_s = (counted.get("most_waited_ms", 0) - counted.get("least_waited_ms", 0)) / 1e3
        slowest = counted.get("slowest_rank", -1)
        return "none" if slowest < 0 or apart_s < max(CLEAR_S, CLEAR_SHARE * elapsed_s) else str(slowest)

    def _steps_of(self, name: str) -> _Steps:
        return self._steps.setdefault(name.partition(".")[0], _Steps())

    def summary(self) -> str:
        """The whole run in a line or two; empty where nothing was synchronised."""
        taken = [steps for steps in self._steps.values() if steps.count]
        if not taken or self._session.config.solo:
            return "" if self._session.config.solo else self._never_stepped()
        first = max(taken, key=lambda steps: steps.count)
        rare = self._rare.get(next(name for name, steps in self._steps.items() if steps is first))
        noun, each = ("step", "each") if rare is None else ("exchange", "from one to the next")
        parts = [_count(first.count, noun) + (f" of {len(taken)} optimizers" if len(taken) > 1 else "")]
        if rare is not None:
            parts[0] += f" in {_count(rare.steps, 'step')}"
        if first.durations:
            parts[0] += f", {_duration(statistics.median(first.durations))} {each} (median)"
        counted = self._session.statistics()
        if carried := self._carried(counted.get("gradient_bytes", 0), counted.get("uncompressed_bytes", 0)):
            parts.append(carried)
        if not any(steps.told for steps in taken):
            parts.append("no optimizer's step() followed, so that averaged gradients are counted, whatever the script did with them")
        elapsed = max(steps.last for steps in taken) - min(steps.began for steps in taken)
        if elapsed > 0:
            parts.append(self._waited(sum(steps.waited_s for steps in taken), elapsed, counted))
        return "; ".join(parts)

    def tell_end(self) -> None:
        """Sum up a run that has ended well, and say what it lacks."""
        if text := self.summary():
            run_logger.info("%s", text)
        for rare in self._rare.values():
            rare.tell_end()

    def _never_stepped(self) -> str:
        if not self._left:
            return ""
        name, count = self._left.most_common(1)[0]
        return (
            f"{name}: averaged gradients were left in p.grad {_count(count, 'time')} and its step() was never called; what the script did with them, "
            f"such as updates of its own, is not counted as steps"
        )

    @staticmethod
    def _carried(gradient: int, plain: int) -> str:
        if not plain:
            return ""
        saved = 1 - gradient / plain
        if saved <= 0:
            return f"gradients took {amount(gradient)}, nothing saved"
        return f"gradients took {amount(gradient)} instead of {amount(plain)} uncompressed (saved {_percent(saved)})"

    def _waited(self, waited_s: float, elapsed_s: float, counted: dict[str, int]) -> str:
        """Says who was waited for. The rank that waited least was usually the last to push; the time that even this rank waited was spent in the
        network and the servers."""
        text = f"rank {self._session.whole.rank} waited {_duration(waited_s)} of {_duration(elapsed_s)} for gradients"
        busy = "network and servers" if self._session.config.servers else "the network"
        slowest = counted.get("slowest_rank", -1)
        least_s, most_s = counted.get("least_waited_ms", 0) / 1e3, counted.get("most_waited_ms", 0) / 1e3
        clear_s = max(CLEAR_S, CLEAR_SHARE * elapsed_s)
        if slowest < 0:
            return text
        if most_s - least_s < clear_s:
            return f"{text}: {busy}; no rank was much slower than the others"
        if slowest == self._session.whole.rank:
            return f"{text}: {busy}; it was the slowest rank, others waited for it, up to {_duration(most_s - least_s)}"
        for_rank = max(0.0, waited_s - least_s)
        if for_rank < clear_s:
            return f"{text}: {busy}; rank {slowest} was no faster, others waited for both"
        rest = _duration(waited_s - for_rank)
        return f"{text}: {_duration(for_rank)} for slower ranks (rank {slowest} was the slowest), {rest} for {busy}"


_reports: weakref.WeakKeyDictionary[Session, RunReport] = weakref.WeakKeyDictionary()


def report_of(session: Session) -> RunReport:
    """The session's report, made when first asked for."""
    report = _reports.get(session)
    if report is None:
        report = _reports[session] = RunReport(session)
    return report


def tell_end(session: Session) -> None:
    """Rank 0 sums up a run that has ended well."""
    report = _reports.get(session)
    if report is not None and session.rank == 0:
        report.tell_end()


def described(layout: Layout, rank: int, how_often: str = "a step") -> str:
    """The rank's codecs, buckets, and what an exchange carries both ways, at most, against fp32 and bf16."""
    buckets = [bucket for bucket in layout.buckets if bucket.is_of(rank)]
    codecs = Counter(bucket.codec for bucket in buckets)
    several = len(codecs) > 1
    by = ", ".join(f"{codec} ({_count(n, 'bucket')})" if several else codec for codec, n in codecs.most_common())
    others = {index for bucket in layout.buckets if not bucket.is_of(rank) for index in bucket.tensors}
    tensors = [tensor for index, tensor in enumerate(layout.tensors) if index not in others]
    numel = sum(tensor.numel for tensor in tensors)
    carried, varies = 0, False
    for bucket, part in ((of, part) for of in buckets for part in of.parts):
        round_ = layout.scheme(bucket).rounds(part.numel)[part.round]
        varies = varies or not (round_.pair.push.fixed_size and round_.pair.pull.fixed_size)
        carried += round_.pair.push.payload_bound(round_.numel) + round_.pair.pull.payload_bound(round_.numel)
    if any(
        codec.startswith((f"{SCRIPT_CODEC}:", "rows:")) for codec in codecs
    ):  # payloads take what the script likes, or the rows that it uses
        bytes_ = f"at most {amount(carried)} {how_often}, fp32 {amount(8 * numel)}"
    else:
        bytes_ = f"{'at most ' if varies else ''}{amount(carried)} {how_often}, {_times(8 * numel / carried)} fp32, {_times(4 * numel / carried)} bf16"
    return (
        f"{layout.name}: {_count(len(tensors), 'tensor')} ({_count(numel, 'element')}) in {_count(len(buckets), 'bucket')}, "
        f"codec {by}; each worker sends and receives {bytes_}"
    )


def amount(nbytes: float) -> str:
    """Bytes, to three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x less than" if ratio >= 1.05 else "as much as" if ratio > 0.95 else f"{1 / ratio:.1f}x as much as"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return "under 1 ms"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share > 0.985 else f"{100 * share:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
