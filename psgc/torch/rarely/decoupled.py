"""``Decoupled``: a learner that trains at a speed of its own, and exchanges with a syncer instead of with other learners. Nobody waits for anybody.

The syncer (``psgc syncer``) holds the outer parameters. A learner pushes how far it has come once in ``every`` steps; the syncer applies that at once, with a
weight by its staleness, and the learner goes on from what comes back, with what it has done meanwhile. Learners may die, join and be slow without a word.
Sources: Liu et al. 2024 (arXiv 2401.09135), asynchronous local SGD and its delayed Nesterov step; Douillard et al. 2023 (DiLoCo).

Owns the schedule and the learner's numbers: one copy beside its parameters. ``psgc/worker/learner`` has the conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc import __version__
from psgc.codecs import CodecPair, Stream
from psgc.codecs.scheme import slices
from psgc.errors import CodecError, NonFiniteError, PsgcError, RemoteProtocolError, UsageError
from psgc.processes.addresses import SCHEME, split
from psgc.server.syncer.values import pair_of
from psgc.torch.rarely.counting import Steps, count, counted, forget, refuse_another
from psgc.torch.rarely.fragment import Frozen, parts_of
from psgc.torch.rarely.schedule import Schedule
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.run_report import report_of
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.codec_text import codec_text, given_text
from psgc.torch.tensors.held import held_dtype
from psgc.torch.tensors.shards import refuse_pieces
from psgc.transport.security import encryption
from psgc.wire.frames import MAX_PAYLOAD_BYTES
from psgc.wire.learners import Enrol, is_name, learner_number
from psgc.wire.messages import ErrorCode
from psgc.worker.learner.client import LearnerClient

F32 = NDArray[np.float32]
LEFT: Final = "the syncer has nothing of what was done since the last exchange"


class Decoupled:
    """Train ``model`` by ``inner``, and exchange with the syncer once in ``every`` steps. A context manager, or used like the inner optimizer.

        with psgc.Decoupled(model, inner, every=100, at="syncer.example.org:9140", name="lyon", codec="int4"):
            for x, y in batches:
                inner.zero_grad()
                loss(model(x), y).backward()
                inner.step()

    Making it waits for the syncer, and the parameters are then the syncer's; the first learner's are, where it has none yet. Leaving the block without an error
    pushes what was done since the last exchange, and the parameters are the syncer's with it: it is over then, and whoever goes on makes another one. Learners
    take steps of their own number, at their own speed.

    at:        host:port of the syncer, which the learner connects to; None: PSGC_SYNCER.
    name:      of this learner, of which there is one process at a time; None: PSGC_LEARNER. Its token is PSGC_TOKEN. PSGC_ENCRYPT=1 as at the syncer.
    fragments: a number, or a list of modules, as of ``DiLoCo``; the same at every learner.
    delay:     None: what comes back is taken as soon as it is there, and no step ever waits; while it is not there, a fragment that would leave again stays. A
               number: it is taken after so many steps, and waited for.
    codec:     codec text of what is pushed, with error feedback where the codec has it; behind a slash how values come back: none (default), bf16 or fp16.
    Raises UsageError for numbers and names that do not fit, CodecError, and JobFailed where the syncer cannot be reached or refuses this learner.
    """

    _psgc_since: int  # of ``count``
    _psgc_last: int

    def __init__(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, *, every: int, at: str | None = None, name: str | None = None,
        fragments: int | Sequence[torch.nn.Module] = 1, delay: int | None = None, codec: Any = None,
    ) -> None:  # fmt: skip
        parts, self._frozen = parts_of(model, fragments, "Decoupled"), Frozen(model, inner, "Decoupled")
        for key, parameter in model.named_parameters():
            refuse_pieces(parameter, key, "Decoupled", "a learner is one process: leave the sharding out, or use psgc.DiLoCo")
        self._schedule, self._waits = Schedule(every, len(parts), delay or 0, "Decoupled"), delay is not None
        api.init()
        session = api.current_session()
        refuse_replaceable(session, "Decoupled")
        refuse_backup(session, "Decoupled")
        if session.size > 1:
            raise UsageError(
                f"Decoupled: a learner is one process, and this job has {session.size}; start learners one by one, each with a name of its own"
            )
        self._psgc_session, self._psgc_moves = session, frozenset(id(parameter) for part in parts for parameter in part.values())
        refuse_another(inner, "Decoupled")
        config = session.config
        at, name = at or config.syncer, name or config.learner
        if not name or not is_name(name):
            raise UsageError(
                f"Decoupled: name={name!r} (or PSGC_LEARNER): expected this learner's name, of letters, digits, dots, dashes and underscores"
            )
        try:
            host, port = split(at)
        except ValueError:
            raise UsageError(f"Decoupled: at={at!r} (or PSGC_SYNCER): expected host:port of the syncer") from None
        del host, port
        if config.encrypt:
            encryption.require()
        codecs = _codecs(config.codec if codec is None else codec_text(given_text(codec), "float32"))
        number = learner_number(name)
        self.name, self.inner, self.steps, self.stayed = name, inner, 0, 0
        self._parts = [_Part(place, part, codecs, Stream(config.seed, 0, number, place)) for place, part in enumerate(parts)]
        enrol = Enrol(
            name, __version__, secrets.randbits(62), codecs.push.canonical, codecs.pull.canonical, tuple(part.text for part in self._parts),
            tuple(part.numel for part in self._parts),
        )  # fmt: skip
        self._client: LearnerClient | None = LearnerClient(
            config, SCHEME + at.removeprefix(SCHEME), enrol, [part.base for part in self._parts],
            lambda place, *known: self._parts[place].brought(*known),
        )  # fmt: skip
        self._in_block = False
        self._told = report_of(session).exchanged_rarely(f"Decoupled, learner {name}", self._schedule.every, LEFT)
        count(inner, self)
        self._hook = Steps(inner, self._stepped)
        try:
            for part in self._parts:
                self._take(part, wait=True)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Decoupled:
        self._open()
        self._in_block = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._in_block = False
        try:
            if kind is None and self._client is not None:  # else finish() was called within the block
                self.finish()
        finally:
            self._close()

    def finish(self) -> None:
        """Push what was done since the last exchange, wait for the answer, and end the connection: the parameters are then the syncer's. No other learner need
        do so. Raises JobFailed where the syncer is out of reach, UsageError where the exchange has ended."""
        self._open()
        self._frozen.check()
        for part in self._parts:
            if part.under_way:
                self._take(part, wait=True)
        # A push without progress would still count as one of the rule's, and have its momentum go on alone.
        left = [part for part in self._parts if part.moved]
        for part in left:
            self._leave(part)
        for part in left:
            self._take(part, wait=True)
        self._told.finished(apart=bool(left))
        self._close()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimizer, and what is due after it. Raises UsageError where the exchange has ended."""
        self._open()
        return self.inner.step() if closure is None else self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's. Schedulers of torch take the inner optimizer itself."""
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The steps taken, and what the codec has not sent yet: beside the model's and the inner optimizer's. A learner that starts again takes the parameters
        that the syncer has then, whatever its model's were."""
        return {
            "steps": self.steps,
            "residuals": [None if part.residual is None else torch.from_numpy(part.residual.copy()) for part in self._parts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Raises UsageError for what does not fit, and nothing is changed then."""
        if not _is_state(state):
            raise UsageError("Decoupled: this is no state of a Decoupled's state_dict()")
        sizes = [0 if one is None else one.numel() for one in state["residuals"]]
        if sizes != [0 if part.residual is None else part.numel for part in self._parts]:
            raise UsageError("Decoupled: the state is of other fragments, or of another codec; make it as it was, or load no state")
        for part, one in zip(self._parts, state["residuals"], strict=True):
            if part.residual is not None:
                part.residual[:] = one.reshape(-1).to("cpu", torch.float32).numpy()
        self.steps = state["steps"]

    @uncompiled
    def _stepped(self) -> None:
        """The inner optimizer has taken a step."""
        self._open()  # a step in the block, after finish()
        counted(self)
        self.steps += 1
        self._told.stepped(settled=False)
        taken, leaving = self._schedule.taken(self.steps), self._schedule.leaving(self.steps)
        if self._waits and taken is not None and self._parts[taken].under_way:
            self._take(self._parts[taken], wait=True)
        if not self._waits:
            for part in self._parts:
                if part.under_way:
                    self._take(part, wait=False)
        if leaving is None:
            return
        self._frozen.check()
        part = self._parts[leaving]
        if part.under_way:
            self.stayed += 1  # its last push is still on its way
            return
        self._leave(part)
        if self._waits and not self._schedule.delay:
            self._take(part, wait=True)

    def _leave(self, part: _Part) -> None:
        client = self._open()
        payload = part.leave(self.name)
        client.push(part.place, part.version, payload, part.base)

    def _take(self, part: _Part, wait: bool) -> None:
        client = self._open()
        values = client.answer(part.place, wait)
        if values is None:
            return
        part.take(values.payload, self.name)
        part.version = values.version
        client.took(part.place, part.base)

    @property
    def _psgc_counts_as(self) -> str:
        """In messages."""
        return f"the Decoupled of learner {self.name}"

    @property
    def _psgc_settled(self) -> bool:
        """Whether its exchange has ended."""
        return self._client is None

    def _psgc_count_no_more(self) -> None:
        """Its steps are the inner optimizer's own affair from now on."""
        forget(self.inner, self)
        self._hook.remove()

    def _open(self) -> LearnerClient:
        if self._client is None:
            raise UsageError(
                f"Decoupled: learner {self.name}'s exchange has ended, with finish() or its block; make another Decoupled to go on"
            )
        return self._client

    def _close(self) -> None:
        if not self._in_block:  # there, a step that nobody would hear of is refused
            self._psgc_count_no_more()
        client, self._client = self._client, None
        if client is not None:
            client.close()


@dataclass(slots=True)
class _Flat:
    """Parameters as one vector of float32 on the host."""

    parameters: list[torch.Tensor]
    numel: int

    @torch.no_grad()
    def read(self) -> F32:
        flat = torch.empty(self.numel)
        torch.cat([parameter.detach().reshape(-1).to("cpu", torch.float32) for parameter in self.parameters], out=flat)
        array: F32 = flat.numpy()
        return array

    @torch.no_grad()
    def write(self, values: F32) -> F32:
        """Returns them as the parameters' dtypes round them."""
        place, flat = 0, torch.from_numpy(values)
        for parameter in self.parameters:
            own = flat[place : place + parameter.numel()]
            parameter.copy_(own.view(parameter.shape))
            own.copy_(parameter.detach().reshape(-1))
            place += parameter.numel()
        return values


class _Part:
    """A fragment. base: while nothing is under way, the values that progress is measured from; else what the parameters were when it left. The array is
    replaced, and never written again: the connection's thread reads it."""

    def __init__(self, place: int, parameters: Mapping[str, torch.Tensor], codecs: CodecPair, stream: Stream) -> None:
        for name, parameter in parameters.items():
            if held_dtype(parameter, name, "Decoupled") != torch.float32:
                raise UsageError(
                    f"Decoupled: parameter {name!r} is {parameter.dtype}; syncers hold float32, bfloat16 and float16, as float32"
                )
        self.place, self.version, self.under_way = place, 0, True
        self.numel = sum(parameter.numel() for parameter in parameters.values())
        if 4 * self.numel > MAX_PAYLOAD_BYTES:
            raise UsageError(
                f"Decoupled: fragment {place} has {self.numel:,} elements; choose more fragments, of {MAX_PAYLOAD_BYTES // 4:,} elements at most"
            )
        self.text = "\n".join(f"{name} {list(parameter.shape)}" for name, parameter in parameters.items())
        self._flat = _Flat(list(parameters.values()), self.numel)
        self._codecs, self._stream, self._pushes = codecs, stream, 0
        codecs.push.check_bucket(self.numel)
        self.base = self._flat.read()
        self.residual: F32 | None = np.zeros(self.numel, np.float32) if codecs.push.feedback else None

    def brought(self, base: F32, pushed: NDArray[np.uint8] | None, answered: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        """The payload of the syncer's last values that this learner knows, for a syncer that has none; its own, where it has never had any.

        base, pushed, answered: as of ``Conversation.bring``. A push that is not answered is repeated, and so is taken off: with it the values are what the
        parameters were when it left. They then differ from the syncer's last ones by what the codec has not sent. Any thread may call. Raises
        RemoteProtocolError for an answer that is no payload.
        """
        if answered is not None:
            try:
                return self._decoded(answered).view(np.uint8)
            except PsgcError as error:
                raise RemoteProtocolError(f"fragment {self.place}: {error}", ErrorCode.BAD_PAYLOAD) from None
        if pushed is None:
            return base.view(np.uint8)
        push, values = self._codecs.push, np.empty(self.numel, np.float32)
        for lo, hi in slices(push, self.numel):
            push.fold([pushed], self.numel, lo, hi, values[lo:hi], True)
        return np.subtract(base, values, out=values).view(np.uint8)

    def _decoded(self, payload: NDArray[np.uint8]) -> F32:
        """The syncer's values. Raises PsgcError for what is no payload."""
        pull, values = self._codecs.pull, np.empty(self.numel, np.float32)
        pull.validate(payload, self.numel)
        for lo, hi in slices(pull, self.numel):
            pull.decode(payload, self.numel, lo, hi, values[lo:hi])
        return values

    @property
    def moved(self) -> bool:
        """Whether the parameters have changed since they were last the syncer's."""
        return not np.array_equal(self._flat.read(), self.base)

    def leave(self, learner: str) -> NDArray[np.uint8]:
        """The payload of the progress. Raises NonFiniteError."""
        push, now = self._codecs.push, self._flat.read()
        delta = now - self.base
        if not np.isfinite(delta).all():
            raise NonFiniteError(
                f"learner {learner}: fragment {self.place} has NaN or infinity among its parameters; nothing of it was pushed"
            )
        self._pushes += 1
        out = np.empty(push.payload_bound(self.numel), np.uint8)
        encoded = push.encode(delta, self.residual, 1.0, self._stream.at(self._pushes), out)
        payload = out[: encoded.payload_bytes]
        for lo, hi in slices(push, self.numel) if self.residual is not None else ():
            assert self.residual is not None
            push.commit(payload, self.numel, lo, hi, delta[lo:hi], self.residual[lo:hi], 1.0)
        self.base, self.under_way = now, True
        return payload

    def take(self, payload: NDArray[np.uint8], learner: str) -> None:
        """Go on from the syncer's values, with what was done since the progress left."""
        try:
            values = self._decoded(payload)
        except PsgcError as error:
            raise PsgcError(f"learner {learner}: fragment {self.place} from the syncer: {error}") from None
        since = self._flat.read()
        since -= self.base
        values += since
        base = self._flat.write(values)
        base -= since  # so that what is left of the next progress is this, and not how the dtype rounds
        self.base, self.under_way = base, False


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping):
        return False
    steps, residuals = state.get("steps"), state.get("residuals")
    return (
        isinstance(steps, int)
        and isinstance(residuals, Sequence)
        and all(one is None or isinstance(one, torch.Tensor) for one in residuals)
    )


def _codecs(text: str) -> CodecPair:
    """Raises CodecError for codecs of several rounds, with momentum, or whose answer is one that keeps a residual."""
    push, _, answer = text.partition("/")
    try:
        return pair_of(push, answer or "none")
    except CodecError as error:
        raise CodecError(f"{error}; a learner pushes by a codec of one round, such as 'int4' or 'topk:k=0.01/bf16'") from None
