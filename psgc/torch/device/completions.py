"""The thread that sleeps until the device has come to an event, then calls back: so neither training nor the network thread ever waits for a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from psgc.errors import DeviceError
from psgc.torch.device.faults import fault_of
from psgc.torch.device.runtime import Event

Then = Callable[["DeviceError | None"], None]


class Completions:
    """Events of one stream, in the order in which they were recorded. name: of the device, for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: queue.SimpleQueue[tuple[Event, Then]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def when(self, event: Event, then: Then) -> None:
        """Call ``then`` once the device has come to the event, with None, or with what went wrong on the device. It is called in the completions' thread,
        must be quick, and may enqueue work but not take staging slots."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"psgc-{self._name}", daemon=True)
                self._thread.start()
        self._due.put((event, then))

    def _run(self) -> None:
        while True:
            event, then = self._due.get()
            try:
                event.synchronize()
            except RuntimeError as error:
                then(fault_of(error, self._name))
            else:
                then(None)
            del event, then  # what they refer to must not live on while this thread sleeps
