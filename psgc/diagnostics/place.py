"""The line of the user's own code in a traceback: the innermost frame outside of libraries."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Final

_PSGC: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY: Final = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED: Final = {"site-packages", "dist-packages"}


def users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The frames of the user's own files in a traceback; if it has none, those of libraries other than psgc."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_file(frame.filename)]
    return [frame for frame in frames if _is_users(frame.filename)] or frames


def place(trace: TracebackType | None) -> str:
    """ "train.py:17", the user's innermost line; "" where no file is involved."""
    return place_of([(frame.filename, frame.lineno or 0) for frame in users_frames(trace)])


def main_place() -> str:
    """The same of what the main thread runs now; "" once the script has ended."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0) if main.is_alive() else None
    frames = [] if frame is None else [(outer.f_code.co_filename, line) for outer, line in traceback.walk_stack(frame)]
    return place_of(frames[::-1])


def place_of(frames: Sequence[tuple[str, int]]) -> str:
    """The same of (file, line) pairs, outermost first."""
    files = [frame for frame in frames if _is_file(frame[0])]
    users = [frame for frame in files if _is_users(frame[0])] or files
    if not users:
        return ""
    path, line = users[-1]
    here = os.path.relpath(path)
    return f"{path if here.startswith('..') else here}:{line}"


def _is_file(path: str) -> bool:
    return not path.startswith("<") and not os.path.abspath(path).startswith(_PSGC)


def _is_users(path: str) -> bool:
    absolute = os.path.abspath(path)
    return not absolute.startswith(_STANDARD_LIBRARY) and _INSTALLED.isdisjoint(absolute.split(os.sep))
