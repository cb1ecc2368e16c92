"""A bucket's elements on a device whose scheme keeps a state there: rounds are encoded, taken in and applied where gradients lie.

One ``DeviceState`` a slice. A state's memory is made and used by the engine's ``compute`` stream alone, in the order in which pool threads ask for it.
Between steps, what is saved goes to the host's state of the same scheme and comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from psgc.codecs import Scheme, SchemeState
from psgc.codecs.codec import Stream
from psgc.device.state import DeviceState
from psgc.errors import CodecError
from psgc.torch.device.elements import DeviceElements, values_of
from psgc.torch.device.engine import Engine
from psgc.torch.device.sent import Sent
from psgc.worker.device import Bytes, EncodedThen
from psgc.worker.residuals.residual import F32, Residual


class StateElements(DeviceElements):
    """See the module's text. states: by slice."""

    def __init__(self, engine: Engine, states: dict[tuple[int, int], DeviceState], elements: Callable[[], torch.Tensor]) -> None:
        super().__init__(engine, None, None, elements)
        self._states = states

    @classmethod
    def of(
        cls, engine: Engine, scheme: Scheme, slices: Sequence[tuple[int, int]], elements: Callable[[], torch.Tensor]
    ) -> StateElements | None:
        """None where the device has no kernels for the scheme, or not for tensors of these shapes."""
        states: dict[tuple[int, int], DeviceState] = {}
        for lo, hi in slices:
            try:
                state = engine.state(scheme, hi - lo)
            except CodecError:
                return None
            if state is None:
                return None
            states[lo, hi] = state
        return cls(engine, states, elements) if states else None

    def encode(
        self, index: int, lo: int, hi: int, residual: Residual | None, rescale: float, stream: Stream, out: Bytes, then: EncodedThen
    ) -> None:
        state, kept, grad, sent = self._states[lo, hi], values_of(residual), self._elements()[lo:hi], self._sent_round(index, lo, hi)

        def work(scratch: torch.Tensor) -> None:
            state.encode(index, grad, kept, rescale, stream, sent.room, sent.status, scratch)

        self._encode(sent, state.scratch_bytes(), work, [grad, *([] if kept is None else [kept])], [], out, then)

    def take(self, index: int, lo: int, hi: int, payload: Bytes) -> None:
        state = self._states[lo, hi]
        round_ = state.rounds[index]
        round_.pair.pull.validate(payload, round_.numel)
        with self._engine.incoming([payload]) as (arrived,):
            self._engine.compute_on(lambda: state.take(index, arrived), [arrived], [])

    def apply(self, lo: int, hi: int, payload: Bytes, residual: Residual | None, rescale: float) -> None:
        state, kept, target = self._states[lo, hi], values_of(residual), self._elements()[lo:hi]
        pieces, sent = state.pieces(payload), self._sent_payloads(lo, hi)
        held = [] if kept is None else [kept]
        with self._engine.incoming(pieces) as arrived:
            self._engine.compute_on(
                lambda: state.apply(arrived, sent, target, kept, rescale), [*arrived, *sent, target, *held], [target, *held]
            )

    def add_back(self, lo: int, hi: int, residual: Residual) -> None:
        state, kept, sent = self._states[lo, hi], values_of(residual), self._sent_payloads(lo, hi)
        assert kept is not None
        self._engine.compute_on(lambda: state.add_back(sent, kept), [*sent, kept], [kept])

    def state_to_host(self, lo: int, hi: int, state: SchemeState) -> None:
        device_state, engine = self._states[lo, hi], self._engine
        saved: list[torch.Tensor] = []
        factors: dict[int, torch.Tensor] = {}

        def look() -> None:
            values = device_state.saved
            saved.extend([] if values is None else [values])
            factors.update(device_state.factors)

        engine.compute_on(look, [], [])
        for values in saved:
            state.restore(_host(engine, values))
        if factors:
            state.restore_factors({first: _host(engine, values) for first, values in factors.items()})

    def state_from_host(self, lo: int, hi: int, state: SchemeState) -> None:
        device_state, engine = self._states[lo, hi], self._engine
        saved, factors = state.saved, state.factors
        if saved is not None:
            velocity = engine.brought(np.asarray(saved, np.float32))
            engine.compute_on(lambda: device_state.restore(velocity), [velocity], [])
        if factors:
            brought = {first: engine.brought(np.asarray(values, np.float32)) for first, values in factors.items()}
            engine.compute_on(lambda: device_state.restore_factors(brought), list(brought.values()), [])

    def _sent_round(self, index: int, lo: int, hi: int) -> Sent:
        round_ = self._states[lo, hi].rounds[index]
        return self._sent_of(lo, hi, index, round_.pair.push.payload_bound(round_.numel))

    def _sent_payloads(self, lo: int, hi: int) -> list[torch.Tensor]:
        return [self._sent_round(index, lo, hi).payload for index in range(len(self._states[lo, hi].rounds))]


def _host(engine: Engine, values: torch.Tensor) -> F32:
    found: F32 = engine.fetch(values)
    return found
