"""The lines of psgc's log: which job and which member says it, in each of them; as text or as JSON (PSGC_LOG_FORMAT).

2026-11-26 15:54:14,077 job=4178151305938352511 rank=0 INFO psgc.run: ...
{"psgc": "rank=0", "job": 4178151305938352511, "role": "worker", "rank": 0, "time": "2026-11-26T15:54:14.077Z", "level": "INFO", ...}
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from typing import Any, Final

from psgc.config import Config

JSON_BEGINS: Final = '{"psgc": '  # every line of psgc's in JSON does, and hardly any other line


class Speaker:
    """Who this process is in its job: before it has joined, by its place on its machine."""

    def __init__(self, config: Config) -> None:
        self.job, self.role, self.index = config.job, config.role, -1
        self._place = f"node{config.node}.{config.local_rank}"
        if config.role == "server" and config.server_index >= 0:
            self.index = config.server_index
        if config.solo and config.role == "worker":
            self.job, self.index = 0, 0

    @property
    def name(self) -> str:
        """rank=3, server=1, scheduler; worker=node1.0 until ranks are known."""
        if self.role == "scheduler":
            return self.role
        if self.role == "worker":
            return f"rank={self.index}" if self.index >= 0 else f"worker={self._place}"
        return f"server={self.index}" if self.index >= 0 else "server"


class Lines(logging.Formatter):
    """Formats records for ``speaker``."""

    def __init__(self, speaker: Speaker, as_json: bool) -> None:
        super().__init__()
        self.speaker, self._as_json, self._host = speaker, as_json, socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        if self._as_json:
            return self._json(record)
        job = f"job={self.speaker.job} " if self.speaker.job else ""
        text = f"{self.formatTime(record)} {job}{self.speaker.name} {record.levelname} {record.name}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text

    def _json(self, record: logging.LogRecord) -> str:
        speaker = self.speaker
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found: dict[str, Any] = {"psgc": speaker.name, "job": speaker.job, "role": speaker.role}
        if speaker.role != "scheduler":
            found["rank" if speaker.role == "worker" else "server"] = speaker.index if speaker.index >= 0 else None
        found |= {
            "time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name, "message": record.getMessage(), "host": self._host,
            "pid": os.getpid(),
        }  # fmt: skip
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_everything(config: Config) -> Speaker:
    """A process of psgc's own: all records of at least PSGC_LOG_LEVEL go to stderr. Returns who they say it is."""
    speaker = Speaker(config)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(speaker, config.log_format == "json"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    return speaker


def log_own(config: Config) -> Speaker:
    """A process of a script's: psgc's records of at least PSGC_LOG_LEVEL go where the script's do, in its format, or to stderr, if it has set up no logging or
    PSGC_LOG_FORMAT asks for psgc's lines. Returns who they say it is."""
    root, speaker = logging.getLogger("psgc"), Speaker(config)
    root.setLevel(config.log_level.upper())
    ours = [handler for handler in root.handlers if isinstance(handler.formatter, Lines)]
    if config.log_format:
        root.propagate = False  # else the script's handlers would say it again
    if not ours and (config.log_format or not root.hasHandlers()):
        ours = [logging.StreamHandler()]
        root.addHandler(ours[0])
    for handler in ours:
        handler.setFormatter(Lines(speaker, config.log_format == "json"))
    return speaker


def joined(index: int) -> None:
    """This process has this rank, or this index among servers."""
    for handler in (*logging.getLogger("psgc").handlers, *logging.getLogger().handlers):
        if isinstance(handler.formatter, Lines):
            handler.formatter.speaker.index = index
