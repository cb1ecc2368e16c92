"""Signals of a batch system, which come to the launcher, and, where it tracks processes by their parents, to every process of the job as well.

SIGUSR1 and SIGUSR2 are the training script's: launchers pass them on to the workers, and they mean nothing to anybody else. SIGTERM ends the job through
its launcher: the workers get it, and scheduler and servers serve them until they have ended. In a Slurm step the status then is 1, the lowest of a failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from psgc.launch.supervision.child import Child

SCRIPTS: Final = (signal.SIGUSR1, signal.SIGUSR2)
ENDED: Final = 128 + signal.SIGTERM
ENDED_IN_STEP: Final = 1


@contextmanager
def passing_on(workers: Callable[[], Iterable[Child]]) -> Iterator[None]:
    """While this lasts, pass the script's signals on. Of the main thread only; elsewhere nothing is passed on."""

    def pass_on(number: int, _: FrameType | None) -> None:
        for child in workers():
            if child.running:
                child.signal_group(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in SCRIPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_scripts() -> None:
    """For good, and not for processes that this one starts, as SIG_IGN would be."""
    for number in SCRIPTS:
        signal.signal(number, lambda *_: None)


def run_in_step(run: Callable[[], int], env: Mapping[str, str], program: str) -> int:
    """``run()``, to be this process's exit status; what SIGTERM has ended has 1 in a Slurm step, not 143. Of the main thread, and the process's last act.

    srun takes the highest status of a step's launchers. When one has failed, ``--kill-on-bad-exit`` sends the others SIGTERM, perhaps before they have
    heard of the failure: with 143 they would outbid the status of the rank that failed. A SIGTERM that comes when the status is known changes nothing.
    PSGC_STATUS_FILE gets the status of the first node's launcher, for a job that may have lost others.
    """
    if not env.get("SLURM_STEP_ID"):
        return run()

    def end(*_: object) -> None:  # while no job runs here: before it starts, and between restarts
        sys.exit(f"{program}: ended by SIGTERM")  # a line, and status 1

    signal.signal(signal.SIGTERM, end)
    status = run()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which stays while the interpreter ends; a handler would not
    status = ENDED_IN_STEP if status == ENDED else status
    if (file := env.get("PSGC_STATUS_FILE", "")) and env.get("SLURM_NODEID") == "0":
        with suppress(OSError):
            Path(file).write_text(f"{status}\n")
    return status


def obey_the_launcher_alone(env: Mapping[str, str]) -> None:
    """Under Slurm, take SIGTERM from the launcher only. Call it in the main thread, before others are started: their masks follow from its."""
    launcher = os.getppid()
    if not (env.get("SLURM_JOB_ID") and env.get("PSGC_LAUNCHER")):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_take, args=(launcher,), name="psgc-signals", daemon=True).start()


def _take(launcher: int) -> None:
    while True:
        if signal.sigwaitinfo([signal.SIGTERM]).si_pid != launcher:
            continue
        handler = signal.getsignal(signal.SIGTERM)
        if not callable(handler):
            os._exit(128 + signal.SIGTERM)
        handler(signal.SIGTERM, None)
