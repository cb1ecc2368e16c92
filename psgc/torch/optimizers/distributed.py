"""DistributedOptimizer: any torch optimizer, with its gradients averaged over the job before it applies them, or by asynchronous training.

Owns what it checks; ``averaging`` and ``asynchronous`` have the methods.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch

from psgc.errors import UsageError
from psgc.plan.model.level import EXACT
from psgc.torch.auto.observing import observe
from psgc.torch.gradients.linearity import CodecAdvice, learning_rates
from psgc.torch.gradients.rows import Sparse, rows_among
from psgc.torch.optimizers.asynchronous import make_asynchronous
from psgc.torch.optimizers.averaging import Distributed
from psgc.torch.optimizers.demo import refuse_exchanging
from psgc.torch.optimizers.overlapped import check_overlapped, overlapped
from psgc.torch.optimizers.refusals import refuse_foreign
from psgc.torch.optimizers.wrapping import become, check_passes, names_of, refuse_replaced_step, trained
from psgc.torch.plans.choice import Given, chosen
from psgc.torch.session import api
from psgc.torch.session.backup import backup_of, refuse_backup
from psgc.torch.tensors.broadcast import check_optimizer, refuse_lbfgs

logger = logging.getLogger(__name__)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: N802 - BytePS's and Horovod's name
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, compression: Given = None,
    backward_passes_per_step: int = 1, residuals_follow_lr: bool = False, late_synchronization: bool | None = None,
    gradient_as_bucket_view: bool = False, overlapped_step: bool = False, sparse: Sparse = (),
) -> Optimizer:  # fmt: skip
    """Make ``optimizer`` average its gradients over all workers before each step. Returns the same object, now of a subclass of its
    class: schedulers and scalers that know it go on working.

    named_parameters: ``model.named_parameters()``: names for messages, the same on every rank. None: param.GROUP.INDEX.
    compression:      codec text (``Compression.int8``, ``"topk:k=0.01"``, ``"onebit/int8"``) or an object that has it; BytePS's options
                      (``{"byteps_compressor_type": "onebit", ...}``); a rule, ``lambda name, parameter: "int8"`` or ``{"*.bias": "none", "*": "int8"}``, of
                      which the first pattern that fits counts; a plan or its file (``"plan.json"``), which
                      must be of exactly this optimizer's parameters; ``"auto"``: uncompressed at first, then by what the running job measures to be
                      quickest; None: PSGC_PLAN's plan, else PSGC_CODEC, else uncompressed.
    backward_passes_per_step: backwards that add up to one step. Their sum is averaged over ranks, not over passes: divide the loss.
    residuals_follow_lr: multiply what error feedback keeps by the last step's learning rate over this one's, so that it moves parameters
                      as far as it would have in its own step. Only for SGD without momentum.

    late_synchronization: True: means are in p.grad not after backward but after ``optimizer.synchronize()``, which step() calls; work between
                      the two overlaps with communication. None: PSGC_LATE_SYNCHRONIZATION, else False.

    gradient_as_bucket_view: True: p.grad are views of the memory that gradients travel from and means come to, as under torch's
                      DistributedDataParallel, so that they take none beside it (docs/optimizers.md). The means are the same, bit for bit. A
                      p.grad that a script keeps beyond its step changes with later ones.

    overlapped_step: True: step() updates each bucket's parameters as soon as their mean is there, while later buckets travel: late synchronization within
                      step(). Parameters and state are the same, bit for bit, for optimizers that treat each parameter by itself (SGD, Adam, AdamW, ...). A
                      script that reads or clips gradients calls ``synchronize()`` before; step() is then the whole one, as under GradScaler, and as
                      always under Elastic.

    sparse:           names of parameters whose gradients are sparse (patterns as of a rule: ``["embedding.weight"]``, ``["*.table"]``), or a model whose
                      embeddings with sparse=True are meant. Their rows travel, uncompressed; the mean is a coalesced sparse tensor in p.grad, of the rows
                      that any rank has used. Every rank must name the same. Other parameters' gradients are dense.

    Gradients leave during backward, and the backward that completes the step returns with the mean over all ranks in p.grad, to be
    clipped or looked at. A further backward before step() adds the mean of what it has added. All ranks must run the same number of
    backwards a step; one that has none takes part in step(). Under late synchronization leave p.grad alone until it is synchronized:
        loss.backward(); optimizer.synchronize(); clip_grad_norm_(...); optimizer.step()
    Under PSGC_ASYNC=1 (BYTEPS_ENABLE_ASYNC=1) gradients stay on their rank: step() applies them, pushes what it has changed by ``compression``, and takes the
    weights that servers then hold, with every rank's changes so far. Ranks need not run the same number of steps (docs/optimizers.md).
    step() sends nothing twice. A parameter unused on this rank counts as zeros and still gets the others' mean; one that no rank used
    keeps its p.grad as it is, unless it shares a bucket with used ones: then it gets zeros.
    Optimizers that run ``step(closure)`` several times, such as LBFGS and SAM, get the mean of each run's gradients. LBFGS gets the mean of the losses, too.
    Raises UsageError for residuals_follow_lr with momentum, unnamed or doubly named parameters, dtypes that psgc does not carry
    and plans that cannot be run; CodecError.
    """
    check_optimizer(optimizer, "DistributedOptimizer")
    if hasattr(optimizer, "_psgc_names"):
        raise UsageError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    refuse_exchanging(optimizer, "DistributedOptimizer")
    refuse_replaced_step(optimizer, "DistributedOptimizer")
    check_passes(backward_passes_per_step)
    session = api.current_session()
    choice = chosen(session, compression, "DistributedOptimizer")
    names = names_of(optimizer, named_parameters)
    refuse_foreign(optimizer, names)
    if choice.auto and isinstance(optimizer, torch.optim.LBFGS):
        choice = replace(choice, quality=EXACT)  # its directions are made of differences of gradients
    choice.check(trained(names))
    rows = rows_among(session, sparse, names, choice, "DistributedOptimizer")
    if overlapped_step:
        refuse_lbfgs(optimizer, "overlapped_step")
        check_overlapped(session, choice, late_synchronization)
        late_synchronization = True
    if session.config.async_mode:
        refuse_lbfgs(optimizer, "asynchronous training")
        if residuals_follow_lr:
            raise UsageError("residuals_follow_lr: under PSGC_ASYNC=1 residuals are of weights, not of gradients; leave it out")
        if gradient_as_bucket_view:
            raise UsageError("gradient_as_bucket_view: under PSGC_ASYNC=1 gradients stay on their rank, and are in no bucket; leave it out")
        return make_asynchronous(optimizer, session, names, choice)
    backup = backup_of(session)
    if backup:
        refuse_lbfgs(optimizer, "PSGC_BACKUP_WORKERS")
        if choice.auto:
            refuse_backup(session, 'DistributedOptimizer by "auto", which changes how they travel', "name a codec")
    rates = learning_rates(optimizer) if residuals_follow_lr else None
    distributed = overlapped(optimizer) if overlapped_step else become(optimizer, Distributed)
    distributed._psgc_join(session, names, choice, backward_passes_per_step, rates, late_synchronization, gradient_as_bucket_view, rows)
    distributed._psgc_gradients.exchange.backup = backup
    observe(distributed._psgc_gradients.exchange, names)
    distributed._psgc_gradients.advice = CodecAdvice()
    distributed._psgc_gradients.watch()
    return optimizer
