"""Logs refused peers without filling the log: one line at once for each kind of refusal, later, less and less often, how many more there were."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from psgc.processes.reminder import Reminder

SAID_S: Final = 5.0  # from one line on a kind of refusal to the next, at first
FORGOTTEN_S: Final = 60.0


@dataclass(slots=True)
class _Kind:
    """Refusals for one reason."""

    reminder: Reminder
    more: int = 0


class Refusals:
    """what: names the refused connections, in the lines after the first. Times are passed in."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._kinds: dict[str, _Kind] = {}

    def note(self, kind: str, text: str, now: float) -> None:
        """kind: one of a few reasons, as a text without any of the peer's bytes."""
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Kind(Reminder(now))
            self._logger.warning("%s", text)
        else:
            known.more += 1

    def tick(self, now: float) -> None:
        """Log how many more there were, if it is time for that."""
        for kind, said in list(self._kinds.items()):
            if said.more and said.reminder.due(now, SAID_S):
                self._logger.warning("%s: %d more were refused (%s)", self._what, said.more, kind)
                said.more = 0
            elif not said.more and now - said.reminder.since > FORGOTTEN_S:
                del self._kinds[kind]
