"""What two processes check together, for test_scaler_ranks: python rank_runs.py RANK FOLDER.

Both run every check in the same order, then write "holds" or the traceback for each by its name.
The first that fails is the last: the ranks no longer wait for the same things after it.
"""

import json
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import ampgraph
from ampgraph.steps import _STEPPER, CapturedStep

HOLDS = "holds"
RANKS = range(2)
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(params, lr=0.01)


def fused(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, fused=True)


class Reading(Optimizer):
    """Reads a number on the host, which Dynamo refuses; with shards every rank must take part."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1 if p.grad.abs().sum().item() < 1 else -0.05)


def network() -> nn.Module:
    """The second rank's shard of the last layer has no elements, that of the first has less."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + rank))


def local(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def full(tensor: Tensor) -> Tensor:
    parts = tensor.detach()
    return parts.full_tensor() if isinstance(parts, DTensor) else parts


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def held(optimizer: Optimizer, get: Callable[[Tensor], Tensor] = local) -> list[Tensor]:
    """Copies of the parameters and of the optimizer's state."""
    optimizer.state_dict()  # takes back what a skipped first step has made
    state = [s for p in params_of(optimizer) for s in optimizer.state.get(p, {}).values()]
    return [get(t).clone() for t in [*params_of(optimizer), *state] if isinstance(t, Tensor)]


def assert_like(left: Optimizer, right: Optimizer) -> None:
    """All bits of SGD are, and the others' all but the last.

    A captured Adam divides by bias corrections in float32, a fused one rounds the elements that
    fill no vector another way, Reading adds up shards.
    """
    if isinstance(left, SGD):
        assert_equal(held(left, full), held(right))
    torch.testing.assert_close(held(left, full), held(right))


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right), f"{len(left)} tensors against {len(right)}"
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {a} against {b}"


def spoil(optimizer: Optimizer) -> None:
    """An overflow in one element that this rank holds."""
    grads = [local(p.grad) for p in params_of(optimizer) if p.grad is not None]
    next(g for g in grads if g.numel()).view(-1)[0] = math.inf


def drawn(count: int, seed: int = 0) -> list[int | None]:
    """For each step the rank whose gradients overflow, or None; the same on all ranks.

    Not for the first, after whose overflow torch has no Adam state yet and we have zeros.
    """
    dice = random.Random(seed)
    return [None, *(dice.choice([None, None, 0, 1]) for _ in range(count - 1))]


def everywhere(value: object) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values


def ours(**options: Any) -> ampgraph.GradScaler:
    return ampgraph.GradScaler("cpu", growth_interval=3, inner="eager", **options)


def captured(optimizer: Optimizer) -> bool:
    stepper = vars(optimizer)[_STEPPER]
    return isinstance(stepper, CapturedStep) and not stepper.refused


def train_step(
    model: nn.Module, optimizer: Optimizer, scaler: Any, step: int, bad: int | None
) -> None:
    """One step on this rank's batch."""
    optimizer.zero_grad()
    scaler.scale(model(batch(step, dist.get_rank())).square().mean()).backward()
    if bad == dist.get_rank():
        spoil(optimizer)
    scaler.step(optimizer)
    scaler.update()


def full_step(
    model: nn.Module, optimizer: Optimizer, scaler: Any, step: int, bad: int | None
) -> None:
    """The same step in one process, on the batches of all ranks."""
    optimizer.zero_grad()
    for rank in RANKS:
        scaler.scale(model(batch(step, rank)).square().mean() / len(RANKS)).backward()
    if bad is not None:
        spoil(optimizer)
    scaler.step(optimizer)
    scaler.update()


