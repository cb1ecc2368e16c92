"""A server that relays payloads: those of a step that was given up are not among the next one's."""

from __future__ import annotations

import numpy as np

from psgc.codecs import CodecPair, Stream, parse_codec
from psgc.codecs.relay import RelayCodec, join_payloads
from psgc.layout import make_key
from psgc.server.engine import Engine, KeyWork
from psgc.server.step import NO_SLOT, Fold, KeySpec
from psgc.server.store import KeyShape, Store

KEY, NUMEL, RANKS = make_key(1, 0, 0), 50, 9  # one more than are folded at once


def test_payloads_of_a_step_that_somebody_had_no_finite_gradients_for_are_dropped() -> None:
    codec = parse_codec("onebit")
    pair = CodecPair(codec, RelayCodec(codec, RANKS))
    spec = KeySpec(KEY, NUMEL, range(RANKS), pair.push.codec_id, pair.pull.codec_id)
    work = KeyWork(spec, pair, 0, 0, False)
    store = Store(())
    store.add_keys([KeyShape(KEY, RANKS * pair.push.payload_bound(NUMEL) + 64, 0, 0, pair.push.payload_bound(NUMEL))])
    engine = Engine(1, lambda _: None, lambda _: None)
    payloads = []
    for rank in range(RANKS):
        payload = np.empty(pair.push.payload_bound(NUMEL), np.uint8)
        used = pair.push.encode(np.full(NUMEL, rank + 1, np.float32), None, 1.0, Stream(0, 1, rank, 0), payload).payload_bytes
        payloads.append(payload[:used])

    def run(step: int, ranks: range, fresh: bool, last: bool) -> None:
        engine.run(
            Fold(KEY, step, tuple(payloads[rank] for rank in ranks), fresh, last, slot=0 if last else NO_SLOT), work, store.keys[KEY]
        )

    run(1, range(8), True, False)  # rank 8 says that its gradients are not finite, and there is no last block
    run(2, range(8), True, False)
    run(2, range(8, 9), False, True)
    wanted = np.zeros_like(store.keys[KEY].result(0))
    size = join_payloads(payloads, wanted)
    assert np.array_equal(store.keys[KEY].result(0)[:size], wanted[:size])
    engine.close()
