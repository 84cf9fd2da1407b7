"""Random programs over torch's API, kept as Python text and run in several ways.

A program is a root module with parameters and buffers whose `forward` is text: calls from
`program_rows`, `with autocast(...)` blocks and submodules with calls of their own. One text serves
eager torch (the oracle), a symbolic trace that records regions as Dynamo writes them, and Dynamo.
`drawing` makes programs, `program_runs` runs them.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampgraph.internals.autocast import enter_autocast, exit_autocast

NAME = re.compile(r"\b[bpvx]\d+\b")
LOW = (torch.bfloat16, torch.float16)


@dataclass
class Block:
    """Calls under one heading: `with ...:` for a region, a method for a submodule."""

    heading: str = ""
    module: str = ""
    body: list["str | Block"] = field(default_factory=list["str | Block"])


@dataclass
class Program:
    """The text of a program beside its inputs: x* are arguments, p* parameters, b* buffers."""

    body: Block
    inputs: dict[str, Tensor]
    rows: list[str]  # the row of each call
    dtypes: dict[str, torch.dtype]  # of each floating value, as drawn
    outputs: tuple[str, ...]
    inexact: frozenset[str] = frozenset()  # values that the oracle computes with other kernels
    raises: str = ""  # what torch says to the last call

    @property
    def low(self) -> float:
        """The share of floating values in low precision."""
        return sum(dtype in LOW for dtype in self.dtypes.values()) / max(len(self.dtypes), 1)

    def named(self, kinds: str) -> list[str]:
        return [name for name in self.inputs if name[0] in kinds]

    def text(self) -> str:
        """The program as Python: a function for each module, `forward` for the root."""
        functions: list[str] = []
        own = [f"{name} = self.{name}" for name in self.named("pb")]
        lines = [*own, *_lines(self.body, functions), _returns(self.outputs)]
        functions.append(_function("forward", self.named("x"), lines))
        return "\n\n".join(functions)

    def module(
        self, names: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """The root module, with `names` for what the text calls.

        It holds `tensors`, or copies of the program's own as parameters and buffers.
        """
        space = namespace(names)
        exec(self.text(), space)
        root = _module("forward", space)
        for name in self.named("pb"):
            part = self.inputs[name]
            if tensors is not None:
                setattr(root, name, tensors[name])
            elif name.startswith("p"):
                root.register_parameter(name, nn.Parameter(part.clone(), part.requires_grad))
            else:
                root.register_buffer(name, part.clone())
        _add_modules(root, self.body, space)
        return root

    def arguments(self) -> list[Tensor]:
        """Copies of the inputs that are arguments."""
        return [copied(self.inputs[name]) for name in self.named("x")]


def copied(tensor: Tensor) -> Tensor:
    """A leaf of the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


# --- text -----------------------------------------------------------------------------------------


def _function(name: str, arguments: list[str], lines: list[str]) -> str:
    return "\n".join([f"def {name}({', '.join(['self', *arguments])}):", *_indented(lines)])


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _returns(names: tuple[str, ...] | list[str]) -> str:
    return f"return ({', '.join(names)}{',' if names else ''})"


def _lines(block: Block, functions: list[str]) -> list[str]:
    found: list[str] = []
    for part in block.body:
        if isinstance(part, str):
            found.append(part)
        elif part.module:
            found += _call_of_module(part, functions)
        else:
            found += [f"with {part.heading}:", *_indented(_lines(part, functions) or ["pass"])]
    return found


def _call_of_module(block: Block, functions: list[str]) -> list[str]:
    """Call the submodule with the values it uses; it hands back all that it made."""
    lines = _lines(block, functions)
    made = [name for line in lines for name in NAME.findall(line.partition(" = ")[0])]
    used = [name for line in lines for name in NAME.findall(line)]
    given = sorted(set(used) - set(made))
    functions.append(_function(block.module, given, [*lines, _returns(made)]))
    call = f"self.{block.module}({', '.join(given)})"
    return [f"{', '.join(made)}, = {call}" if made else call]


def _module(name: str, space: Mapping[str, Any]) -> nn.Module:
    kind: type[nn.Module] = type(name.title(), (nn.Module,), {"forward": space[name]})
    return kind()


def _add_modules(parent: nn.Module, block: Block, space: Mapping[str, Any]) -> None:
    for part in block.body:
        if isinstance(part, Block):
            inner = parent
            if part.module:
                inner = _module(part.module, space)
                parent.add_module(part.module, inner)
            _add_modules(inner, part, space)


# --- what the text calls --------------------------------------------------------------------------


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor, out: Tensor, bias: Tensor, weights: bool
) -> Any:
    """Multi-head attention with two heads."""
    nothing = (None, None, False, 0.0)
    return F.multi_head_attention_forward(
        q, k, v, 8, 2, w, b, *nothing, out, bias, need_weights=weights
    )


EAGER = {"autocast": torch.autocast, "make": called, "DEVICE": "cpu", "FOREIGN": "cuda"}


def namespace(names: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a program's text may name."""
    return {"torch": torch, "F": F, "operator": operator, "attention": attention, **names}


class Recorder(fx.Tracer):
    """A symbolic trace that writes regions and factories as nodes, as Dynamo does."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    @contextlib.contextmanager
    def autocast(self, *args: Any, cache_enabled: bool) -> Generator[None]:
        entry = self.create_proxy("call_function", enter_autocast, (*args, cache_enabled), {})
        yield
        self.create_proxy("call_function", exit_autocast, (entry,), {})

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.create_proxy("call_function", function, args, kwargs)


def traced(program: Program) -> fx.GraphModule:
    """The program as one graph."""
    tracer = Recorder()
    root = program.module({**EAGER, "autocast": tracer.autocast, "make": tracer.make})
    return fx.GraphModule(root, tracer.trace(root))