def fsdp1_is_like_sharded_grad_scaler() -> None:
    """Parameters, state and scale after each step; nobody gave a process group."""
    for make, orig in ((sgd, True), (adam, False)):
        runs: list[tuple[nn.Module, Optimizer, Any]] = []
        for scaler in (ours(), ShardedGradScaler("cpu", growth_interval=3)):
            model = FullyShardedDataParallel(
                network(), use_orig_params=orig, device_id=torch.device("cpu")
            )
            runs.append((model, make(model.parameters()), scaler))
        (_, left, our), (_, right, theirs) = runs
        for step, bad in enumerate(drawn(12)):
            for run in runs:
                train_step(*run, step, bad)
            assert_like(left, right)
            assert our.get_scale() == theirs.get_scale(), f"step {step}"
        assert our.skipped_steps == sum(bad is not None for bad in drawn(12))
        assert captured(left), vars(left)[_STEPPER].refused


def fsdp1_clips_over_its_shards() -> None:
    """As FullyShardedDataParallel.clip_grad_norm_, whatever a rank's shards are."""
    for orig, p in product((False, True), (2.0, 1.0, math.inf)):
        model, other = (
            FullyShardedDataParallel(network(), use_orig_params=orig, device_id=torch.device("cpu"))
            for _ in range(2)
        )
        model(batch(0, dist.get_rank())).sum().backward()
        other(batch(0, dist.get_rank())).sum().backward()
        want = other.clip_grad_norm_(0.5, p)
        optimizer, wanted = sgd(model.parameters()), sgd(other.parameters())
        scaler = ours(init_scale=1.0)
        scaler.scale(torch.ones(()))
        torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, p), want)
        scaler.step(optimizer)
        wanted.step()
        torch.testing.assert_close(held(optimizer), held(wanted))


def fsdp1_counts_no_copy_twice() -> None:
    """In the norm, where ranks have copies of parameters, all of them or between groups."""
    alone = [dist.new_group([rank]) for rank in RANKS][dist.get_rank()]
    everyone = dist.new_group(list(RANKS))
    ways: list[tuple[ShardingStrategy, Any]] = [
        (ShardingStrategy.NO_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, (everyone, alone)),
        (ShardingStrategy.HYBRID_SHARD, (alone, everyone)),
    ]
    for orig, (strategy, group) in product((False, True), ways):
        model = FullyShardedDataParallel(
            network(),
            process_group=group,
            sharding_strategy=strategy,
            use_orig_params=orig,
            device_id=torch.device("cpu"),
        )
        model(batch(0, dist.get_rank())).sum().backward()
        scaler, optimizer = ours(init_scale=1.0), sgd(model.parameters())
        scaler.scale(torch.ones(()))
        for p in (2.0, math.inf):
            norm = scaler.clip_grad_norm_(optimizer, math.inf, p)
            torch.testing.assert_close(norm, model.clip_grad_norm_(math.inf, p))


def fsdp2_is_like_one_process() -> None:
    """Captured where torch's own optimizers are, and all bits equal to those of the whole model."""
    mesh = init_device_mesh("cpu", (2,))
    for make in (sgd, adam, fused, Reading):
        model, whole = network(), network()
        fully_shard(model, mesh=mesh)
        optimizer, wanted = make(model.parameters()), make(whole.parameters())
        scaler, theirs = ours(), torch.amp.GradScaler("cpu", growth_interval=3)
        for step, bad in enumerate(drawn(12, seed=1)):
            train_step(model, optimizer, scaler, step, bad)
            full_step(whole, wanted, theirs, step, bad)
            assert_like(optimizer, wanted)
            assert scaler.get_scale() == theirs.get_scale()
            assert scaler.step_skipped(optimizer) == (bad is not None)
        assert everywhere(captured(optimizer)) == [make in (sgd, adam)] * 2


def a_skipped_step_changes_no_bit() -> None:
    """Of either rank, where the overflow is in the other's shard, also at the first step."""
    mesh = init_device_mesh("cpu", (2,))
    for make, bad in ((sgd, 0), (sgd, 1), (adam, 1), (fused, 0), (Reading, 1)):
        model = network()
        fully_shard(model, mesh=mesh)
        optimizer, scaler = make(model.parameters()), ours()
        fresh = held(optimizer)
        train_step(model, optimizer, scaler, 0, bad)
        assert_equal(held(optimizer)[: len(fresh)], fresh)
        assert not any(t.any() for t in held(optimizer)[len(fresh) :]), "state of no step"
        train_step(model, optimizer, scaler, 1, None)
        before = held(optimizer)
        train_step(model, optimizer, scaler, 2, bad)
        assert_equal(held(optimizer), before)
        assert scaler.step_skipped(optimizer)
        assert scaler.get_scale() == 2.0**14


