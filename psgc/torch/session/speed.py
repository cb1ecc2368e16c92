"""``get_pushpull_speed``: how much this worker has sent and received, in windows of ten seconds, as BytePS tells it.

Owns the windows. Whoever has waited for a result calls ``look``, so that no thread is needed.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from typing import Final
from weakref import WeakKeyDictionary

from psgc.torch.session import api
from psgc.worker.session import Session

WINDOW_S: Final = 10.0
MOST_WINDOWS: Final = 1024
NOTHING: Final = (0, -5.0)  # BytePS's answer while no window is over


@dataclass(slots=True)
class Windows:
    """Of one session. begun_s, begun_bytes: when the open window began, and what had been sent and received by then."""

    begun_s: float
    begun_bytes: int = 0
    over: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))
    lock: Lock = field(default_factory=Lock)

    def look(self, now_s: float, wire_bytes: int, epoch_ms: int) -> None:
        """Close the open window if it has lasted long enough."""
        with self.lock:
            lasted = now_s - self.begun_s
            if lasted >= WINDOW_S:
                self.over.append((epoch_ms, (wire_bytes - self.begun_bytes) / lasted / 1e6))
                self.begun_s, self.begun_bytes = now_s, wire_bytes

    def take(self) -> tuple[int, float]:
        """The oldest window that was not taken yet."""
        with self.lock:
            return self.over.popleft() if self.over else NOTHING


_windows: WeakKeyDictionary[Session, Windows] = WeakKeyDictionary()


def look(session: Session) -> None:
    """Something of this session's has arrived. Costs nothing but a look at the clock while the window lasts."""
    windows = _windows.get(session)
    now = time.monotonic()
    if windows is None:
        _windows.setdefault(session, Windows(now))
    elif now - windows.begun_s >= WINDOW_S:
        windows.look(now, session.statistics()["wire_bytes"], int(1e3 * time.time()))


def get_pushpull_speed() -> tuple[int, float]:
    """When a window of ten seconds ended, in ms since 1970, and how many MB (1e6 bytes) a second this worker sent and received in it; each window is told
    once, the oldest of at most 1024 first. (0, -5.0) where none is left, as BytePS says, and always with BYTEPS_TELEMETRY_ON=0. A window ends with the first
    result after its ten seconds."""
    session = api.current_session()
    session.check()
    if not session.config.telemetry:
        return NOTHING
    look(session)
    return _windows[session].take()
