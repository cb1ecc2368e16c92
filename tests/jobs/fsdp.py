"""A worker that trains a small model under FSDP2, sharded within "nodes" of two ranks: natively (HSDP), or between nodes by psgc. Run by tests.

Prints a line for each run: its name, a digest of this rank's shards after some steps, and the last loss.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import psgc.torch as psgc
from psgc.plan.model.plan import Plan, PlannedBucket

STEPS, WIDTH = 6, 96


# By step, from which on those parameters are frozen whose names begin so: a unit whole, or a part of one, before the hook or later.
FREEZES: dict[str, dict[int, tuple[str, ...]]] = {
    "thaws": {0: ("1.",), 2: ()},
    "thaws-accumulated": {0: ("1.",), 2: ()},
    "thaws-part": {0: ("1.up", "0.bias"), 2: ()},
    "freezes-part": {2: ("1.up", "0.bias")},
    "freezes": {2: ("1.", "2.")},
    "by-turns": {0: ("1.",), 1: ("2.",), 2: ("1.",), 3: ("2.", "0.weight")},
    "guarded-frozen": {2: ("0.",)},
}
ACCUMULATED = ("accumulate", "thaws-accumulated")
GUARDED, BAD = ("guarded", "guarded-zeros", "guarded-frozen"), 3


def freeze(model: nn.Module, how: str, number: int) -> None:
    """Before the step with this number, from 0 on."""
    frozen = FREEZES.get(how, {}).get(number)
    for name, parameter in model.named_parameters() if frozen is not None else ():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen or ()))


def use(model: nn.Module, how: str, number: int) -> None:
    """Which of the blocks take part in the step: "skips": the second in every other, and none in one."""
    for place, block in enumerate(module for module in model.modules() if isinstance(module, Block)):
        block.used = how != "skips" or not (number == 3 or (place == 1 and number % 2))


POLICIES = {
    "bf16-reduce": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    "bf16-params": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = True
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) if self.used else x


def model_on(mesh: DeviceMesh, precision: str, how: str = "plain") -> nn.Sequential:
    """precision: "mixed": that of one unit is another. how: "summed": FSDP divides by 1, and not by the number of ranks; "together": the last two modules
    are one unit; "deferred": on the meta device; "rewrapped": its blocks are computed again in backward."""
    torch.manual_seed(0)
    with torch.device("meta" if how == "deferred" else "cpu"):
        model = nn.Sequential(nn.Linear(32, WIDTH), Block(), Block(), nn.Linear(WIDTH, 7))
    policy = POLICIES.get(precision, MixedPrecisionPolicy())
    offload = CPUOffloadPolicy(pin_memory=False) if how == "offloaded" else OffloadPolicy()
    if how == "rewrapped":
        model[1], model[2] = checkpoint_wrapper(model[1]), checkpoint_wrapper(model[2])
    for number, block in enumerate(model[1:3]):
        own = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if precision == "mixed" and number else policy
        fully_shard(block, mesh=mesh, mp_policy=own, offload_policy=offload)
    if how == "together":
        fully_shard([model[0], model[3]], mesh=mesh, mp_policy=policy, offload_policy=offload)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in sharded.modules():
        if how == "summed" and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums that are multiplied first
    return sharded


def evaluate(model: nn.Module, how: str) -> None:
    """Before it is hooked. Behind it the outermost module has its whole parameters still."""
    if how == "evaluated":
        with torch.no_grad():
            model(torch.ones(2, 32))
        assert any(not hasattr(parameter, "to_local") for parameter in model.parameters())


def allocate(model: nn.Module, how: str) -> None:
    """When it is hooked: a model without memory gets some, and the same values everywhere."""
    if how == "deferred":
        model.to_empty(device="cpu")
        for place, parameter in enumerate(model.parameters()):
            draw = torch.Generator().manual_seed(2 * place + dist.get_rank() % 2)
            parameter.to_local().detach().normal_(std=0.1, generator=draw)


def train(model: nn.Module, how: str) -> str:
    """how: "plain"; "accumulate": two backwards a step, the first without synchronization; "twice": both with; "clip"; "scaled": by a GradScaler, which skips
    a step in which one rank overflows; "skips": some steps without some modules; "hooked": each parameter steps as soon as its gradient is
    there; "guarded": a step with a bad batch is thrown away; "guarded-zeros": what is cleared becomes zeros; "guarded-frozen": a layer was frozen before, and
    taken from the optimizer with its gradients; "evaluated" and "deferred": see above; "again": two forwards before each backward;
    "unreduced": FSDP is told not to average between replicas; or of ``FREEZES``."""
    allocate(model, how)
    if how == "unreduced":
        model.set_requires_all_reduce(False)
    if how == "hooked":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
    return steps(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), torch.Generator().manual_seed(1 + dist.get_rank()), STEPS, how
    )


def step_at_once(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.5)
    parameter.grad = None


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, draw: torch.Generator, count: int, how: str) -> str:
    skipped: list[int] = []
    loss, scaler = torch.zeros(()), torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled")
    for number in range(count):
        freeze(model, how, number)
        use(model, how, number)
        for micro in range(2 if how in (*ACCUMULATED, "twice") else 1):
            x = torch.randn(8, 32, generator=draw)
            if how in ACCUMULATED:
                model.set_requires_gradient_sync(micro == 1)
            loss = nn.functional.cross_entropy(model(x), x[:, :7].argmax(1))
            if how == "again":
                loss = loss + nn.functional.cross_entropy(model(-x), x[:, 7:14].argmax(1))
            overflows = how == "scaled" and number == 2 and dist.get_rank() == 3
            bad = how in GUARDED and number == BAD and dist.get_rank() == 3
            scaler.scale(loss * float("inf") if overflows else loss * 1e6 if bad else loss).backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if how in GUARDED and norm(model) > 100:
            skipped.append(number)
        else:
            scaler.step(optimizer)
            scaler.update()
        if how == "guarded-frozen" and number == 1:
            optimizer.param_groups[0]["params"] = [parameter for name, parameter in model.named_parameters() if not name.startswith("0.")]
        optimizer.zero_grad(set_to_none=how != "guarded-zeros")
    assert skipped == ([BAD] if how in GUARDED else []), skipped
    assert scaler.get_scale() == (2.0**9 if how == "scaled" else 1.0), "one step was skipped, on every rank"
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.to_local().detach().numpy().tobytes())
    return f"{digest.hexdigest()[:12]} {float(loss.detach()):.4f}"


def norm(model: nn.Module) -> float:
    found: Any = nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters() if parameter.requires_grad and parameter.grad is not None]
    )
    return float(found.full_tensor())


def resumed(mesh: DeviceMesh, codec: str, forget: bool = False, how: str = "plain") -> str:
    """As ``train`` plainly, but half of the steps on one model, and half on another, made as ``how`` says, that goes on from its state."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    first, second = model_on(mesh, "fp32"), model_on(mesh, "fp32", how)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True) for model in (first, second)]
    hooks = [psgc.fsdp_hook(model, codec) for model in (first, second)]
    steps(first, optimizers[0], draw, STEPS // 2, "plain")
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    if not forget:
        hooks[1].load_residual_state_dict(hooks[0].residual_state_dict())
    return steps(second, optimizers[1], draw, STEPS - STEPS // 2, "plain")


def moved(hook: Any, mesh: DeviceMesh, codec: str) -> str:
    """What a hook of the model on another mesh goes on from: the mean that is kept of each parameter stays, and training goes on."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, hook.residual_state_dict())
    model = model_on(mesh, "fp32")
    other = psgc.fsdp_hook(model, codec)
    other.load_residual_state_dict(states)
    again: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(again, other.residual_state_dict())
    before, after = kept_mean(states), kept_mean(again)
    assert before and before.keys() == after.keys()
    assert all(float(values.abs().max()) > 0 and torch.allclose(after[name], values, atol=1e-6) for name, values in before.items())
    through_a_folder(hook, psgc.fsdp_hook(model_on(mesh, "fp32"), codec), again[dist.get_rank()])
    return steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(dist.get_rank()), 2, "plain")


def through_a_folder(hook: Any, other: Any, wanted: Any) -> None:
    """A checkpoint's folder gives what the list of all ranks' states does."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    dcp.save({"psgc": psgc.state_dict(hook)}, checkpoint_id=folder[0])
    psgc.load_state_dict(other, folder[0])
    found = other.residual_state_dict()
    for kind in ("memories", "servers"):
        assert found[kind]["gradients"].keys() == wanted[kind]["gradients"].keys()
    assert all(
        torch.equal(values, wanted["memories"]["gradients"][name][field])
        for name, fields in found["memories"]["gradients"].items()
        for field, values in fields.items()
    )
    assert all(torch.equal(values, wanted["servers"]["gradients"][name]) for name, values in found["servers"]["gradients"].items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def kept_mean(states: list[Any]) -> dict[str, torch.Tensor]:
    mesh, found = states[0]["mesh"], {}
    shapes = {name: parameter.numel() for name, parameter in model_shapes().items()}
    for name, numel in shapes.items():
        pieces = []
        for shard, ranks in enumerate(mesh):
            key = f"{name}@{shard}"
            own = [
                states[rank]["memories"]["gradients"][key]["residual"]
                for rank in ranks
                if "residual" in states[rank]["memories"]["gradients"].get(key, {})
            ]
            there = [state["servers"]["gradients"][key] for state in states if key in state["servers"]["gradients"]]
            if own or there:
                pieces.append(sum((each / len(ranks) for each in own), torch.zeros(())) + sum(there, torch.zeros(())))
        if pieces:
            found[name] = torch.cat(pieces)[:numel]
    return found


def model_shapes() -> dict[str, torch.Tensor]:
    return dict(nn.Sequential(nn.Linear(32, WIDTH), Block(), Block(), nn.Linear(WIDTH, 7)).named_parameters())


def given_for(codec: str, model: nn.Module) -> Any:
    """What ``fsdp_hook`` is given: the codec; "rule" and "plan" say the same of each module, one by a function and the other by a plan of its parameters, of
    which most elements of the first block have int8."""
    if codec == "rule":
        return lambda name, parameter: "int8" if name == "1" else "none"
    if codec not in ("plan", "groups"):
        return codec
    over = ("flat.reduce_scatter", "flat.all_gather") if codec == "groups" else ("flat.push", "flat.pull")
    encoded = ("comp@cpu", "flat.push.c", "flat.pull.c", "decomp@cpu")
    buckets = []
    for place, (name, parameter) in enumerate(model.named_parameters()):
        codec_, option = ("int8", encoded) if over[0] == "flat.push" and name in ("1.up.weight", "1.down.weight") else ("none", over)
        buckets.append(PlannedBucket((name,), parameter.numel(), 1, -place, codec_, option))
    return Plan("small", "two nodes", tuple(buckets))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codecs", nargs="+", default=["none"])
    parser.add_argument("--hows", nargs="+", default=["plain"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--mesh", default="shard", choices=("shard", "whole"))
    given = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    psgc.init()
    dist.init_process_group("gloo", rank=psgc.rank(), world_size=psgc.size())
    mesh = init_device_mesh("cpu", (psgc.size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    for how in given.hows:
        print(f"native {how} {train(model_on(mesh, given.precision, how), how)}", flush=True)
        for codec in given.codecs:
            model = model_on(mesh if given.mesh == "whole" else mesh["shard"], given.precision, how)
            freeze(model, how, 0)
            evaluate(model, how)
            hook = psgc.fsdp_hook(model, given_for(codec, model))
            print(f"{codec} {how} {train(model, how)}", flush=True)
            if how == "resumed":
                print(f"{codec} went-on {resumed(mesh['shard'], codec)}", flush=True)
                print(f"{codec} rewrapped {resumed(mesh['shard'], codec, how='rewrapped')}", flush=True)
                print(f"{codec} forgot {resumed(mesh['shard'], codec, forget=True)}", flush=True)
            if how == "moved":
                print(
                    f"{codec} went-on {moved(hook, init_device_mesh('cpu', (psgc.size(), 1), mesh_dim_names=('replicate', 'shard')), codec)}",
                    flush=True,
                )
            assert hook.statistics() == {"steps": STEPS * (2 if how == "twice" else 1)}
    dist.destroy_process_group()
    psgc.shutdown()


main()
