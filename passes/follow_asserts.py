"""Let the assertions that torch.export writes beside casts speak of the dtypes of now.

`x.float()` is exported as `_assert_tensor_metadata(x, dtype=float32)` and the cast. The assertion
says what was captured; where the rewrite made its tensor low, it would stop a right program.

    _assert_tensor_metadata(h, dtype=float32)   ->   _assert_tensor_metadata(h, dtype=bfloat16)
"""

import torch
from torch import fx

from ampgraph.graph import arguments, captured
from ampgraph.passes.plan import Plan, Walk
from ampgraph.verdict import named

_ASSERT = torch.ops.aten._assert_tensor_metadata.default
_DTYPE = 3  # its position among the arguments


def followed_assert(walk: Walk, node: fx.Node) -> Plan | None:
    """The plan for an assertion on a tensor's dtype; None for every other node."""
    if node.target is not _ASSERT:
        return None
    args, kwargs = arguments(node, walk.env)
    asserted = named(_ASSERT, args, kwargs).get("dtype")
    was, now = captured(node.all_input_nodes[0]).dtype, walk.env[node.all_input_nodes[0]].dtype
    if asserted != was or was == now:
        return Plan()  # nothing asserted, nothing changed; or false as captured: let it fail
    if "dtype" in kwargs:
        return Plan(kwargs=(("dtype", now),))
    return Plan(positional=((_DTYPE, now),))
