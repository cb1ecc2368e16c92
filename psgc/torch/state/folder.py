"""A folder of checkpoints of ``torch.distributed.checkpoint``, in which a save that is interrupted never replaces a whole one.

    FOLDER/step-000000000120/.metadata, __0_0.distcp, ...

Each step has a folder of its own. torch writes ``.metadata`` last, once every rank has written its own, and by renaming: a folder that has it is whole.
Older ones are removed once a newer one is whole.
"""

from __future__ import annotations

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

WHOLE: Final = ".metadata"
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

    keep: how many whole ones stay, at least 1. A job of several workers needs torch.distributed's process group
    (``init_process_group("gloo")``, or the script's own), by which torch has ranks agree on who writes what.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """Raises UsageError."""
        if keep < 1:
            raise UsageError(f"Checkpoints: keep={keep}: at least one has to stay")
        self.folder, self.keep = Path(folder), keep
        self._group: Any = None  # of saves that run beside training
        self._under_way: Future[Path] | None = None

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, ascending."""
        found = (NAMED.fullmatch(path.name) for path in self.folder.glob("step-*") if (path / WHOLE).is_file())
        return sorted(int(match[1]) for match in found if match is not None)

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None if there is none. Ask between two saves, on every rank alike."""
        steps = self.steps()
        return self._path(steps[-1]) if steps else None

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, on every rank. Returns its folder once it is whole. A job that fails meanwhile waits for it (``saving``). Raises UsageError for
        a step that is there already, and what torch raises: the older ones then stay as they are."""
        path = self._new(step)
        with saving():
            state_dict_saver.save(state, checkpoint_id=path, no_dist=not distributed.is_initialized())
            self._keep_few()
        return path

    def async_save(self, step: int, state: dict[str, Any]) -> Future[Path]:
        """As ``save``, while training goes on: returns once the state has been copied. The future has the folder once it is whole, or what was raised. A save
        that is still under way is waited for first."""
        if self._under_way is not None:
            self._under_way.exception()
        path = self._new(step)
        if self._group is None and distributed.is_initialized():
            self._group = distributed.new_group(backend="gloo")  # so that its exchanges never mix with those of training
        more = {} if self._group is None else {"process_group": self._group}
        written = state_dict_saver.async_save(state, checkpoint_id=path, **more)
        done: Future[Path] = Future()
        self._under_way = done
        began = threading.Event()

        def wait() -> None:
            try:
                with saving():
                    began.set()
                    written.result()  # type: ignore[union-attr]
                    self._keep_few()
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
        size = api.size() if api.is_initialized() else 1
        if size > 1 and not distributed.is_initialized():
            raise UsageError(
                "Checkpoints: ranks agree on what each writes over torch.distributed, which has no process group here; call "
                'torch.distributed.init_process_group("gloo") behind psgc.init()'
            )
        path = self._path(step)
        if (path / WHOLE).exists():
            raise UsageError(
                f"Checkpoints: {path} is there already, and would be broken while it is written anew; remove it, or take another number"
            )
        return path

    def _keep_few(self) -> None:
        """Remove the oldest whole ones, and what interrupted saves have left before the newest."""
        if distributed.is_initialized() and distributed.get_rank():
            return
        stay = self.steps()[-self.keep :]
        for path in self.folder.glob("step-*"):
            match = NAMED.fullmatch(path.name)
            if match is not None and int(match[1]) not in stay and int(match[1]) < stay[-1]:
                (path / WHOLE).unlink(missing_ok=True)  # from now on it is none, however far the rest gets
                shutil.rmtree(path, ignore_errors=True)


__all__ = ["Checkpoints"]
