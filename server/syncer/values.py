"""The numbers of a syncer: the outer parameters by fragment, what the rule keeps of them, and the file that they are saved to.

Owns decoding and encoding; each learner has codecs of its own. Numbers only.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from psgc.codecs import CodecPair, Stream, parse_codec
from psgc.codecs.scheme import slices
from psgc.errors import CodecError, PsgcError, RemoteProtocolError
from psgc.layout.update_rule import UpdateRule
from psgc.server.syncer.picture import Picture
from psgc.server.syncer.state import INITIAL_VALUES, Learner, SyncerState
from psgc.server.weights.rules import RuleState
from psgc.wire.frames import MAX_PAYLOAD_BYTES
from psgc.wire.messages import ErrorCode

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
FORMAT: Final = 1
KEPT: Final = ("momentum", "gathered")  # of ``RuleState``, which writes them in place
ANSWERS: Final = ("none", "bf16", "fp16")  # by which values come back: they are taken as they are, so that nothing can be sent later
_STILL: Final = Stream(0, 0, 0, 0)  # none of these draws random numbers


def pair_of(codec: str, answer: str) -> CodecPair:
    """Raises CodecError for codecs that a learner cannot have."""
    if answer not in ANSWERS:
        raise CodecError(f"codec {codec}/{answer}: values come back by {', '.join(ANSWERS)}")
    return CodecPair(parse_codec(codec), parse_codec(answer))


class Values:
    """fragments: the outer parameters, float32. All methods are the loop's thread's.

    Invariant: an array of ``fragments`` is replaced and never written again, so that answers that are under way, and a file that is being written, keep it.
    What the rule keeps is written in place, and so is copied before the first update after each picture.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self.fragments: list[F32] = []
        self._states: list[RuleState] = []
        self._delta: F32 = np.empty(0, np.float32)  # what was decoded last
        self._pictured: set[int] = set()  # fragments of which a picture has what the rule keeps

    def begin(self, sizes: tuple[int, ...]) -> None:
        """Raises RemoteProtocolError for fragments that no message carries."""
        most = max(sizes)
        if 4 * most > MAX_PAYLOAD_BYTES:
            raise RemoteProtocolError(
                f"a fragment of {most:,} elements; make more of them, of {MAX_PAYLOAD_BYTES // 4:,} at most", ErrorCode.DISAGREE
            )
        self.fragments = [np.zeros(size, np.float32) for size in sizes]
        self._states = [RuleState(self.rule, size, np.float32) for size in sizes]

    def decode(self, codecs: CodecPair, fragment: int, payload: Bytes | None, initial: bool) -> None:
        """Read what a learner has pushed, for ``apply``. Raises RemoteProtocolError for what is no payload, or not finite."""
        if fragment >= len(self.fragments):
            return  # the state machine refuses it
        numel = self.fragments[fragment].size
        push = parse_codec("none") if initial else codecs.push
        given = np.empty(0, np.uint8) if payload is None else payload
        try:
            push.validate(given, numel)
            self._delta = np.empty(numel, np.float32)
            for lo, hi in slices(push, numel):
                push.fold([given], numel, lo, hi, self._delta[lo:hi], True)
        except PsgcError as error:
            raise RemoteProtocolError(f"fragment {fragment}: {error}", ErrorCode.BAD_PAYLOAD) from None
        if not np.isfinite(self._delta).all():
            raise RemoteProtocolError(
                f"fragment {fragment}: what was pushed holds NaN or infinity, and is not applied", ErrorCode.BAD_PAYLOAD
            )

    def apply(self, fragment: int, staleness: int) -> None:
        """Apply what was decoded last."""
        old, delta = self.fragments[fragment], self._delta
        if staleness == INITIAL_VALUES:
            self.fragments[fragment] = delta.copy()
            return
        state, new = self._states[fragment], np.empty_like(old)
        if fragment in self._pictured:
            self._pictured.discard(fragment)
            state.momentum, state.gathered = (None if kept is None else kept.copy() for kept in (state.momentum, state.gathered))
        state.begin(staleness)
        state.apply(0, old.size, old, delta, 1, new)
        self.fragments[fragment] = new

    def encoded(self, codecs: CodecPair, fragment: int) -> Bytes:
        """The values as they travel back; not written again."""
        values, pull = self.fragments[fragment], codecs.pull
        if pull.canonical == "none":
            return values.view(np.uint8)
        out = np.empty(pull.payload_bound(values.size), np.uint8)
        return out[: pull.encode(values, None, 1.0, _STILL, out).payload_bytes]

    def picture(self, state: SyncerState) -> Picture:
        """Everything as it is now, for a file; what is applied afterwards leaves it as it is. Takes no time to speak of: nothing is copied yet."""
        meta = {
            "format": FORMAT, "rule": self.rule.canonical, "model": state.model, "versions": state.versions,
            "learners": {name: asdict(learner) for name, learner in state.learners.items()},
            "pushes": [of.pushes for of in self._states],
        }  # fmt: skip
        arrays: Picture = {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}
        for number, (values, of) in enumerate(zip(self.fragments, self._states, strict=True)):
            arrays[f"values.{number}"] = values
            for kind in KEPT:
                kept = getattr(of, kind)
                if kept is not None:
                    arrays[f"{kind}.{number}"] = kept
        self._pictured = set(range(len(self._states)))
        return arrays

    def load(self, path: Path) -> SyncerState:
        """Go on from a file. Raises PsgcError for one that is none, or of another rule."""
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(arrays["meta"].tobytes())
            if meta["format"] != FORMAT:
                raise PsgcError(f"syncer: --save {path}: of format {meta['format']}, and {FORMAT} expected")
            sizes = tuple(int(arrays[f"values.{number}"].size) for number in range(len(meta["versions"])))
            learners = {name: Learner(**one) for name, one in meta["learners"].items()}
            state = SyncerState(self.rule.canonical, tuple(meta["model"]), sizes, [int(v) for v in meta["versions"]], learners)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile) as error:
            raise PsgcError(f"syncer: --save {path}: no file of a syncer's, or not whole ({type(error).__name__})") from None
        if meta["rule"] != self.rule.canonical:
            raise PsgcError(f"syncer: --save {path}: of the rule {meta['rule']}, not {self.rule.canonical}; give that one, or another file")
        self.begin(sizes)
        for number, of in enumerate(self._states):
            self.fragments[number] = arrays[f"values.{number}"].astype(np.float32)
            of.pushes = int(meta["pushes"][number])
            of.momentum, of.gathered = arrays.get(f"momentum.{number}"), arrays.get(f"gathered.{number}")
        return state