def scales_stay_together() -> None:
    """Over 200 steps, with overflows on either rank; with shards, and with a group of replicas."""
    sharded, alone = network(), network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for model, options in ((sharded, {}), (alone, {"process_group": dist.group.WORLD})):
        optimizer, scaler = sgd(model.parameters()), ours(**options)
        scale, good = 2.0**16, 0
        for step, bad in enumerate(drawn(200, seed=2)):
            train_step(model, optimizer, scaler, step, bad)
            good = good + 1 if bad is None else 0
            scale *= 0.5 if bad is not None else 2.0 if good == 3 else 1.0
            good %= 3
            assert scaler.get_scale() == scale, f"step {step}"


def data_parallel_needs_a_group_for_local_overflows() -> None:
    """DDP's gradients are alike on all ranks; what is done to one rank's later takes a group."""
    for group in (None, dist.group.WORLD):
        model, whole = DistributedDataParallel(network()), network()
        optimizer, wanted = adam(model.parameters()), adam(whole.parameters())
        scaler, theirs = ours(process_group=group), torch.amp.GradScaler("cpu", growth_interval=3)
        for step in range(3):
            train_step(model, optimizer, scaler, step, None)
            full_step(whole, wanted, theirs, step, None)
            assert_like(optimizer, wanted)
        before = held(optimizer)
        optimizer.zero_grad()
        x = batch(3, 0) * (math.inf if dist.get_rank() == 1 else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        assert_equal(held(optimizer), before)
        scaler.update()
        train_step(model, optimizer, scaler, 4, 1)
        together = [True, True] if group else [False, True]
        assert everywhere(scaler.step_skipped(optimizer)) == together
        model.zero_grad()


def _placed(mesh: DeviceMesh) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with gradients of every placement, and the same ones whole."""
    torch.manual_seed(5)
    placements = [Shard(0), Shard(1), Replicate(), Replicate()]
    whole = [nn.Parameter(torch.randn(5, 3)) for _ in placements]
    parts = []
    for param, placement in zip(whole, placements, strict=True):
        param.grad = torch.randn(5, 3) * 8
        part = nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [placement]))
        part.grad = distribute_tensor(param.grad.clone(), mesh, [placement])
        parts.append(part)
    half = grad_of(whole[3]) / 2
    parts[3].grad = DTensor.from_local(half, mesh, [Partial()])  # as of a norm's weight
    return parts, whole


def a_copy_counts_once_in_a_norm() -> None:
    """Shard, Replicate and Partial gradients against the whole tensors; also beside plain ones."""
    mesh = init_device_mesh("cpu", (2,))
    for make, p in zip(
        (sgd, adam, sgd, sgd, sgd), (2.0, 2.0, 3.0, math.inf, -math.inf), strict=True
    ):
        parts, whole = _placed(mesh)
        for params in (parts, whole):
            params.append(nn.Parameter(torch.ones(2)))
            params[-1].grad = torch.full((2,), 3.0)
        optimizer, wanted = make(parts), make(whole)
        scaler = ours(init_scale=4.0)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 0.7, p)
        for param in whole:
            param.grad = grad_of(param) / 4
        want = torch.nn.utils.clip_grad_norm_(whole, 0.7, p)
        torch.testing.assert_close(norm, want)
        assert everywhere(norm.item()) == [norm.item()] * 2
        scaler.step(optimizer)
        wanted.step()
        torch.testing.assert_close(held(optimizer, full), held(wanted))


class Block(nn.Module):
    """A norm over a sharded sequence between two sharded layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def tensor_parallel_is_like_one_process() -> None:
    """Three clipped steps with an overflow on one rank, in a shard or in a copy, between them."""
    mesh = init_device_mesh("cpu", (2,))
    for make, where in ((sgd, "up.weight"), (adam, "norm.weight"), (fused, "up.weight")):
        model, whole = Block(), Block()
        layouts = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh, layouts)
        optimizer, wanted = make(model.parameters()), make(whole.parameters())
        scaler = ours()
        for step in range(4):
            x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(x.chunk(2, dim=1)[dist.get_rank()]).square().sum()).backward()
            bad = step == 2
            if bad and dist.get_rank() == 1:
                local(grad_of(model.get_parameter(where))).view(-1)[0] = math.inf
            before = held(optimizer)
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
            assert everywhere(scaler.step_skipped(optimizer)) == [bad, bad]
            if bad:
                assert_equal(held(optimizer), before)
                continue
            wanted.zero_grad()
            whole(x).square().sum().backward()
            want = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            torch.testing.assert_close(norm, want, rtol=1e-4, atol=0)
            wanted.step()
            torch.testing.assert_close(held(optimizer, full), held(wanted), rtol=1e-4, atol=1e-6)
        assert captured(optimizer) == (make is not fused)


