"""Rewrite a graph that did not come through torch.compile: `ampgraph.rewrite`."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampgraph.backend import device_type_of, entry_state
from ampgraph.errors import UnsupportedGraphError
from ampgraph.graph import op_name
from ampgraph.internals.autocast import ambient_autocast
from ampgraph.internals.dynamo import new_graph_like
from ampgraph.internals.tensors import FakeTensorMode, detect_fake_mode
from ampgraph.options import Options
from ampgraph.passes.inline_modules import inline_modules
from ampgraph.pipeline import Rewritten, rewrite_graph
from ampgraph.policy import Policy

# Ops that only exist below autograd: composites have been taken apart, autocast's rules with them.
_BELOW_AUTOGRAD = re.compile(
    r"aten\.(_softmax|_log_softmax|native_layer_norm|native_group_norm|_native_batch_norm_legit\w*"
    r"|nll_loss_forward|nll_loss2d_forward|_unsafe_view|convolution_backward|\w+_backward)$"
)


def rewrite(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    policy: Any = None,
    dtype: Any = None,
    device_type: str | None = None,
) -> fx.GraphModule:
    """A new graph with autocast's precision as explicit casts; `gm` is left as it is.

    Args:
        gm: a graph from Dynamo, `torch.fx.symbolic_trace` or pre-dispatch ATen tracing
            (`make_fx(pre_dispatch=True)`, `torch.export`'s module).
        example_inputs: tensors (real or fake) and values, one for each placeholder.
        policy, dtype: as for `ampgraph.compile`.
        device_type: whose region it is; None for the accelerator any tensor is on, else "cpu".

    Module calls are traced in the mode the modules are in: rewrite once for training and once for
    evaluation, as `train()` and `eval()` of the result do not reach into what was traced.

    Raises:
        UnsupportedGraphError: a joint or post-autograd graph. RewriteError: a node that cannot be
        rewritten.
    """
    return rewritten(gm, example_inputs, policy, dtype, device_type).after


def rewritten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    policy: Any = None,
    dtype: Any = None,
    device_type: str | None = None,
) -> Rewritten:
    """As `rewrite`, with the decisions and counts."""
    _refuse(gm)
    options = Options.parse({"policy": policy, "dtype": dtype})
    found = device_type or device_type_of(
        [*pytree.tree_leaves(list(example_inputs)), *gm.parameters(), *gm.buffers()]
    )
    mode = detect_fake_mode(list(example_inputs)) or FakeTensorMode(allow_non_fake_inputs=True)
    work = _copy(gm)
    _check_count(work, example_inputs)
    inline_modules(work, example_inputs, mode)
    return rewrite_graph(
        work,
        policies={found: options.policy or Policy.autocast(found)},
        state=entry_state(options, ambient_autocast(), found),
        outputs="autocast",
        grad=torch.is_grad_enabled(),
    )


def _refuse(gm: object) -> None:
    if not isinstance(gm, fx.GraphModule):
        raise UnsupportedGraphError(
            f"{type(gm).__name__} is not a torch.fx.GraphModule",
            cure="capture it with torch.fx.symbolic_trace or make_fx(pre_dispatch=True)",
        )
    for node in gm.graph.nodes:
        joint = node.op == "placeholder" and str(node.target).startswith("tangents")
        below = node.op == "call_function" and _BELOW_AUTOGRAD.match(op_name(node.target))
        if joint or below:
            raise UnsupportedGraphError(
                f"{node.name} belongs to a {'joint' if joint else 'post-autograd'} graph, in which "
                "the ops that autocast has rules for are already taken apart",
                cure="rewrite the graph before autograd: symbolic_trace, Dynamo's own, or "
                "make_fx(pre_dispatch=True)",
            )


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = new_graph_like(gm.graph)
    graph.output(graph.graph_copy(gm.graph, {}))
    new = fx.GraphModule(gm, graph, type(gm).__name__)
    new.meta = dict(gm.meta)
    new.train(gm.training)
    return new


def _check_count(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    places = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if len(places) != len(inputs):
        raise UnsupportedGraphError(
            f"{len(places)} placeholders, {len(inputs)} example inputs",
            cure=f"give one for each of: {', '.join(places)}",
        )
