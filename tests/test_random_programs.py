"""Thousands of random programs: rewritten graphs against eager autocast, bit for bit.

Two hundred run by default and ten thousand with `make fuzz`. Hypothesis makes every choice, so a
failure is shrunk to a short program, which the message shows as Python.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import fx

import ampgraph
import cuda_runs
from ampgraph.errors import AmpgraphError
from ampgraph.policy import Policy
from drawing import Drawer
from program_rows import ROWS
from program_runs import ambient, assert_same, capture, eager, ours, run
from programs import EAGER, Program
from rule_runs import CALLS_RULED_OPS, RULED, Reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = Policy.autocast("cpu")
EVERY_ROW = [row for rows in ROWS.values() for row in rows]

# `_trilinear` is no composite, and its CPU kernel calls `bmm` through the dispatcher, where eager
# autocast casts once more. The graph leaves it in float32, as its backward is in eager too.
CAST_INSIDE_KERNELS = [row for row in EVERY_ROW if "bilinear(<f 4,8>" in row]
# Fused kernels of a GPU that the replay on the CPU does not have, or other kernels for one op.
NOT_ON_CPU = [row for row in EVERY_ROW if "_cell" in row or "svdvals" in row]
OTHER_KERNELS = [row for row in EVERY_ROW if "attention" in row or "dropout" in row]
# Calls in which dtypes cannot meet, or in which the program mixes them itself.
CANNOT_MIX = [
    row
    for group, rows in ROWS.items()
    for row in rows
    if (row.count("<f") + row.count("<w") < 2 and group != "ALLOW") or group == "CASTS"
] + CAST_INSIDE_KERNELS


@dataclass
class Seen:
    """What a search has run, and the text of the last program."""

    programs: int = 0
    text: str = ""
    low: float = 0.0
    calls: int = 0
    rows: set[str] = field(default_factory=set[str])
    counts: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        calls, low = self.calls / self.programs, self.low / self.programs
        return (
            f"{self.programs} programs of {calls:.1f} calls and {len(self.rows)} kinds, "
            f"{low:.0%} in low precision, {dict(self.counts)}"
        )

    def note(self, program: Program) -> None:
        self.programs, self.text = self.programs + 1, program.text()
        self.low += program.low
        self.calls += len(program.rows)
        self.rows |= set(program.rows)


Check = Callable[[Random, Seen], None]


def search(check: Check, examples: int, seed: int = 0) -> Seen:
    """Check that many programs; the first failure is shrunk and raised."""
    seen = Seen()

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
        report_multiple_bugs=False,
    )
    @hypothesis.given(st.randoms(use_true_random=False))
    def run_all(rng: Random) -> None:
        seen.text = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about odd arguments
                check(rng, seen)
        except Exception as error:
            error.add_note(seen.text)  # a seed alone does not bring a program back
            raise

    run_all()
    return seen


def some_dtype(rng: Random) -> torch.dtype:
    return rng.choice([BF16, BF16, BF16, FP16])


def cpu_lists(rng: Random, seen: Seen) -> None:
    """The CPU lists; the graph captured under the region, or for all that without it."""
    dtype = rng.choice([BF16, BF16, FP16, None])
    grad = rng.random() < 0.75
    with ambient(dtype), torch.set_grad_enabled(grad):
        program = Drawer(rng, EAGER, without=CAST_INSIDE_KERNELS).draw()
    seen.note(program)
    wanted = eager(program, dtype, grad)
    seen.counts["no gradient in eager"] += bool(wanted.backward_error)
    gm = capture(program, dtype, grad)
    got = ours(program, gm, CPU, dtype, grad)
    seen.counts["casts folded"] += got.folded
    assert_same(program, wanted, got)


def captured_somehow(program: Program, dtype: torch.dtype) -> fx.GraphModule | None:
    """Captured under autocast or, where its lists do not suit the program, without."""
    for seen in (dtype, None):
        with contextlib.suppress(Exception):
            return capture(program, seen, grad=True)
    return None


def rules(rng: Random, seen: Seen) -> None:
    """Op rules and module rules, against explicit casts."""
    dtype = some_dtype(rng)
    categories = ("allow", "deny", "promote", "follow")
    ops = {name: rng.choice(categories) for name in rng.sample(RULED, rng.randint(0, 6))}
    follows_whole = {"linear": "allow"}  # it has listed ops inside, which `follow` would show
    ops = {n: follows_whole.get(n, c) if c == "follow" else c for n, c in ops.items()}
    modules = [(f"*{rng.randint(0, 9)}", rng.choice([FP32, FP32, BF16, FP16])) for _ in range(3)]
    reference = Reference(ops, list(dict(modules).items()))
    calls_ruled = [row for row in EVERY_ROW if any(part in row for part in CALLS_RULED_OPS)]
    with reference, ambient(dtype):
        program = Drawer(
            rng,
            EAGER,
            within=reference.within,
            without=[*CAST_INSIDE_KERNELS, *calls_ruled],
            without_in_modules=[*ROWS["CASTS"], "<f *>.type_as(<f =>)"],
        ).draw()
    seen.note(program)
    root = reference.attach(program.module(EAGER))

    def call(*args: torch.Tensor) -> object:
        with reference, ambient(dtype):
            return root(*args)

    wanted = run(program, call, root, grad=True)
    gm = captured_somehow(program, dtype)
    if gm is None:
        seen.counts["no capture"] += 1
    else:
        assert_same(program, wanted, ours(program, gm, reference.policy(), dtype, grad=True))


def cuda_lists(rng: Random, seen: Seen) -> None:
    """The CUDA lists on CPU tensors, against torch's CUDA autocast on fake ones."""
    dtype, grad = some_dtype(rng), rng.random() < 0.5
    drawer = Drawer(
        rng,
        cuda_runs.NAMES,
        cuda_runs.evaluated,
        without=NOT_ON_CPU,
        inexact=OTHER_KERNELS,
        all_outputs=True,
    )
    with cuda_runs.region("cuda", dtype), torch.set_grad_enabled(grad):
        program = drawer.draw(least=5, most=30)
    seen.note(program)
    gm = cuda_runs.capture(program, dtype)
    got = ours(program, gm, Policy.autocast("cuda"), dtype, grad)
    for name in program.dtypes.keys() & got.outputs.keys():
        assert got.outputs[name].dtype == program.dtypes[name], f"{name}\n{program.text()}"
    assert_same(program, cuda_runs.replayed(program, dtype, grad), got)


