"""What encoding leaves out at one place that encodes: a residual that changes only when the step's result is there.

Encoding reads the residual. A result commits what was left out: over servers it is computed again, from the gradient, when the result comes, and kept in
place; programs over groups write it beside the old one while they encode (``spare``), because the gradient is overwritten before the result is there.
A step that the trainer does not apply is taken back: the place gets its own payload back, or its old residual, or servers add the step back to theirs.

Numbers only. Invariant: ``value``, in units that ``rescale`` makes those of the next step, is what has not been applied yet of what this place was given.
"""

from __future__ import annotations

from collections.abc import Callable

from psgc.codecs import ResidualDtype, SchemeState
from psgc.worker.device import DeviceBucket
from psgc.worker.residuals.residual import Residual, make_residual

# Adds the elements that this rank's last payload encodes to a residual, which lies on the device, None: on the host.
AddOwn = Callable[[Residual, DeviceBucket | None], None]


class Feedback:
    """dtype: how the residual is kept, None: the codec keeps none. spare: see the module's text. own: adds this rank's own payload; None: of a step that
    is not applied the old residual is taken back where there is one (``takes_back``), and else servers add it to theirs."""

    def __init__(self, numel: int, dtype: ResidualDtype | None, own: AddOwn | None, spare: bool = False, takes_back: bool = False) -> None:
        self.numel, self.dtype = numel, dtype
        self._own, self._takes_back = own, takes_back
        self.device: DeviceBucket | None = None  # where residuals are kept; None: on the host
        self.value = None if dtype is None else self._new()
        self.spare = self._new() if spare else None
        self.rescale = 1.0
        self._old_rescale = 1.0  # of ``spare``, while that holds the residual before the last step
        self.committed = False  # whether the last step has a result that the residual counts on

    @property
    def by_servers(self) -> bool:
        """Whether servers add a step that is not applied to their residual."""
        return self._own is None and not self._takes_back

    def _new(self) -> Residual:
        return make_residual(self.dtype or "float32", self.numel) if self.device is None else self.device.residual(self.numel)

    # a step

    def begin(self, dropped: bool, rescale: float) -> None:
        """A step starts, in which gradients are ``rescale`` times as large as in the last one. dropped: the trainer did not apply that one."""
        if dropped and self.committed and self.value is not None:
            if self._takes_back and self.spare is not None:
                self.value, self.spare, self.rescale = self.spare, self.value, self._old_rescale
            elif self._own is not None:
                self._own(self.value, self.device)
        self.committed = False
        self.rescale *= rescale
        self._old_rescale *= rescale

    def move(self, device: DeviceBucket | None) -> None:
        """Keep residuals on this device from now on, None: on the host. Before the step is encoded."""
        if self.device is device:
            return
        self.device = device
        self.value, self.spare = (None if each is None else self._moved(each) for each in (self.value, self.spare))

    def _moved(self, residual: Residual) -> Residual:
        values, moved = residual.load(), self._new()
        moved.keep(values)
        return moved

    def commit(self) -> None:
        """The step has a result of which this rank's payload is part, and the new residual counts."""
        if self.spare is not None and self.value is not None:
            self.value, self.spare, self._old_rescale = self.spare, self.value, self.rescale
        if self.value is not None:
            self.rescale = 1.0
        self.committed = True

    # between steps

    def kept(self, dropped: bool) -> tuple[Residual, float]:
        """What is kept, to read, and the factor by which it must still be multiplied. dropped: as the next ``begin`` will be told."""
        assert self.value is not None
        if not (dropped and self.committed):
            return self.value, self.rescale
        if self._takes_back and self.spare is not None:
            return self.spare, self._old_rescale
        if self._own is None:
            return self.value, self.rescale
        held = self._moved(self.value)  # a copy: reading changes no state
        self._own(held, self.device)
        return held, self.rescale

    def restored(self, rescale: float = 1.0) -> None:
        """``value`` has been set to what another job kept, before the first step."""
        self.rescale, self.committed = rescale, False


class PlacedState:
    """What a scheme keeps of a slice besides the residual (momentum, PowerSGD's Q): in a state on the host, and on the device that encodes the slice."""

    def __init__(self, state: SchemeState, lo: int, hi: int) -> None:
        self.state, self._slice = state, (lo, hi)
        self.device: DeviceBucket | None = None
        self._used = False  # whether the state may be another than a new one

    def begin(self, device: DeviceBucket | None) -> None:
        """A step starts, and is encoded on this device, None: on the host."""
        if device is not self.device:
            self.to_host()
            self.device = device
            if self._used:
                self.from_host()
        self._used = True

    def to_host(self) -> None:
        """Bring the state on the host to what the device has."""
        if self.device is not None:
            self.device.state_to_host(*self._slice, self.state)

    def from_host(self) -> None:
        """Go on from the state on the host, wherever the slice is encoded."""
        self._used = True
        if self.device is not None:
            self.device.state_from_host(*self._slice, self.state)
