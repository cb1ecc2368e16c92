"""Elastic: a training loop that goes on when a worker dies and another process takes its place.

Owns when the state of this rank may be read by others, and when a step begins. Invariant: while somebody reads the state, nobody changes it: it is read from a
step's beginning until its means are there, and later where the script rests in a wait, for the dead rank perhaps, which cannot end before its successor has it.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from psgc.codecs import BucketContext, parse_scheme
from psgc.codecs.scheme import SchemeState
from psgc.errors import GroupError, PsgcError, UsageError
from psgc.torch.elastic.beside import Beside
from psgc.torch.elastic.handover import POLL_S, Channel
from psgc.torch.elastic.members import Attendance
from psgc.torch.elastic.state import WHOSE, Beginning, Stateful, TrainingState
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.overlapped import Overlapped
from psgc.torch.session import api
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.broadcast import broadcast_from_root
from psgc.torch.tensors.sync_batch_norm import name_by_place, number_forwards
from psgc.worker.session import Handover, Session

logger = logging.getLogger(__name__)
SCHEDULER: Final = "scheduler"
SEED_BITS: Final = 63


class Elastic(api.Member):
    """The state of a training, and the loop over its steps. Under PSGC_ON_WORKER_LOSS=wait or shrink the training goes on when a worker dies.

    model, optimizer: the optimizer is a DistributedOptimizer of all of the model's parameters that require a gradient, and of no others, and the only one in
                      the loop. In a step they change by its updates alone; other parameters, and buffers, by whatever the script does.
    scheduler:        of the learning rate; None: there is none.
    extra:            by name, whatever else has ``state_dict()`` and ``load_state_dict()`` and is equal on all ranks: a loss scaler, a sampler. States are of
                      plain types, and small: they are kept at the beginning of each step.
    seed:             at the beginning of each step the generators of Python, NumPy and torch are seeded by this, the rank and the step, so that a process
                      that takes a dead one's place draws the same numbers. None: generators are the script's.
    scale_lr:         while ranks are missing, updates are made with learning rates times how many there are over how many the job has (Goyal et al. 2017);
                      else with the rates as they are.

    Before the first step rank 0's parameters, buffers and optimizer state are given to all ranks. All that is synchronised belongs into the loop:
        for step in elastic.steps(1000):
            optimizer.zero_grad(); loss(step).backward(); optimizer.step()
    A process that takes a dead one's place runs the script from its beginning; its loop begins at the step that the others are in, with their state. What its
    rank alone had is lost: codecs' residuals on this rank, its own buffers (it gets another rank's), generators without ``seed``.
    Raises UsageError for what cannot be followed by another process.
    """

    def __init__(
        self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None, seed: int | None = None, scale_lr: bool = False,
    ) -> None:  # fmt: skip
        named = {**(extra or {}), **({SCHEDULER: scheduler} if scheduler is not None else {})}
        if scheduler is not None and SCHEDULER in (extra or {}):
            raise UsageError(f"{WHOSE}: extra has {SCHEDULER!r}, which is the name of scheduler=; name it otherwise")
        for name, of in named.items():
            if not (callable(getattr(of, "state_dict", None)) and callable(getattr(of, "load_state_dict", None))):
                raise UsageError(f"{WHOSE}: {name} is a {type(of).__name__}, which has no state_dict() and load_state_dict()")
            if isinstance(of, torch.optim.Optimizer):
                raise UsageError(
                    f"{WHOSE}: {name} is an optimizer, whose updates another process could not follow; have one optimizer for all that is trained, with a "
                    f"group of parameters for each"
                )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"{WHOSE}: model is a {type(model).__name__}, expected a torch.nn.Module")
        self._session = api.current_session()
        self._optimizer = _checked(optimizer)
        if isinstance(self._optimizer, Overlapped) and self._session.rank == 0:
            logger.warning(f"{WHOSE}: overlapped_step=True has no effect, for a step waits for all means before its update; leave it out")
        self._model, self._seed, self._scale_lr = model, seed, scale_lr
        self._attendance: Attendance  # once steps have begun
        self._rates: list[Any] = []  # of the optimizer's groups, while an update is made with others
        self._state = TrainingState(self._session, model, self._optimizer, named)
        self._state.check_trained()
        self._beside = Beside(self._optimizer)
        self._changed = threading.Condition()
        self._beginning: Beginning | None = None
        self._readers = 0
        self._stuck_since: float | None = None
        self._changing = True  # by the script: from the optimizer's step to the next beginning, but where it rests
        self._updating = False  # in the optimizer's step
        self._taken: Handover | None = None  # the last one of which this rank was told that it takes it
        self._given: dict[int, int] = {}  # by the rank that takes, the newest handover's number; the scheduler says each again and again
        self._begun = self._over = self._has_stepped = False
        self._first = 0  # of this process's steps
        self._unread = 2  # beginnings of steps that are still to be tried to read
        self._session.hear_of_handovers(self._heard)
        self._before = self._optimizer.register_step_pre_hook(self._before_step)
        self._scaled = self._optimizer.register_step_pre_hook(self._scale_rates)
        self._updated = self._optimizer.register_step_post_hook(self._after_update)
        self._optimizer._psgc_raised = self._put_rates_back
        self._after = self._optimizer.register_step_post_hook(self._after_step)
        api.add_member(self)

    @property
    def session(self) -> Session:
        return self._session

    def check_leaving(self) -> None:
        if not self._over:
            raise UsageError(
                "suspend(): Elastic's steps are of one job; call it after the loop over them, and make another Elastic after resume()"
            )

    @property
    def _followed(self) -> bool:
        """Whether another process may take a worker's place."""
        return self._session.config.on_worker_loss != "stop" and self._session.size > 1

    @property
    def replaced(self) -> bool:
        """Whether this process has taken the place of one that died."""
        return self._session.incarnation > 1

    def steps(self, total: int, first: int = 0) -> Iterator[int]:
        """The numbers of the steps, from ``first`` up to ``total`` - 1, once: in a process that takes a dead one's place, from the step on that the others are
        in. first: how many steps an earlier job has taken, whose checkpoint this one goes on from, the same on all ranks; ``seed`` goes on with it.
        After the last one all ranks meet. Raises UsageError where it is called twice."""
        if not hasattr(total, "__index__") or total < 0:
            raise UsageError(f"{WHOSE}.steps() of {total!r}: expected a whole number of at least 0")
        if self._begun:
            raise UsageError(f"{WHOSE}.steps() was gone through before; do what comes between two parts of a training inside the one loop")
        if first < 0:
            raise UsageError(f"{WHOSE}.steps({total}, first={first}): expected the first step's number, 0 or more")
        self._begun, self._session.rest.trains = True, threading.get_ident()
        self._attendance = Attendance(self._session, self._session.config.on_worker_loss == "shrink", self._scale_lr)
        taken = self._join()
        self._first = first = first if taken is None else taken.step
        if taken is not None and taken.ended:
            self._session.came_back()  # it takes no step, of which the launcher would hear
        try:
            for step in range(first, total):
                self._begin(step, updates=taken.updates if taken is not None and step == first else 0)
                yield step
                self._stepped()
            if first <= total:
                self._begin(max(first, total), ended=True)
                self._session.barrier()
        finally:
            self._over = True

    # this rank's own

    def _join(self) -> Beginning | None:
        """Get the state that all ranks begin with, or go on with: that of another rank in its step, which is this rank's first."""
        if self._followed:
            name_by_place(self._model)
        if self.replaced and (whole := self._take()) is not None:
            beginning = self._state.take(whole)
            self._attendance.ranks = beginning.members
            logger.warning("rank %d goes on at step %d with the state of another rank", self._session.rank, beginning.step)
            return beginning
        if self._followed and any(self._session.progress.steps.values()):
            raise UsageError(
                f"{WHOSE}: something was synchronised before its steps, which a process that takes a dead worker's place could not take part in; do it inside "
                f"the loop, or set PSGC_ON_WORKER_LOSS=stop"
            )
        broadcast_from_root(self._model, self._optimizer, f"{WHOSE}.")
        if self._followed and self._session.rank == 0 and (names := self._state.left_out()):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning(
                f"{WHOSE}: what modules save besides tensors (get_extra_state of {', '.join(names[:3])}{more}) is each rank's own, and a process that takes a "
                f"dead worker's place has what its script makes; give it in extra=, too, if that matters"
            )
        return None

    def _begin(self, step: int, ended: bool = False, updates: int = 0) -> None:
        """updates: that another rank, whose state this is, has made in this step; the script's own are left out."""
        self._optimizer._psgc_updated = updates
        self._enclose_hooks()
        self._attendance.begin(step)
        beginning = None
        if self._followed:
            number_forwards(self._session)
            self._state.check_alone()
            self._beside.check()
            self._beside.note()
            beginning = replace(self._state.beginning(step, ended, self._attendance.ranks), updates=updates)
            if self._unread:  # what could not be given is found before somebody dies: without what the optimizer keeps, and with it
                self._unread -= 1
                self._state.read(beginning)
        elif step == self._first:
            self._state.kept()  # finds out what is wrong with it
        with self._changed:
            self._beginning, self._changing = beginning, updates > 0
            self._changed.notify_all()
        if not ended:
            self._attendance.take_part()
        if self._seed is not None and not ended:
            _seed(self._seed, self._session.rank, step)

    def _enclose_hooks(self) -> None:
        """Have the script's hooks of the optimizer's step run as parts of the update: between ours, whenever they were registered."""
        before: Any = self._optimizer._optimizer_step_pre_hooks  # OrderedDicts, though torch's annotations say dict
        after: Any = self._optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before.id, last=False)
        before.move_to_end(self._scaled.id)
        after.move_to_end(self._updated.id, last=False)
        after.move_to_end(self._after.id)

    @uncompiled
    def _before_step(self, _optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The means are there, and the optimizer is about to change parameters: wait for whoever reads them."""
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise UsageError(
                f"{WHOSE} does not go together with step(closure), which changes parameters while gradients are awaited; call backward() before"
            )
        if self._followed:
            self._state.check_gradients()
        with self._changed:
            while self._readers:
                self._changed.wait(POLL_S)
                self._session.check()
            self._changing = self._updating = True
        self._beside.check()

    @uncompiled
    def _scale_rates(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """After the script's hooks, which may set rates. An update that is left out has none."""
        if self._scale_lr and self._attendance.share < 1 and not self._optimizer._psgc_updated:
            self._rates = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * self._attendance.share

    @uncompiled
    def _after_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._put_rates_back()

    def _put_rates_back(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=bool(self._rates)):
            group["lr"] = rate
        self._rates = []

    @uncompiled
    def _after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        left_out = self._optimizer._psgc_updated > 0
        if self._followed:
            self._beside.note()
        with self._changed:
            self._updating = False
            if self._beginning is not None and not left_out:
                self._beginning = self._state.updated(self._beginning)
        if not left_out:
            self._stepped()

    def _stepped(self) -> None:
        """A process that has taken another's place tells its launcher once."""
        if self.replaced and not self._has_stepped:
            self._has_stepped = True
            self._session.stepped()

    @contextmanager
    def _reading(self, of: int) -> Iterator[Beginning | None]:
        """Inside, nobody changes the state. None: there is none yet. of: the rank that needs it."""
        rest, kept = self._session.rest, False
        with self._changed:
            while self._changing and self._beginning is not None:
                if not self._updating and (kept := rest.keep(rest.trains)):
                    break
                self._see_stuck(of)
                self._changed.wait(POLL_S)
                self._session.check()
            self._readers += 1
            beginning = self._beginning
        try:
            yield beginning
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
            if kept:
                rest.let_go(rest.trains)

    def _see_stuck(self, of: int) -> None:
        """An optimizer that synchronizes in the middle of its update waits for a dead rank, whose successor waits for what comes of the update."""
        if not (self._updating and self._session.rest.rests(self._session.rest.trains)):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > self._session.config.dead_s:
            self._session.fail(
                f"rank {of} died while the update of {type(self._optimizer).__name__} was synchronized on rank {self._session.rank}, and no other process can "
                f"begin in the middle of an update: start the job again from its last checkpoint"
            )

    # handovers

    def _heard(self, handover: Handover) -> None:
        """In the network thread."""
        if handover.takes:
            with self._changed:
                self._taken = handover
                self._changed.notify_all()
        elif handover.number > self._given.get(handover.other, 0):
            self._given[handover.other] = handover.number
            threading.Thread(target=self._give, args=(handover,), name="psgc-state", daemon=True).start()

    def _give(self, handover: Handover) -> None:
        """In a thread of its own."""
        session = self._session
        try:
            channel = Channel(session, handover, lambda: self._given[handover.other] != handover.number)
            try:
                with self._reading(handover.other) as beginning:
                    self._state.check_alone()
                    channel.give(None if beginning is None else self._state.read(beginning))
                    self._beside.given(handover.other)
            finally:
                channel.close()
        except UsageError as error:
            session.fail(str(error))
        except PsgcError as error:
            logger.debug("handover %d to rank %d failed: %s", handover.number, handover.other, error)
        except Exception as error:  # it would come again with each handover
            logger.exception("rank %d could not give the training's state", session.rank)
            session.fail(
                f"rank {session.rank} could not give the training's state to rank {handover.other}, whose process is new: {type(error).__name__}: {error}"
            )

    def _take(self) -> Any:
        """What a rank that has it gives of the state; None: the training has not begun. Raises what ends the job."""
        session, failed = self._session, 0
        while True:
            session.ask_state(failed)
            handover = self._awaited(lambda one: one.number > 0)

            def given_up(number: int = handover.number) -> bool:
                return self._taken is not None and self._taken.number != number

            try:
                channel = Channel(session, handover, given_up)
                try:
                    whole = channel.take(self._state.places)
                finally:
                    channel.close()
            except GroupError as error:
                session.check()
                with self._changed:
                    if self._taken is not None and self._taken.number > handover.number:
                        continue  # another process of the scheduler has begun one anew
                    failed += 1
                    self._taken = None
                logger.warning("rank %d could not get the state from rank %d (%s); it asks again", session.rank, handover.other, error)
                continue
            if whole is None:
                session.catch_up(api.current_session().progress)
            return whole

    def _awaited(self, fits: Callable[[Handover], bool]) -> Handover:
        with self._changed:
            while self._taken is None or not fits(self._taken):
                self._changed.wait(POLL_S)
                self._session.check()
            return self._taken


def _checked(optimizer: torch.optim.Optimizer) -> Distributed:
    """Raise UsageError for one that another process could not go on with."""
    if not isinstance(optimizer, Distributed):
        raise UsageError(f"{WHOSE}: optimizer is a {type(optimizer).__name__}, expected what psgc.torch.DistributedOptimizer returns")
    choice = optimizer._psgc_gradients.exchange.choice
    if choice.auto:
        raise UsageError(
            f"{WHOSE}: compression is chosen while the job runs (auto), which a process that takes another's place does not know; name a codec"
        )
    for codec in choice.codecs(optimizer._psgc_names):
        if type(parse_scheme(codec, BucketContext("float32")).new_state(1)).factors is not SchemeState.factors:
            raise UsageError(
                f"{WHOSE}: codec {codec} goes on from factors of the last step, which a process that takes another's place lacks; use another"
            )
    return optimizer


def _seed(seed: int, rank: int, step: int) -> None:
    value = int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:8], "little") & ((1 << SEED_BITS) - 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)
