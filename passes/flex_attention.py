"""Give flex_attention the rule of scaled_dot_product_attention, which it has not in torch.

Autocast lists no higher-order op, so mixed q, k and v raise and fp32 ones stay fp32, silently
(pytorch issue 165468). Sound because the kernel asks for one dtype of the three and accumulates in
float32, as the listed op does; `score_mod` and `mask_mod` are left alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ampgraph.decision import Decision
from ampgraph.graph import captured, fresh, like, module_of, source_of
from ampgraph.passes.plan import Cast, Plan, Walk
from ampgraph.policy import Category
from ampgraph.verdict import eligible, widest


def flex_attention(walk: Walk, node: fx.Node) -> Plan:
    """q, k and v as scaled_dot_product_attention would have them; score_mod is left alone."""
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    casts: list[Cast] = []
    rows: list[Decision] = []
    value = captured(node)
    for device_type, dtype in walk.state.enabled().items():
        rule = walk.policy(device_type).rule_for(sdpa)
        found = [walk.env[n] for n in node.args[:3]]  # type: ignore[index]
        wanted = _attention_dtype(rule.category, found, device_type, dtype)
        if wanted is None:
            continue
        casts += [
            Cast((i, ()), wanted)
            for i, t in enumerate(found)
            if eligible(t, device_type) and t.dtype != wanted
        ]
        rows.append(_flex_row(node, rule.category, rule.because, wanted, len(casts)))
        value = (like(value[0], wanted, walk.mode), *value[1:])
    return Plan(rows=tuple(rows), casts=tuple(casts), value=fresh(value, walk.mode))


def _attention_dtype(
    category: Category, qkv: Sequence[Tensor], device_type: str, low: torch.dtype
) -> torch.dtype | None:
    found = [t.dtype for t in qkv if eligible(t, device_type)]
    if not found:
        return None
    if category is Category.ALLOW:
        return low
    return torch.float32 if category is Category.DENY else widest(found)


def _flex_row(
    node: fx.Node, category: str, because: str, dtype: torch.dtype, casts: int
) -> Decision:
    return Decision(
        op="higher_order.flex_attention",
        node=node.name,
        dtype=dtype,
        category=str(category),
        because=f"as scaled_dot_product_attention: {because}",
        module=module_of(node),
        source=source_of(node),
        dtypes_in=(dtype,) * 3,
        dtypes_out=(dtype,),
        casts=casts,
    )
