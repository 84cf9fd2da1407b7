"""ampgraph: mixed precision as a graph transform for torch.compile."""

from ampgraph.compiler import compile
from ampgraph.decision import Decision
from ampgraph.policy import Policy, register_op

__all__ = ["Decision", "Policy", "compile", "register_op"]
