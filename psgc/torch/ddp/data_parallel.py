"""``DistributedDataParallel``: BytePS's wrapper of a model whose gradients psgc averages during backward, without torch.distributed.

Owns the wrapper: what it broadcasts and when, ``no_sync`` and how a step's end is known; ``gradients/in_backward.py`` synchronizes the gradients. For a model
that torch's own DistributedDataParallel wraps, ``hook`` is the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from psgc.errors import UsageError
from psgc.torch.ddp import amp
from psgc.torch.ddp.told import add_model
from psgc.torch.gradients.exchange import GradientExchange
from psgc.torch.gradients.front_end import Parameters
from psgc.torch.gradients.in_backward import BackwardGradients
from psgc.torch.gradients.rows import has_sparse, rows_among
from psgc.torch.plans.choice import Given, chosen
from psgc.torch.session import api
from psgc.torch.session.backup import refuse_backup
from psgc.torch.session.replaceable import refuse_replaceable
from psgc.torch.tensors.broadcast import broadcast_parameters, broadcast_tensors
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
        session = api.current_session()
        refuse_replaceable(session, "DistributedDataParallel")
        refuse_backup(session, "DistributedDataParallel")
        choice = chosen(session, compression, "DistributedDataParallel")
        if choice.auto:
            raise UsageError(
                "DistributedDataParallel: auto chooses for DistributedOptimizer and ddp_hook; name a codec, a rule or a plan here"
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("DistributedDataParallel: no parameter of the module requires a gradient; leave the wrapper out")
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        choice.check(names)
        rows = rows_among(session, module if has_sparse(module) else (), names, choice, "DistributedDataParallel")
        self.module, self.broadcast_buffers = module, broadcast_buffers
        number = api.next_number(session, "model")
        self._prefix = f"model{number}"
        broadcast_parameters(module.state_dict(), 0, f"{self._prefix}.")
        amp.install()
        self._gradients = BackwardGradients(
            GradientExchange(session, self._prefix, choice, turn=number, sparse=rows), 1, False, self._parameters_to_watch,
            gradient_as_bucket_view,
        )  # fmt: skip
        self._gradients.watch()
        add_model(self._gradients)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.training and torch.is_grad_enabled() and not self._gradients.backwards.held:
            buffers = self._buffers_to_send()
            if buffers:
                broadcast_tensors(list(buffers.items()), 0, f"{self._prefix}.buffers.")
        return self.module(*inputs, **kwargs)

    def _buffers_to_send(self) -> dict[str, torch.Tensor]:
        """By name. A norm in training computes its gradient from the batch's statistics, so its averages may change between a forward and its backward, as
        they do in a second forward; autograd is to take no notice."""
        norms = (module for module in self.module.modules() if isinstance(module, _NormBase) and module.training)
        unread = {buffer for norm in norms for buffer in norm.buffers(recurse=False)}
        return {name: buffer.data if buffer in unread else buffer for name, buffer in self.module.named_buffers()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards add to this rank's own p.grad and nothing is sent; the next backward outside sends the sum. Every rank must do the same."""
        with self._gradients.backwards.holding():
            yield

    def synchronize(self) -> None:
        """For scripts of BytePS, which call it where layers were skipped: after ``backward()`` every p.grad holds the mean already, and it does nothing."""
        self._gradients.synchronize()

    def _parameters_to_watch(self) -> Parameters:
        """Those that may require a gradient only now."""
        for name, parameter in self.module.named_parameters():
            if not self._gradients.knows(parameter):
                yield parameter, spec_of(parameter, name, f"parameter {name!r}")
