"""The FX vocabulary: what a node is called with, where it came from, what it would return."""

import contextlib
import operator
import re
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampgraph.internals.ops import OpOverload, schema_of
from ampgraph.internals.tensors import (
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    is_functorch_wrapped,
    is_wrapper_subclass,
)

VALUE = "example_value"  # where Dynamo keeps a node's fake value
CAST = "ampgraph_cast"  # marks the casts this compiler inserted, with the node they serve
WRITES = "ampgraph_writes"  # marks the nodes that write in place
PASS = "ampgraph_pass"  # the pass that made a node
KEPT = "keep_functions"  # that pass: the only one that leaves autocast regions, around one node


@dataclass(frozen=True)
class Operand:
    """One value a node is called with: the `index`-th node reference, at `path` inside its value.

    A node may be handed a tuple-valued node (the result of `split`); `path` then leads to a member.
    """

    index: int
    path: tuple[Any, ...]
    value: Any


def references(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, once for every occurrence, in order."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def operands(node: fx.Node, env: dict[fx.Node, Any]) -> list[Operand]:
    """Every leaf value that reaches the node, by occurrence."""
    found: list[Operand] = []
    for index, reference in enumerate(references(node)):
        for path, value in pytree.tree_flatten_with_path(env[reference])[0]:
            found.append(Operand(index, tuple(path), value))
    return found


def captured(node: fx.Node) -> Any:
    """The fake value the node had when the graph was captured, None if none was kept."""
    return node.meta.get(VALUE, node.meta.get("val"))


def arguments(node: fx.Node, env: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with values in place of nodes."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    return args, kwargs


def is_mutable(target: object) -> bool:
    """Whether this is an op that writes to one of its arguments."""
    return isinstance(target, OpOverload) and bool(schema_of(target).is_mutable)


def call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the node computes, on other arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), f"{node.name}: {node.op} is not a call"
    return node.target(*args, **kwargs)


def fresh(value: Any, mode: FakeTensorMode) -> Any:
    """A value of the same shapes and dtypes that may be written to without touching `value`."""

    def one(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_wrapper_subclass(leaf):
            return _wrapped(leaf, one)
        if leaf.layout != torch.strided or type(leaf) not in (torch.Tensor, *_PLAIN):
            return leaf.detach()
        with mode:
            return torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )

    return pytree.tree_map(one, value)


def attribute(gm: fx.GraphModule, node: fx.Node, mode: FakeTensorMode) -> Any:
    """What a get_attr node finds, with a fake tensor in place of a real one.

    `mode.from_tensor` remembers what it made of a tensor, also when an op of the capture has since
    changed its shape in place: for what needs no conversion it is not asked.
    """
    value: Any = operator.attrgetter(str(node.target))(gm)
    if not isinstance(value, Tensor):
        return value
    plain = value.layout == torch.strided and type(value) in (torch.Tensor, *_PLAIN)
    return fresh(value if plain else mode.from_tensor(value, static_shapes=True), mode)


def _wrapped(value: Any, inside: Callable[[object], object]) -> Any:
    """A tensor made of others (nested, distributed), made again of what `inside` returns."""
    names, context = value.__tensor_flatten__()
    parts = {name: inside(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())


def like(value: Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of `value`'s shape, with its need of a gradient, in another dtype."""
    with mode, torch.no_grad(), no_guards(mode):
        if is_functorch_wrapped(value) or getattr(value, "fake_mode", mode) is not mode:
            return torch.empty(tuple(value.size()), dtype=dtype, device=value.device)
        own = fresh(value, mode) if is_wrapper_subclass(value) else value
        return torch.empty_like(own, dtype=dtype).requires_grad_(value.requires_grad)


_PLAIN = (torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    """The fake mode of the values the graph's nodes carry."""
    values = [captured(node) for node in gm.graph.nodes if node.op == "placeholder"]
    return detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def no_guards(mode: FakeTensorMode) -> Generator[None]:
    """Run fake ops without leaving traces in the capture's shape environment."""
    env = mode.shape_env
    with contextlib.ExitStack() as stack:
        if env is not None:
            stack.enter_context(env.suppress_guards())
            stack.enter_context(env.ignore_fresh_unbacked_symbols())
        yield


def source_of(node: fx.Node) -> str:
    """The user's line the node came from: `file.py:12: h = self.lin(x)`, or ""."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return ""
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    if not found:
        return ""
    file, line, code = found[-1]
    return f"{file}:{line}: {code.strip()}"


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """The modules the node was called in, outermost first: (path as in named_modules(), class)."""
    stack = node.meta.get("nn_module_stack") or {}
    found = [(_module_path(path), kind) for path, kind in stack.values()]
    if node.op == "call_module":
        found.append((str(node.target), None))
    return found


def module_roots(node: fx.Node) -> list[str]:
    """The name of the variable that leads to each module of `module_stack`."""
    stack = node.meta.get("nn_module_stack") or {}
    found = [re.match(r"[LG]\['([^']*)'\]", path) for path, _ in stack.values()]
    names = [match.group(1) if match else "" for match in found]
    return [*names, ""] if node.op == "call_module" else names


def module_of(node: fx.Node) -> str:
    """Path of the innermost module the node was called in, "" for the root."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


def _module_path(path: str) -> str:
    """`L['self']._modules['enc'].layers[0]` and `L['self'].enc.layers.0` are `enc.layers.0`."""
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return re.sub(r"^[LG]\['[^']*'\]\.?", "", path)


def input_path(source: str) -> str:
    """`L['self']._modules['lin']._parameters['weight']` is `lin.weight`, `L['x'][0]` is `x[0]`."""
    if "._parameters[" not in source:
        return re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    return _module_path(re.sub(r"\._parameters\['([^']*)'\]", r".\1", source))


def op_name(target: Any) -> str:
    """A readable name for a node's target: `aten.linear`, `cond`, `getitem`."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{schema_of(target).name.split('::')[1]}"
    return getattr(target, "__name__", str(target))


def error_trace(error: BaseException) -> str:
    """The last line of an error, for messages."""
    return traceback.format_exception_only(type(error), error)[-1].strip()
