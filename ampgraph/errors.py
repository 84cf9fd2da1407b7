"""The errors ampgraph raises: one class for each kind of trouble.

Every message has up to three lines: what happened, where (node and the user's source line), and
the cure. Catch `AmpgraphError` to catch them all.
"""

import difflib
from collections.abc import Sequence


class AmpgraphError(RuntimeError):
    """Base of every error of this package.

    Args:
        message: what happened, in one sentence.
        where: the FX node or the user's source line, when one is known.
        cure: what to do about it.
    """

    template = "{}"

    def __init__(self, message: str, *, where: str = "", cure: str = "") -> None:
        self.message = message
        self.where = where
        self.cure = cure
        super().__init__(message, where, cure)

    def __str__(self) -> str:
        lines = [self.template.format(self.message)]
        lines += [f"  at {self.where}"] if self.where else []
        lines += [f"  cure: {self.cure}"] if self.cure else []
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments: a compile worker sends its errors to its parent."""
        return (_rebuild, (type(self), self.message, self.where, self.cure))


def _rebuild(kind: type[AmpgraphError], message: str, where: str, cure: str) -> AmpgraphError:
    return kind(message, where=where, cure=cure)


class PolicyError(AmpgraphError):
    """A policy names an op, module, dtype or key that does not exist, or contradicts itself."""

    template = "policy: {}"


class OptionError(AmpgraphError, ValueError):
    """An option's name or value is not one of the valid ones, which the message lists."""

    template = "option: {}"


class BannedOpError(AmpgraphError):
    """The program calls an op that torch.autocast refuses to run on this device type."""

    template = "unsafe under autocast: {}"


class RewriteError(AmpgraphError):
    """A pass could not rewrite a node; the graph that was captured is unchanged."""

    template = "rewrite failed: {}"


class VerifyError(AmpgraphError):
    """A rewritten graph breaks one of the laws checked between passes: a defect of ampgraph."""

    template = "the rewritten graph is wrong: {}"


class StrictError(AmpgraphError):
    """`strict=True` was asked for, and bit-equality with eager autocast cannot be kept here."""

    template = "not bit-equal to eager autocast: {}"


class StaleCopyError(AmpgraphError):
    """A parameter was written to in a way that nothing shows, and its copy was read: found by
    `weight_copies="verify"`."""

    template = "a weight copy is stale: {}"


class UnsupportedGraphError(AmpgraphError):
    """The graph is of a kind that is refused: joint, post-autograd, or not an FX graph at all."""

    template = "this graph cannot be rewritten: {}"


class FakeCudaError(AmpgraphError):
    """Code for a GPU that is not there cannot be generated, on this machine or for this model."""

    template = "GPU code without a GPU: {}"


class AmpgraphWarning(UserWarning):
    """A warning of this package; each one is given once a process."""


def did_you_mean(written: str, valid: Sequence[str]) -> str:
    """The cure for an unknown name."""
    near = difflib.get_close_matches(written, valid, n=3)
    return f"did you mean {', '.join(near)}?" if near else "leave it out"
