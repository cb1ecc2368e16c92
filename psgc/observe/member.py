"""A member's own timeline while its job runs: the recorder, the buckets' names, and when the file is written.

The file is written once the last traced step is over, in a thread of its own, and again when the process leaves the job if more has come since: after
a failure, too.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from psgc.config import Config
from psgc.errors import ConfigError, PsgcError
from psgc.layout import Bucket, Layout
from psgc.observe.lanes import Described
from psgc.observe.recorder import Recorder
from psgc.observe.timeline import About, Name, write_timeline
from psgc.transport.host import host_id

logger = logging.getLogger(__name__)
NOT_JOINED: Final = -1


class MemberTrace:
    """See the module's text. Base of what each role records."""

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

    def joined(self, index: int, node_sizes: tuple[int, ...]) -> None:
        """The job is complete: who this is."""
        self._index, self._node_sizes = index, node_sizes

    def laid_out(self, layout: Layout) -> None:
        """Remember the layout's buckets by name."""
        for bucket in layout.buckets:
            self._names[layout.id, bucket.index] = Name(layout.name, bucket.index, _described(layout, bucket))

    def begun(self, step: int) -> None:
        """A step of some bucket begins: the first one behind the last that is traced has the file written."""
        if step <= self._steps:
            return
        self._steps = step
        if step > self.recorder.last and self._writing is None:
            self._writing = threading.Thread(target=self._write, name="psgc-trace")
            self._writing.start()

    def close(self) -> None:
        """Write what there is, unless it is written."""
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
                path = write_timeline(self._folder, about, spans, dict(self._names))
            except PsgcError as error:
                logger.warning("%s", error)
            else:
                logger.info("timeline written file=%s spans=%d dropped=%d", path, len(spans), self.recorder.dropped)
            self._written = len(spans)


def recorder_of(config: Config) -> Recorder:
    """What a process that traces records into. Raises ConfigError where its folder cannot be made."""
    try:
        Path(config.trace_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"PSGC_TRACE={config.trace_folder}: the folder cannot be made: {error.strerror}") from None
    return Recorder(config.trace_first, config.trace_last)


def _described(layout: Layout, bucket: Bucket) -> Described:
    return Described(layout.tensors[bucket.tensors[0]].name, len(bucket.tensors), bucket.numel, bucket.codec, bucket.option)
