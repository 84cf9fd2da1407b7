"""Give a graph's outputs the dtypes that are wanted of them, in place.

The last pass for `outputs="original"`, whose callers expect what they captured; and for the bodies
of higher-order ops, whose branches must agree and whose carried values keep their dtype.
"""

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampgraph.graph import CAST, PASS, VALUE, captured, like
from ampgraph.internals.tensors import FakeTensorMode
from ampgraph.passes.insert_casts import SHORT, SITE


def cast_outputs(
    gm: fx.GraphModule, dtypes: dict[int, torch.dtype], mode: FakeTensorMode, served: str
) -> None:
    """Cast the outputs at these flat positions, in place."""
    output = output_of(gm)
    leaves, spec = pytree.tree_flatten(output.args[0])
    for position, dtype in dtypes.items():
        leaves[position] = cast_before(output, leaves[position], dtype, mode, served)
    output.args = (pytree.tree_unflatten(leaves, spec),)
    if dtypes:
        gm.recompile()


def output_of(gm: fx.GraphModule) -> fx.Node:
    """The node that returns."""
    found: fx.Node = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return found


def cast_before(
    output: fx.Node, source: fx.Node, dtype: torch.dtype, mode: FakeTensorMode, served: str
) -> fx.Node:
    """A cast of `source` right before the output node."""
    with output.graph.inserting_before(output):
        new = output.graph.create_node(
            "call_function",
            torch.ops.aten._to_copy.default,
            (source,),
            {"dtype": dtype},
            name=f"{source.name}_{SHORT.get(dtype, 'cast')}",
        )
    new.meta.update({k: source.meta[k] for k in SITE if k in source.meta})
    new.meta |= {PASS: "restore_outputs", CAST: served}
    new.meta[VALUE] = like(captured(source), dtype, mode)
    return new
