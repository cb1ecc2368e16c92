"""A member's own timeline while its job runs: the recorder, the buckets' names, and when the file is written.

A separate thread writes the file when the last traced step is over. If more has been recorded when the process leaves the job, also after a failure, the
file is written again. A process that follows another in its place leaves that one's file as it is, unless it has recorded something itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.layout import Bucket, Layout
from psgc.observe.lanes import Described
from psgc.observe.recorder import Recorded, Recorder
from psgc.observe.timeline import About, Name, write_timeline
from psgc.transport.host import host_id

logger = logging.getLogger(__name__)
NOT_JOINED: Final = -1


class MemberTrace:
    """See the module's text. The base class of each role's trace."""

    role = ""

    def __init__(self, folder: str, recorder: Recorder) -> None:
        self.recorder = recorder
        self._folder = folder
        self._index = NOT_JOINED
        self._node_sizes: tuple[int, ...] = ()
        self._host = host_id()
        self._names: dict[tuple[int, int], Name] = {}
        self._steps = 0  # the largest that was begun
        self._writing: threading.Thread | None = None
        self._written = -1
        self._lock = threading.Lock()

    def joined(self, index: int, node_sizes: tuple[int, ...], follows: bool = False) -> None:
        """Note this member's index and the job's nodes, once the job is complete. follows: another process has been this member before."""
        self._index, self._node_sizes = index, node_sizes
        if follows:
            self._written = 0

    def laid_out(self, layout: Layout, taken: int = 0) -> None:
        """Remember the layout's buckets by name. taken: as of ``Membership``."""
        for bucket in layout.buckets:
            self._names[layout.id, bucket.index] = Name(layout.name, bucket.index, _described(layout, bucket))

    def begun(self, step: int) -> None:
        """Note that a step of some bucket begins. The first one after the last traced step starts the writing of the file."""
        if step <= self._steps:
            return
        self._steps = step
        if step > self.recorder.last and self._writing is None:
            self._writing = threading.Thread(target=self._write, name="psgc-trace")
            self._writing.start()

    def close(self) -> None:
        """Write the file, unless everything is already written."""
        if self._writing is not None:
            self._writing.join()
        self._write()

    def _write(self) -> None:
        with self._lock:
            if self._index == NOT_JOINED or self._written == len(self.recorder):
                return
            spans = self.recorder.spans()
            about = About(
                self.role, self._index, self._host, self._host.partition("/")[0], self._node_sizes, self.recorder.first, self.recorder.last, self._steps,
                self.recorder.dropped,
            )  # fmt: skip
            try:
                path = self._write_file(about, spans)
            except PsgcError as error:
                logger.warning("%s", error)
            else:
                logger.info("timeline written file=%s spans=%d dropped=%d", path, len(spans), self.recorder.dropped)
            self._written = len(spans)

    def _write_file(self, about: About, spans: Sequence[Recorded]) -> Path:
        return write_timeline(self._folder, about, spans, dict(self._names))


def recorder_of(config: Config) -> Recorder:
    """The recorder of a process that traces. Raises ConfigError if its folder cannot be made."""
    try:
        Path(config.trace_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"PSGC_TRACE={config.trace_folder}: the folder cannot be made: {error.strerror}") from None
    return Recorder(config.trace_first, config.trace_last)


def _described(layout: Layout, bucket: Bucket) -> Described:
    return Described(layout.tensors[bucket.tensors[0]].name, len(bucket.tensors), bucket.numel, bucket.codec, bucket.option)
