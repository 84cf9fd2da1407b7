"""ampgraph: mixed precision as a graph transform for torch.compile."""

from ampgraph.compiler import compile
from ampgraph.copies import refresh
from ampgraph.decision import Decision
from ampgraph.errors import AmpgraphWarning
from ampgraph.explain import explain, reports
from ampgraph.offline import rewrite
from ampgraph.policy import Policy, register_op
from ampgraph.report import Report
from ampgraph.scaler import GradScaler

__all__ = [
    "AmpgraphWarning",
    "Decision",
    "GradScaler",
    "Policy",
    "Report",
    "compile",
    "explain",
    "refresh",
    "register_op",
    "reports",
    "rewrite",
]
