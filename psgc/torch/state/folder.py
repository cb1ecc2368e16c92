"""A folder of checkpoints of ``torch.distributed.checkpoint``, in which a save that is interrupted never replaces a whole one.

    FOLDER/step-000000000120/.metadata, .order, __0_0.distcp, ...

Each step has a folder of its own. torch writes ``.metadata`` last, once every rank has written its own, and by renaming: a folder that has it is whole.
Older ones are removed once a newer one is whole. Which is newer says ``.order``, a number that grows from save to save, not the step: a run may go back to an
earlier step. Nor does the files' age, which is lost when a folder is copied, and differs between hosts' clocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from torch import distributed
from torch.distributed.checkpoint import state_dict_saver

from psgc.errors import UsageError
from psgc.processes.checkpoints import saving
from psgc.torch.session import api
from psgc.torch.session.replaceable import refuse_replaceable

WHOLE: Final = ".metadata"
ORDER: Final = ".order"
NAME: Final = "step-{:012d}"
NAMED: Final = re.compile(r"step-(\d{12,})")


class Checkpoints:
    """Checkpoints of a training in one folder, which all ranks see:

        checkpoints = psgc.Checkpoints("/shared/run1")
        ...
        checkpoints.save(step, {"model": model.state_dict(), "psgc": psgc.state_dict(optimizer)})       # on every rank
        ...
        if (latest := checkpoints.latest()) is not None:                                                # in a job that goes on
            torch.distributed.checkpoint.load(state, checkpoint_id=latest)
            psgc.load_state_dict(optimizer, latest)

    keep: how many whole ones stay, at least 1: those that were written last. A run that goes back to an earlier step and saves there has its own saves as
    the newest; the later steps of the run that it gave up are the older ones, and a step that is among these is written anew.

    A job of several workers needs torch.distributed's process group (``init_process_group("gloo")``, or the script's own), by which torch has ranks agree on
    who writes what.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Raises UsageError."""
        if keep < 1:
            raise UsageError(f"Checkpoints: keep={keep}: at least one has to stay")
        _refuse_replaceable()
        self.folder, self.keep = Path(folder), keep
        self._group: Any = None  # of saves that run beside training
        self._under_way: Future[Path] | None = None

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, ascending."""
        found = (NAMED.fullmatch(path.name) for path in self.folder.glob("step-*") if (path / WHOLE).is_file())
        return sorted(int(match[1]) for match in found if match is not None)

    def latest(self) -> Path | None:
        """The whole checkpoint that was written last; None if there is none. Ask between two saves, on every rank alike."""
        whole = self._whole()
        return whole[-1] if whole else None

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, on every rank. Returns its folder once it is whole. A job that fails meanwhile waits for it (``saving``). Raises UsageError for
        the step of the latest, and what torch raises: the older ones then stay as they are. An ``async_save`` that is still under way is waited for first."""
        path = self._new(step)
        with saving():
            state_dict_saver.save(state, checkpoint_id=path, no_dist=not distributed.is_initialized())
            self._keep_few(path)
        return path

    def async_save(self, step: int, state: dict[str, Any]) -> Future[Path]:
        """As ``save``, while training goes on: returns once the state has been copied. The future has the folder once it is whole, or what was raised. A save
        that is still under way is waited for first."""
        path = self._new(step)
        if self._group is None and distributed.is_initialized():
            self._group = distributed.new_group(backend="gloo")  # so that its exchanges never mix with those of training
        more = {} if self._group is None else {"process_group": self._group}
        written = state_dict_saver.async_save(state, checkpoint_id=path, **more)
        done: Future[Path] = Future()
        done.set_running_or_notify_cancel()  # it cannot be cancelled: ranks write together
        self._under_way = done
        began = threading.Event()

        def wait() -> None:
            try:
                with saving():
                    began.set()
                    written.result()  # type: ignore[union-attr]
                    self._keep_few(path)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(path)

        threading.Thread(target=wait, name="psgc-checkpoint", daemon=True).start()
        began.wait()  # from now on whatever ends the process waits
        return done

    def _path(self, step: int) -> Path:
        return self.folder / NAME.format(step)

    def _new(self, step: int) -> Path:
        if self._under_way is not None:
            self._under_way.exception()  # else its folder would look like what an interrupted save has left
        _refuse_replaceable()
        size = api.size() if api.is_initialized() else 1
        if size > 1 and not distributed.is_initialized():
            raise UsageError(
                "Checkpoints: ranks agree on what each writes over torch.distributed, which has no process group here; call "
                'torch.distributed.init_process_group("gloo") behind psgc.init()'
            )
        path = self._path(step)
        if (path / WHOLE).exists() and self.latest() == path:
            raise UsageError(
                f"Checkpoints: {path} is the latest there, and would be broken while it is written anew; remove it, or take another number"
            )
        if _leads():
            self._begin(path)
        return path

    def _whole(self) -> list[Path]:
        """In the order in which they were written; first, by their steps, those that say nothing of it."""
        return sorted((self._path(step) for step in self.steps()), key=lambda path: (_order(path), path.name))

    def _begin(self, path: Path) -> None:
        """Give the folder its place in the order, before anything is written to it."""
        last = max((_order(other) for other in self.folder.glob("step-*")), default=0)
        _remove(path)  # of a run that was given up, or interrupted
        with contextlib.suppress(OSError):  # torch meets it too, and tells all ranks
            path.mkdir(parents=True, exist_ok=True)
            with (path / ORDER).open("w") as file:
                file.write(str(last + 1))
                file.flush()
                os.fsync(file.fileno())

    def _keep_few(self, newest: Path) -> None:
        """Remove the whole ones that were written first, and what interrupted saves have left before ``newest``."""
        if not _leads():
            return
        whole = self._whole()
        stay = {newest, *whole[-self.keep :]}
        for path in self.folder.glob("step-*"):
            interrupted_before = _order(path) < _order(newest) if (path / ORDER).exists() else path.name < newest.name
            if NAMED.fullmatch(path.name) and path not in stay and (path in whole or interrupted_before):
                _remove(path)


def _refuse_replaceable() -> None:
    """Raise UsageError in a job whose workers may be followed by other processes, which torch.distributed's groups cannot take in."""
    if api.is_initialized():
        refuse_replaceable(
            api.current_session(),
            "Checkpoints",
            "have the lowest rank that takes part (psgc.on_membership) save the model and the optimizer by torch.save, or use PSGC_ON_WORKER_LOSS=stop",
        )


def _leads() -> bool:
    """Whether this rank is the one that orders and removes."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def _order(path: Path) -> int:
    """The number of the save that has written this folder; 0 where it says none."""
    try:
        return int((path / ORDER).read_text())
    except (OSError, ValueError):
        return 0


def _remove(path: Path) -> None:
    (path / WHOLE).unlink(missing_ok=True)  # from now on it is none, however far the rest gets
    shutil.rmtree(path, ignore_errors=True)


__all__ = ["Checkpoints"]