def hooks_find_whole_gradients() -> None:
    """A step pre-hook sees them unscaled, with the placements of their parameters."""
    parts, whole = _placed(init_device_mesh("cpu", (2,)))
    optimizer = sgd(parts)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(full(grad_of(p)) for p in parts))
    scaler = ours(init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert_equal(seen, [grad_of(p) / 8 for p in whole])


def a_rank_without_gradients_takes_part() -> None:
    """Clipped or not, with a group or with shards, it waits for nobody and skips with the rest."""
    mesh, group = init_device_mesh("cpu", (2,)), dist.group.WORLD
    for kind, clip, bad in product(("group", "shards"), (False, True), (False, True)):
        params = _placed(mesh)[0][:2]
        if kind == "group":
            params = [nn.Parameter(torch.ones(3))]
            params[0].grad = torch.ones(3)
        optimizer = adam(params)
        if dist.get_rank() == 1:
            optimizer.zero_grad()
        if dist.get_rank() == 0 and bad:
            spoil(optimizer)
        scaler = ours(process_group=group if kind == "group" else None)
        scaler.scale(torch.ones(()))
        before = held(optimizer)
        if clip:
            norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
            norms = [str(n) for n in everywhere(norm)]  # of a copy the other rank knows nothing
            assert kind == "group" or norms == [str(norm)] * 2
        scaler.step(optimizer)
        scaler.update()
        assert everywhere(scaler.step_skipped(optimizer)) == [bad, bad]
        assert everywhere(scaler.get_scale()) == [2.0**15 if bad else 2.0**16] * 2
        if bad or dist.get_rank() == 1:
            assert_equal(held(optimizer)[: len(before)], before)


CHECKS: tuple[Callable[[], None], ...] = (
    fsdp1_is_like_sharded_grad_scaler,
    fsdp1_clips_over_its_shards,
    fsdp1_counts_no_copy_twice,
    fsdp2_is_like_one_process,
    a_skipped_step_changes_no_bit,
    scales_stay_together,
    data_parallel_needs_a_group_for_local_overflows,
    a_copy_counts_once_in_a_norm,
    tensor_parallel_is_like_one_process,
    hooks_find_whole_gradients,
    a_rank_without_gradients_takes_part,
)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'ranks'}",
        rank=rank,
        world_size=len(RANKS),
        timeout=timedelta(seconds=30),
    )
    outcomes: dict[str, str] = {}
    for check in CHECKS:
        torch._dynamo.reset()
        try:
            check()
        except Exception:
            outcomes[check.__name__] = f"rank {rank}: {traceback.format_exc()}"
            break
        outcomes[check.__name__] = HOLDS
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    if set(outcomes.values()) == {HOLDS}:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
