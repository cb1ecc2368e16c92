"""``DistributedDataParallel``: BytePS's wrapper of a model whose gradients psgc averages during backward, without torch.distributed.

Owns the wrapper: what it broadcasts and when, ``no_sync`` and how a step's end is known; ``gradients/in_backward.py`` synchronizes the gradients. For a model
that torch's own DistributedDataParallel wraps, ``hook`` is the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from psgc.errors import UsageError
from psgc.torch.ddp import amp
from psgc.torch.ddp.told import add_model
from psgc.torch.gradients.buckets import GradientBucket
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import Parameters
from psgc.torch.gradients.in_backward import BackwardGradients
from psgc.torch.gradients.rows import has_sparse, rows_among
from psgc.torch.plans.choice import Given, chosen
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.session.uncompiled import uncompiled
from psgc.torch.tensors.broadcast import broadcast_parameters, broadcast_tensors, first_values
from psgc.torch.tensors.declaring import spec_of


class DistributedDataParallel(torch.nn.Module):
    """Wrap ``module`` so that its gradients are averaged over all workers when ``backward()`` returns. The optimizer stays as it is.

        model = psgc.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    device_ids:        None, or a list of the one device that the module is on; for scripts of BytePS and torch. The module is not moved.
    broadcast_buffers: at each forward in training, buffers (such as batch norm's averages) become rank 0's; not inside ``no_sync``.
    compression:       as of ``DistributedOptimizer``, but not "auto".
    gradient_as_bucket_view: as of ``DistributedOptimizer``.
    Gradients of embeddings with sparse=True travel as rows, as ``DistributedOptimizer(sparse=module)`` has them.
    On construction all ranks get rank 0's parameters and buffers. All ranks must run the same number of backwards.
    ``copy.deepcopy`` and ``torch.save`` take the module and these arguments along, and nothing of the job. A copy averages its gradients, too, and all ranks
    must train it alike; one that is only evaluated (a moving average) is its rank's own business.
    Raises UsageError for several devices, or a module without anything to train; CodecError.
    """

    def __init__(
        self, module: torch.nn.Module, device_ids: Sequence[Any] | None = None, broadcast_buffers: bool = True, compression: Given = None,
        gradient_as_bucket_view: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if device_ids is not None and len(device_ids) != 1:
            raise UsageError(
                f"DistributedDataParallel: device_ids has {len(device_ids)} devices, expected one: each process trains on one device"
            )
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self._compression, self._as_views = compression, gradient_as_bucket_view
        self._gradients: BackwardGradients | None = None  # of a copy that has not joined yet
        self._prefix = ""  # of the names of what it exchanges
        if not self._trains:
            raise UsageError("DistributedDataParallel: no parameter of the module requires a gradient; leave the wrapper out")
        exchange = self._exchange("model")
        broadcast_parameters(first_values(module), 0, f"{self._prefix}.")
        self._average(exchange)

    @property
    def _trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @uncompiled
    def _exchange(self, kind: str) -> GradientExchange[GradientBucket]:
        """A new one in this process's session. kind: among whose the model is counted, the same on every rank."""
        session = api.current_session()
        refuse_replaceable(session, "DistributedDataParallel")
        refuse_backup(session, "DistributedDataParallel")
        choice = chosen(session, self._compression, "DistributedDataParallel")
        if choice.auto:
            raise UsageError(
                "DistributedDataParallel: auto chooses for DistributedOptimizer and ddp_hook; name a codec, a rule or a plan here"
            )
        module = self.module
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        choice.check(names)
        rows = rows_among(session, module if has_sparse(module) else (), names, choice, "DistributedDataParallel")
        number = api.next_number(session, kind)
        self._prefix = f"{kind}{number}"
        return GradientExchange(session, self._prefix, choice, turn=number, sparse=rows)

    @uncompiled
    def _average(self, exchange: GradientExchange[GradientBucket]) -> BackwardGradients:
        amp.install()
        gradients = self._gradients = BackwardGradients(exchange, 1, False, self._parameters_to_watch, self._as_views)
        gradients.watch()
        add_model(gradients)
        return gradients

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process and its job."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_gradients", "_prefix")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._gradients, self._prefix = None, ""

    def _joined(self) -> BackwardGradients | None:
        """A copy joins here, once it is to train. None: it is not."""
        if self._gradients is None and self._trains:
            return self._average(self._exchange("copy"))
        return self._gradients

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        gradients = self._joined() if torch.is_grad_enabled() else None
        due = gradients is not None and self.broadcast_buffers and self.training and not gradients.backwards.held
        if due and any(True for _ in self.module.buffers()):  # else what torch.compile makes of the model stays in one piece
            self._send_buffers()
        return self.module(*inputs, **kwargs)

    @uncompiled
    def _send_buffers(self) -> None:
        buffers = self._buffers_to_send()
        if buffers:
            broadcast_tensors(list(buffers.items()), 0, f"{self._prefix}.buffers.", compare=False)

    def _buffers_to_send(self) -> dict[str, torch.Tensor]:
        """By name. A norm in training computes its gradient from the batch's statistics, so its averages may change between a forward and its backward, as
        they do in a second forward; autograd is to take no notice."""
        norms = (module for module in self.module.modules() if isinstance(module, _NormBase) and module.training)
        unread = {buffer for norm in norms for buffer in norm.buffers(recurse=False)}
        return {name: buffer.data if buffer in unread else buffer for name, buffer in self.module.named_buffers()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards add to this rank's own p.grad and nothing is sent; the next backward outside sends the sum. Every rank must do the same."""
        gradients = self._joined()
        with nullcontext() if gradients is None else gradients.backwards.holding():
            yield

    def synchronize(self) -> None:
        """For scripts of BytePS, which call it where layers were skipped: after ``backward()`` every p.grad holds the mean already, and it does nothing."""
        if self._gradients is not None:
            self._gradients.synchronize()

    def _parameters_to_watch(self) -> Parameters:
        """Those that may require a gradient only now."""
        for name, parameter in self.module.named_parameters():
            if self._gradients is None or not self._gradients.knows(parameter):
                yield parameter, spec_of(parameter, name, f"parameter {name!r}")
