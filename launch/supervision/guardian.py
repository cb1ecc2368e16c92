"""A process that outlives the launcher and cleans up after it: when its stdin ends, it kills the process groups on its list.

Input: a line ``+N`` for a group that has started, ``-N`` for one that is gone. The kernel kills the groups' leaders with the launcher
(tether.py); this is for their children.
"""

import contextlib
import os
import signal
import sys

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin:
        if line[0] == "+":
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