def refused(rng: Random, seen: Seen) -> None:
    """A program whose last call eager autocast refuses: repaired, or refused with our error."""
    dtype = some_dtype(rng)
    drawer = Drawer(rng, EAGER, without=CANNOT_MIX, low_inputs=False, keep_raising=True)
    with ambient(dtype), torch.no_grad():
        program = drawer.draw(40, 60)
    if not program.raises:
        return
    seen.note(program)
    try:
        gm = capture(program, None, grad=False)
    except Exception:
        seen.counts["refused without autocast as well"] += 1
        return
    seen.counts[how_it_ends(program, gm, dtype)] += 1


def how_it_ends(program: Program, gm: fx.GraphModule, dtype: torch.dtype) -> str:
    """Rewrite and run what eager autocast refuses; no error but our own, or a kernel's absence."""
    try:
        ours(program, gm, CPU, dtype, grad=False)
    except AmpgraphError:
        return "refused with our error"
    except RuntimeError as error:
        if str(error).splitlines()[0] == program.raises.splitlines()[0]:
            return f"refused as eager does: {program.rows[-1]}"
        raise AssertionError(f"eager: {program.raises}\n{program.text()}") from error
    return "repaired"


def dynamo(rng: Random, seen: Seen) -> None:
    """Through torch.compile, from Python source to the rewritten graph."""
    dtype, grad = some_dtype(rng), rng.random() < 0.75
    with ambient(dtype), torch.set_grad_enabled(grad):
        program = Drawer(rng, EAGER, without=CAST_INSIDE_KERNELS).draw(5, 20)
    seen.note(program)
    wanted = eager(program, dtype, grad)
    root = program.module(EAGER)
    torch._dynamo.reset()
    door = ampgraph.compile(root, dtype=dtype, inner="eager")
    try:
        got = run(program, door, root, grad)
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        torch._dynamo.reset()
        plain = program.module(EAGER)
        with pytest.raises(type(error)):  # no fault of ours: Dynamo fails without us as well
            run(program, torch.compile(plain, backend="eager"), plain, grad)
        seen.counts["Dynamo fails"] += 1
        return
    assert_same(program, wanted, got)


@dataclass(frozen=True)
class Search:
    """How many programs by default, in how many shards of a hundred the thorough search, and what
    the default search has to reach: kinds of calls, share of low precision."""

    check: Check
    examples: int
    shards: int
    rows: int = 80
    low: float = 1 / 3


SEARCHES = {
    "cpu_lists": Search(cpu_lists, 80, 50),
    "rules": Search(rules, 45, 20),
    "cuda_lists": Search(cuda_lists, 35, 15),
    "refused": Search(refused, 30, 10, rows=30, low=0.0),
    "dynamo": Search(dynamo, 10, 5, rows=40),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_random_programs(name: str) -> None:
    wanted = SEARCHES[name]
    seen = search(wanted.check, wanted.examples)
    assert seen.low / seen.programs > wanted.low, f"little low precision: {seen}"
    assert len(seen.rows) >= wanted.rows, f"few kinds of calls: {seen}"


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, seed) for name, found in SEARCHES.items() for seed in range(1, found.shards + 1)],
)
def test_many_random_programs(name: str, seed: int) -> None:
    print(name, search(SEARCHES[name].check, 100, seed))


def test_every_row_is_a_call_that_runs() -> None:
    """A row that torch always refuses would never be in a program, and nobody would notice."""
    seen = Seen()
    for seed in range(2500):
        grad = torch.set_grad_enabled(seed % 3 > 0)
        with ambient(BF16 if seed % 2 else None), grad, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.note(Drawer(Random(seed), EAGER).draw())
        if seen.rows.issuperset(EVERY_ROW):
            break
    assert set(EVERY_ROW) <= seen.rows, set(EVERY_ROW) - seen.rows
