"""``tether.py LAUNCHER_PID CORES CMD...``: runs CMD so that it cannot outlive the launcher. A script, run without site packages.

A script of its own, because a launcher with threads cannot safely run Python code between fork and exec.
CORES: comma-separated numbers to stay on; empty: all.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the line above: the kernel will not tell any more
        sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and what is ignored stays so through exec
        signal.signal(number, signal.SIG_DFL)
    try:
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"psgc: cannot run {command[0]!r}{' on cores ' + cores if cores else ''}: {error.strerror}\n")
        sys.exit(126)


if __name__ == "__main__":
    main()
