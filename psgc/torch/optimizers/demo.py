"""DeMo: momenta stay on their rank, and only what changes slowly of them travels: the largest cosine coefficients of each square of 64 x 64.

    m <- decay m + gradient;  q = what is sent of m;  m <- m - q;  parameter <- parameter - lr sign(sum of all ranks' q)

Source: Peng, Quesnelle and Kingma 2024 (arXiv 2411.19870), algorithm 1. Owns how parameters lie in squares; the scheme ``demo`` (``psgc/codecs/outer.py``)
has the momentum as its residual, the transform and the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from psgc.codecs import BucketContext, Stream, parse_scheme
from psgc.codecs.outer import CHUNK, SIDE, numel_in_squares, sides_of
from psgc.codecs.relay import join_payloads
from psgc.errors import NonFiniteError, UsageError
from psgc.torch.optimizers.wrapping import refuse_copy, refuse_no_parameters
from psgc.torch.plans.choice import refuse_asynchronous, refuse_plan
from psgc.torch.rarely.averaged import Averaged
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.state import saved
from psgc.torch.state.residuals import Kept, check_sizes
from psgc.torch.tensors.declaring import declaration, spec_of
from psgc.torch.tensors.sent import FilledBucket
from psgc.torch.tensors.shards import refuse_pieces
from psgc.worker.residuals.residual import LayoutMemory, TensorMemory
from psgc.worker.session import Session

Named = Iterable[tuple[str, torch.Tensor]]
_STILL: Final = Stream(0, 0, 0, 0)  # it draws no random numbers
MASTER: Final = "master"  # in the state of a parameter of 16 bits
CARRIED: Final = (torch.float32, torch.bfloat16, torch.float16)


class DeMo(torch.optim.Optimizer, api.Member):
    """DeMo (Peng, Quesnelle and Kingma 2024) over servers, which relay what ranks send.

        optimizer = psgc.DeMo(model.named_parameters(), lr=1e-3)

    named_parameters: ``model.named_parameters()``, the same on every rank; rank 0's parameters are not handed out (``broadcast_parameters`` does that).
    lr:           of a step of +-1, as of Lion or signSGD: smaller than Adam's.
    decay:        the share of the momentum that is kept from step to step.
    k:            coefficients that are sent of each 64 x 64 elements of a parameter; vectors, and what is left of matrices, are filled up to squares.
    weight_decay: decoupled, as AdamW's.

    Gradients are this rank's own until step(): clip them, accumulate them or scale them as without psgc. A parameter without a gradient in a step counts as
    zeros, and so do all of a rank whose gradients overflowed under a GradScaler: others' steps need its part all the same. A rank's momentum is part of
    ``state_dict()``, which every rank must ask for and keep in a file of its own. A parameter of 16 bits has a copy in float32, which steps add up in and which
    is part of the state. Which parameters are exchanged is fixed when it is made: one that is frozen then stays so, and one that is frozen later may be
    trained again. Raises UsageError for parameters that cannot be, and in a job of several ranks without servers.
    """

    _made = False
    _step_supports_amp_scaling = True  # a GradScaler calls step() also after an overflow, and hands it the scale

    __getstate__ = refuse_copy

    def __init__(
        self, named_parameters: Named, lr: float = 1e-3, *, decay: float = 0.999, k: int = 32, weight_decay: float = 0.0
    ) -> None:  # fmt: skip
        refuse_no_parameters(named_parameters, "DeMo")
        given = list(named_parameters)
        if any(not isinstance(each, tuple) for each in given):
            raise UsageError("DeMo: expected model.named_parameters(), whose names are the same on every rank")
        # One without elements has no square, and no step:
        named = [(name, parameter) for name, parameter in given if parameter.requires_grad and parameter.numel()]
        if not named:
            raise UsageError("DeMo: no parameters that require a gradient")
        kept, count = _number(decay), _number(k)
        if not (
            0 <= _number(lr) < math.inf
            and 0 <= _number(weight_decay) < math.inf
            and 0 <= kept <= 1
            and 1 <= count <= CHUNK
            and count.is_integer()
        ):
            raise UsageError(
                f"DeMo: lr={lr}, decay={decay}, k={k}, weight_decay={weight_decay}: expected lr and weight_decay of at least 0 and finite, decay from 0 to 1, "
                f"and k as a whole number from 1 to {CHUNK}"
            )
        for name, parameter in named:
            refuse_pieces(parameter, name, "DeMo", "its squares would be cut; leave the sharding out, or use psgc.fsdp_hook or psgc.DiLoCo")
            if parameter.dtype not in CARRIED:
                raise UsageError(f"DeMo: parameter {name!r} is {parameter.dtype}; it takes float32, bfloat16 and float16")
        super().__init__([parameter for _, parameter in named], {"lr": lr, "weight_decay": weight_decay})
        self._made = True
        api.init()
        self._session = session = api.current_session()
        refuse_replaceable(session, "DeMo")
        refuse_backup(session, "DeMo")
        if session.config.async_mode:
            refuse_asynchronous("DeMo")
        refuse_plan(session, "DeMo")
        self._averaged = Averaged(dict(named), session, "DeMo")
        if not session.config.solo and not session.config.servers:
            raise UsageError(
                "DeMo: servers relay what ranks send, and this job has none: start some (psgc run --servers 1, DMLC_NUM_SERVER)"
            )
        self._name = f"demo{api.next_number(session, 'demo')}"
        self._names = [name for name, _ in named]
        self._left_out = [(name, parameter) for name, parameter in given if not parameter.requires_grad and parameter.numel()]
        self._codec = f"demo:k={int(count)},beta={kept!r}"
        self._loaded = 0
        parse_scheme(self._codec).warm()  # kernels are compiled, or loaded, here and not in the first step
        self._alone = [_Alone(self._codec, squares_of(parameter)) for _, parameter in named] if session.config.solo else []
        self._declare(LayoutMemory())
        api.add_member(self)

    @property
    def session(self) -> Session:
        return self._session

    def check_leaving(self) -> None:
        """Raise UsageError: momenta are of the job's ranks."""
        raise UsageError("suspend(): DeMo cannot go on in a job of another size; save its state, and start a new job")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError once the optimizer is made: what ranks exchange is fixed then."""
        if self._made:
            raise UsageError("DeMo.add_param_group: its parameters are given at once, in one group; make a new optimizer of all of them")
        super().add_param_group(param_group)

    def _declare(self, memory: LayoutMemory) -> None:
        parameters = self.param_groups[0]["params"]
        self._squares = [torch.zeros(squares_of(parameter)) for parameter in parameters]
        if self._alone:
            for one, name in zip(self._alone, self._names, strict=True):
                one.take_up(memory.tensors.get(name))
            return
        specs = tuple(spec_of(flat, name, f"parameter {name!r}") for flat, name in zip(self._squares, self._names, strict=True))
        name = f"{self._name}.loaded{self._loaded}" if self._loaded else self._name
        self._layout = self._session.declare(declaration(self._session, name, "adhoc", specs, self._codec, True, past_steps=memory.steps))
        if memory.tensors:
            self._session.remember(self._layout, memory)
        self._buckets = FilledBucket.all_of(self._layout)

    @torch.no_grad()
    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange this step's gradients through the momentum, and move every parameter by the sign of the sum. Raises UsageError for a sparse gradient, and
        for a parameter that is trained now and was frozen when the optimizer was made."""
        self._averaged.check()  # a model may be wrapped after its optimizer was made
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        # Of a GradScaler whose step() calls this one:
        scale, overflowed = getattr(self, "grad_scale", None), bool(getattr(self, "found_inf", False))
        self._refuse_thawed()
        self._refuse_sparse()
        for parameter, flat in zip(group["params"], self._squares, strict=True):
            if parameter.grad is None or overflowed:
                flat.zero_()
                continue
            to_squares(parameter.grad, flat)
            if scale is not None:
                flat.div_(scale.to(flat.device))
        self._exchange()
        for parameter, flat in zip(group["params"], self._squares, strict=True):
            if not parameter.requires_grad:  # frozen since: what is left of its momentum travels, and moves nothing
                continue
            moved = self._master_of(parameter)
            if group["weight_decay"]:
                moved.mul_(1 - group["lr"] * group["weight_decay"])
            direction = from_squares(flat, parameter)
            direction = torch.where(direction.isnan(), direction, direction.sign())  # the sign of NaN is 0, which nobody would see
            moved.add_(direction.to(moved.device, moved.dtype), alpha=-group["lr"])
            if moved is not parameter:
                parameter.copy_(moved)
        return loss

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """What steps add up in: the parameter if it is float32, else a copy in float32. All steps are as large as lr, which 16 bits may round away for ever."""
        if parameter.dtype == torch.float32:
            return parameter
        state = self.state[parameter]
        master: torch.Tensor | None = state.get(MASTER)
        if master is None:
            master = state[MASTER] = parameter.float()
            return master
        # Elements that somebody else has written since, such as broadcast_parameters or a model's load_state_dict, are begun with anew:
        master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        return master

    def _refuse_thawed(self) -> None:
        for name, parameter in self._left_out:
            if parameter.requires_grad:
                raise UsageError(
                    f"DeMo: parameter {name!r} is trained now, and was frozen when DeMo was made, so that it would never move; freeze it after DeMo is "
                    "made, or make another DeMo"
                )

    def _refuse_sparse(self) -> None:
        for parameter, name in zip(self.param_groups[0]["params"], self._names, strict=True):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(
                    f"DeMo: the gradient of {name!r} is sparse, as of nn.Embedding(sparse=True); it takes dense ones: make the layer with sparse=False, or "
                    "train it by psgc.DistributedOptimizer(torch.optim.SparseAdam(...), ..., sparse=...)"
                )

    def _exchange(self) -> None:
        """Have the squares hold the mean of what all ranks send."""
        if self._alone:
            for one, flat, name in zip(self._alone, self._squares, self._names, strict=True):
                if not one.run(flat.numpy()) and self._session.config.nonfinite == "raise":
                    raise NonFiniteError(f"DeMo: the gradient of {name!r} on rank 0 holds NaN or infinity (PSGC_NONFINITE=raise)")
            return
        for bucket in self._buckets:
            for index in bucket.bucket.tensors:
                bucket.put(index, self._squares[index])
            bucket.bind()
            bucket.send(self._session)
        self._session.wait([bucket.ticket for bucket in self._buckets if bucket.ticket is not None])
        for bucket in self._buckets:
            bucket.take()

    def state_dict(self) -> dict[str, Any]:
        """torch's, and this rank's momentum. Every rank must ask, between two steps."""
        memory = self._remembered()
        momentum = saved.state_of(self._session, {saved.MOMENTA: Kept(memory.tensors)}) | {"steps": memory.steps}
        return super().state_dict() | {"momentum": momentum}

    def _remembered(self) -> LayoutMemory:
        if not self._alone:
            return self._session.remembered(self._layout, dropped=False)
        return LayoutMemory({name: TensorMemory(one.residual.copy()) for name, one in zip(self._names, self._alone, strict=True)})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of this rank. Every rank must call it. Raises UsageError for a state of another model or another number of ranks."""
        state = dict(state_dict)
        momentum = state.pop("momentum", None)
        if momentum is None:
            raise UsageError("DeMo.load_state_dict: the state has no momentum; is it another optimizer's?")
        checked = saved.check_states(momentum, self._session.rank, self._session.size, self._session.part, "DeMo.load_state_dict")
        kept = saved.share_of(checked, saved.MOMENTA, self._session.rank, self._session.size)
        specs = (spec_of(flat, name, name) for flat, name in zip(self._squares, self._names, strict=True))
        check_sizes(specs, kept)
        super().load_state_dict(state)  # after all checks: a state that is refused changes nothing
        for parameter, loaded in zip(self.param_groups[0]["params"], state["param_groups"][0]["params"], strict=True):
            master = state["state"].get(loaded, {}).get(MASTER)
            if master is not None:  # torch has made it the parameter's type
                self.state[parameter][MASTER] = master.detach().to(parameter.device, torch.float32, copy=True)
        self._loaded += 1
        self._declare(LayoutMemory(dict(kept.tensors), steps=int(momentum["steps"])))


class _Alone:
    """A step of the scheme in a job of one process, which has no servers."""

    def __init__(self, codec: str, numel: int) -> None:
        self._state = parse_scheme(codec, BucketContext(workers=1)).new_state(numel)
        self.residual = np.zeros(numel, np.float32)

    def take_up(self, memory: TensorMemory | None) -> None:
        self.residual[:] = 0 if memory is None or memory.residual is None else memory.residual

    def run(self, values: NDArray[np.float32]) -> bool:
        """Have values be the sum. False: they held NaN or infinity, and are all NaN, as in a job; the momentum is as it was."""
        pair = self._state.rounds[0].pair
        sent, answer = (np.empty(codec.payload_bound(values.size), np.uint8) for codec in (pair.push, pair.pull))
        encoded = self._state.encode(0, values, self.residual, 1.0, _STILL, sent)
        if encoded.nonfinite:
            values.fill(np.nan)
            return False
        sent = sent[: encoded.payload_bytes]
        self._state.apply(answer[: join_payloads([sent], answer)], [sent], values, self.residual, 1.0)
        return True


def refuse_exchanging(optimizer: Any, by: str) -> None:
    """Raise UsageError for an optimizer that exchanges by itself what ``by`` would average before."""
    if isinstance(optimizer, DeMo):
        raise UsageError(f"{by}: DeMo exchanges by itself; use it as it is")


def _number(value: Any) -> float:
    """A setting as a float, of whatever type of number it is; NaN, which fits nowhere, for what is no number."""
    if isinstance(value, (str, bytes)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def squares_of(parameter: torch.Tensor) -> int:
    """Elements of the squares that a parameter lies in."""
    return numel_in_squares(parameter.shape)


def to_squares(values: torch.Tensor, flat: torch.Tensor) -> None:
    """Write a parameter's values to the squares of 64 x 64 that follow one another in ``flat``, each row by row, filled up with zeros."""
    rows, columns = sides_of(values.shape)
    down, across = -(-rows // SIDE), -(-columns // SIDE)
    padded = torch.zeros(down * SIDE, across * SIDE)
    source = values.detach().to("cpu", torch.float32).reshape(-1)
    if source.numel() < rows * columns:
        source = torch.nn.functional.pad(source, (0, rows * columns - source.numel()))
    padded[:rows, :columns] = source.view(rows, columns)
    flat.view(down, across, SIDE, SIDE).copy_(padded.view(down, SIDE, across, SIDE).transpose(1, 2))


def from_squares(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_squares``: values in the shape of ``like``."""
    rows, columns = sides_of(like.shape)
    down, across = -(-rows // SIDE), -(-columns // SIDE)
    whole = flat.view(down, across, SIDE, SIDE).transpose(1, 2).reshape(down * SIDE, across * SIDE)
    return whole[:rows, :columns].reshape(-1)[: like.numel()].view(like.shape)
