"""Draw random programs: pick rows, fill their holes with fitting values, and run each call.

Because each call is run while it is drawn, shapes fit, calls that torch refuses are known, and the
dtypes of all values are those of the oracle. Every choice is made by `rng`, which hypothesis can
shrink.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from ampgraph.internals.autocast import disable_autocast
from ampgraph.internals.tensors import quiet_fake_errors
from program_rows import ROWS, SINKS, WEIGHTS
from programs import LOW, NAME, Block, Program, copied, namespace

HOLE = re.compile(r"<([a-z]) ([^<>]*)>")
SHAPES = ((4, 8), (4, 8), (2, 4, 8), (8,), (2, 4, 6, 6))
MOST = 2048  # elements of a value that other calls may use
LARGEST = 1e4  # values beyond it soon say nothing but infinity
FRESH = {"f": 0.12, "p": 0.6, "o": 0.8, "k": 0.7}  # how often a hole gets a new input


def evaluated(text: str, space: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """What a call returns."""
    return eval(text, dict(space), values)


def outside(path: str) -> contextlib.AbstractContextManager[None]:
    """What a call inside a module runs in, unless a rule says otherwise: nothing."""
    return contextlib.nullcontext()


@dataclass
class Drawer:
    """Draws one program; `run` makes a call on the values so far, given its text and its names."""

    rng: Random
    names: Mapping[str, Any]
    run: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Any] = evaluated
    within: Callable[[str], contextlib.AbstractContextManager[None]] = outside
    without: Iterable[str] = ()  # rows not to use
    without_in_modules: Iterable[str] = ()
    inexact: Iterable[str] = ()  # rows the oracle computes with other kernels
    low_inputs: bool = True
    keep_raising: bool = False
    all_outputs: bool = False
    inputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    rows: list[str] = field(default_factory=list[str])
    used: set[str] = field(default_factory=set[str])
    differing: set[str] = field(default_factory=set[str])
    sinks: set[str] = field(default_factory=set[str])
    raises: str = ""
    count: int = 0

    def draw(self, least: int = 5, most: int = 40) -> Program:
        """A program of `least` to `most` calls."""
        self.space = namespace(self.names)
        self.size = self.rng.randint(least, most)
        body = Block()
        with warnings.catch_warnings(), torch.random.fork_rng(), quiet_fake_errors():
            warnings.simplefilter("ignore")
            while len(self.rows) < self.size and not self.raises:
                self._fill(body, 0, "")
        differing = frozenset(self.differing)
        outputs = tuple(self._outputs())
        return Program(body, self.inputs, self.rows, self.dtypes, outputs, differing, self.raises)

    def _outputs(self) -> list[str]:
        """What no call uses, and some of the rest."""
        returned = 1.0 if self.all_outputs else 0.1
        made = [n for n, v in self.values.items() if isinstance(v, Tensor) and n[0] == "v"]
        return [n for n in made if n not in self.used or self.rng.random() < returned]

    def _fill(self, block: Block, depth: int, path: str) -> None:
        """Add calls and inner blocks until a coin ends the block."""
        for _ in range(self.rng.randint(1, 8)):
            if len(self.rows) >= self.size or self.raises:
                return
            coin = self.rng.random()
            if coin < 0.12 and depth < 3:
                self._region(block, depth, path)
            elif coin < 0.18 and depth < 3:
                self._module(block, depth, path)
            else:
                self._call(block, path)

    def _region(self, block: Block, depth: int, path: str) -> None:
        device = self.rng.choice(["DEVICE"] * 7 + ["FOREIGN"])
        dtype = self.rng.choice(["torch.bfloat16", "torch.bfloat16", "torch.float16", "None"])
        enabled = self.rng.random() < 0.7
        inner = Block(f"autocast({device}, {dtype}, {enabled}, cache_enabled=False)")
        if path and self.without_in_modules:
            return  # whether a region or the rule of its module wins is not asked here
        block.body.append(inner)
        with eval(inner.heading, self.space):
            self._fill(inner, depth + 1, path)

    def _module(self, block: Block, depth: int, path: str) -> None:
        inner = Block(module=f"m{self._next()}")
        block.body.append(inner)
        inner_path = f"{path}.{inner.module}".strip(".")
        with self.within(inner_path):
            self._fill(inner, depth + 1, inner_path)

    def _next(self) -> int:
        self.count += 1
        return self.count

    def _call(self, block: Block, path: str) -> None:
        """Draw a row, fill its holes and run it; forget it where torch refuses it."""
        group = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        barred = {*self.without, *(self.without_in_modules if path else ())}
        row = self.rng.choice([row for row in ROWS[group] if row not in barred] or ["<f *> * 2"])
        before = dict(self.inputs)
        text, operands = self._filled(row)
        out, error = self._run(text)
        if error and self.keep_raising and self._runs_in_fp32(text):
            self.raises = error
        elif error or not self._useful(out):
            for name in self.inputs.keys() - before.keys():
                del self.inputs[name], self.values[name]
            return
        self.rows.append(row)
        self.used |= set(operands[1:] if row in ROWS["WRITES"] else operands)
        self._note(block, text, out, row)

    def _note(self, block: Block, text: str, out: Any, row: str) -> None:
        """Give a result, and the members of a tuple, names."""
        name = f"v{self._next()}"
        block.body.append(f"{name} = {text}")
        self.values[name] = out
        if row in self.inexact:
            self.differing.add(name)
        if row in self.inexact or row in SINKS:
            self.sinks.add(name)
        if isinstance(out, Tensor) and out.is_floating_point():
            self.dtypes[name] = out.dtype
        if isinstance(out, (tuple, list)):
            for i, member in enumerate(out[:3]):
                if isinstance(member, Tensor):
                    self._note(block, f"{name}[{i}]", member, row)

    def _run(self, text: str) -> tuple[Any, str]:
        try:
            return self.run(text, self.space, self.values), ""
        except Exception as error:
            return None, str(error) or type(error).__name__

    def _runs_in_fp32(self, text: str) -> bool:
        """Whether only the dtypes are wrong with a call."""
        env = {n: _in_fp32(self.values[n]) for n in NAME.findall(text)}
        try:
            with disable_autocast():
                evaluated(text, self.space, env)
        except Exception:
            return False
        return True

    def _useful(self, out: Any) -> bool:
        """Not beyond the range in which results differ when operands do."""
        parts = out if isinstance(out, (tuple, list)) else (out,)
        for part in parts:
            if not isinstance(part, Tensor) or not (part.is_floating_point() or part.is_complex()):
                continue
            if not bool((part.detach().abs() <= LARGEST).all()) and self.rng.random() < 0.9:
                return False
        return True

    def _filled(self, row: str) -> tuple[str, list[str]]:
        """The row with alternatives and operands chosen."""
        text = re.sub(r"\{([^{}]*)\}", lambda m: self.rng.choice(m.group(1).split("|")), row)
        text = text.replace("<shape>", ", ".join(map(str, self.rng.choice(SHAPES))))
        operands: list[str] = []

        def fill(hole: re.Match[str]) -> str:
            first = tuple(self.values[operands[0]].shape) if operands else ()
            operands.append(self._operand(hole.group(1), hole.group(2), first))
            return operands[-1]

        return HOLE.sub(fill, text), operands

    def _operand(self, kind: str, wanted: str, first: tuple[int, ...]) -> str:
        fits = [
            name
            for name, value in self.values.items()
            if isinstance(value, Tensor)
            and name not in self.sinks
            and _is_kind(kind, name, value)
            and value.numel() <= MOST
            and _has_shape(tuple(value.shape), wanted, first)
        ]
        if fits and self.rng.random() >= FRESH.get(kind, 0.3):
            return self.rng.choice(fits[-4:] if self.rng.random() < 0.6 else fits)
        name = {"p": "p", "o": "b"}.get(kind, "x") + str(self._next())
        shape = self._shape(wanted, first)
        with torch._C.DisableTorchFunction():  # a reference's rules are not for making inputs
            self.inputs[name] = self._tensor(kind, shape)
            self.values[name] = copied(self.inputs[name])
        return name

    def _shape(self, wanted: str, first: tuple[int, ...]) -> tuple[int, ...]:
        if wanted == "=":
            return first
        if wanted == "*":
            return self.rng.choice(SHAPES)
        sizes = wanted.replace("...", self.rng.choice(["4", "2,4"])).replace("?", "4")
        return tuple(int(size) for size in sizes.split(","))

    def _tensor(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.randint(0, 1 << 16))
        if kind in "kib":
            found = torch.randint(0, 2 if kind == "b" else 4, shape, generator=generator)
            return found.bool() if kind == "b" else found
        if kind == "c":
            return torch.randn(shape, dtype=torch.complex64, generator=generator)
        found = torch.randn(shape, generator=generator) * (0.35 if kind == "p" else 0.7)
        low = self.rng.choice([torch.float32] * 5 + [LOW[0]] * 3 + [LOW[1]])
        low = low if self.low_inputs else torch.float32
        dtype = {"d": torch.float64, "f": low, "w": low}.get(kind, torch.float32)
        return found.to(dtype).requires_grad_(kind not in "ow" and self.rng.random() < 0.6)


def _in_fp32(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().float() if floating else value


_KINDS: Mapping[str, Callable[[Tensor], bool]] = {
    "f": lambda t: t.is_floating_point() and t.dtype != torch.float64,
    "w": lambda t: t.is_floating_point() and _writable(t),
    "d": lambda t: t.dtype == torch.float64,
    "i": lambda t: t.dtype == torch.int64,
    "b": lambda t: t.dtype == torch.bool,
    "c": lambda t: t.is_complex(),
}


def _writable(tensor: Tensor) -> bool:
    try:
        return not (tensor.is_leaf and tensor.requires_grad)
    except RuntimeError:  # a view that may not be looked at any more
        return False


def _is_kind(kind: str, name: str, value: Tensor) -> bool:
    if kind in _KINDS:
        return _KINDS[kind](value) and not name.startswith("b")
    if kind == "k":
        return name.startswith("x") and value.dtype == torch.int64
    return name.startswith({"p": "p", "o": "b"}[kind])


def _has_shape(shape: tuple[int, ...], wanted: str, first: tuple[int, ...]) -> bool:
    if wanted in "*=":
        return len(shape) > 0 if wanted == "*" else shape == first
    sizes = wanted.split(",")
    if sizes[0] == "...":
        return len(shape) >= 2 and shape[-1] == int(sizes[-1])
    pairs = zip(sizes, shape, strict=False)
    return len(sizes) == len(shape) and all(s in ("?", str(n)) for s, n in pairs)
