"""Follows a running job for whoever looks at it: a thread asks the scheduler, and keeps the last view.

Invariant: the scheduler is asked once in ``TURN_S`` at most, and once in ``IDLE_S`` where nobody has looked for a while. It never waits for whoever looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from psgc.config import Config
from psgc.errors import JobFailed, PsgcError
from psgc.launch.observing.scheduler_view import SchedulerView
from psgc.observe.live import Follower, View

TURN_S: Final = 0.5
IDLE_S: Final = 10.0
LOOKED_S: Final = 30.0  # after a look the job is followed for so long
FRESH_S: Final = 2.0  # whoever looks after a while waits so long for a view that is not old


class Following:
    """See the module's text. changed: called in the thread when there is another view, or the job is over. over: why no more views come; "" while they do."""

    def __init__(self, config: Config, changed: Callable[[], None]) -> None:
        self._config, self._changed = config, changed
        self.view: View | None = None
        self.over = ""
        self._looked = threading.Event()
        self._looked_at = self._seen_at = time.monotonic()
        self._seen = threading.Condition()
        threading.Thread(target=self._follow, name="psgc-following", daemon=True).start()

    def look(self) -> None:
        """Somebody looks: views follow closely for a while."""
        self._looked_at = time.monotonic()
        self._looked.set()

    def fresh(self) -> View | None:
        """The job as it was a moment ago; None: no scheduler has answered yet. Waits for at most ``FRESH_S``."""
        self.look()
        now = time.monotonic()
        with self._seen:
            self._seen.wait_for(lambda: self.over or (self._seen_at > now - 2 * TURN_S and self.view is not None), FRESH_S)
            return self.view

    def _follow(self) -> None:
        while True:
            try:
                with SchedulerView(self._config) as scheduler:
                    self._follow_one(scheduler)
            except JobFailed as error:
                self._tell(None, f"the job has failed: {error}")
            except PsgcError as error:
                self._tell(None, str(error).removeprefix("top: "))
            self._pause(TURN_S)

    def _follow_one(self, scheduler: SchedulerView) -> None:
        follower = Follower()
        while True:
            self._tell(follower.see(scheduler.ask()), "")
            self._pause(TURN_S)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() - self._looked_at > LOOKED_S:
            self._looked.clear()
            self._looked.wait(IDLE_S)

    def _tell(self, view: View | None, over: str) -> None:
        with self._seen:
            self.view, self.over, self._seen_at = view or self.view, over, time.monotonic()
            self._seen.notify_all()
        self._changed()
