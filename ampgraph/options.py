"""The options of both doors: one frozen dataclass, every value checked, every error a list."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ampgraph.errors import OptionError, did_you_mean
from ampgraph.internals.dynamo import backend_names, inductor_options
from ampgraph.policy import Policy

DTYPES: dict[Any, Any] = {
    None: None,
    "ambient": "ambient",
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}
MODES = (
    None,
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)


@dataclass(frozen=True)
class Options:
    """What a user may ask of the compiler; the defaults are torch.autocast's behaviour.

    Attributes:
        dtype: the low dtype, "ambient" (only where the caller's autocast is on), or None (the
            caller's autocast if one is on, else bfloat16).
        policy: None for torch.autocast's own rules.
        inner: the Dynamo backend that receives the rewritten graph.
        mode: Inductor's mode.
        outputs: "autocast", "original", or None (see README, "which door").
        strict: bit-equal to eager autocast, or an error.
        weight_copies: read parameters from low-precision copies that are kept beside them; with
            "verify" the copies are compared with the parameters, a part in each call.
        inductor: Inductor's own options.
    """

    dtype: torch.dtype | Literal["ambient"] | None = None
    policy: Policy | None = None
    inner: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    outputs: Literal["autocast", "original"] | None = None
    strict: bool = False
    weight_copies: Literal[False, True, "verify"] = False
    inductor: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "Options":
        """Options from a mapping of our keywords and Inductor's; raises OptionError."""
        given = dict(given or {})
        known = [f.name for f in dataclasses.fields(cls) if f.name != "inductor"]
        ours = {k: given.pop(k) for k in known if k in given}
        inner = _inner(ours.get("inner", "inductor"))
        mode = _one_of("mode", ours.get("mode"), MODES)
        if mode not in (None, "default") and inner != "inductor":
            raise OptionError(f"mode={mode!r} is Inductor's, and inner is {inner!r}")
        _check_inductor(given, inner, known)
        return cls(
            dtype=_dtype(ours.get("dtype")),
            policy=_policy(ours.get("policy")),
            inner=inner,
            mode=mode,
            outputs=_one_of("outputs", ours.get("outputs"), (None, "autocast", "original")),
            strict=_one_of("strict", ours.get("strict", False), (True, False)),
            weight_copies=_one_of(
                "weight_copies", ours.get("weight_copies", False), (False, True, "verify")
            ),
            inductor=given,
        )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        told = ", ".join(repr(a) for a in allowed)
        raise OptionError(f"{name}={value!r} is not one of {told}")
    return value


def _dtype(value: Any) -> Any:
    try:
        return DTYPES[value]
    except (KeyError, TypeError):
        raise OptionError(
            f"dtype={value!r} is not torch.bfloat16, torch.float16, 'bfloat16', 'float16', "
            "'ambient' or None",
            cure="float32 needs no mixed precision: compile with backend='inductor'",
        ) from None


def _policy(value: Any) -> Policy | None:
    if value is None or isinstance(value, Policy):
        return value
    if isinstance(value, (str, Path)):
        return Policy.load(value)
    raise OptionError(
        f"policy={value!r} is not an ampgraph.Policy, a path of a policy file or None"
    )


def _inner(value: Any) -> Any:
    if callable(value):
        return value
    names = backend_names()
    if value not in names:
        near = difflib.get_close_matches(str(value), names)
        raise OptionError(
            f"inner={value!r} is not a Dynamo backend or a callable",
            cure=f"did you mean {', '.join(near)}?" if near else f"one of {', '.join(names)}",
        )
    if value == "ampgraph":
        raise OptionError("inner='ampgraph' would rewrite the graph twice", cure="leave it out")
    return value


def _check_inductor(rest: Mapping[str, Any], inner: Any, ours: list[str]) -> None:
    valid = inductor_options() if rest and inner == "inductor" else []
    unknown = [k for k in rest if k.replace("-", "_") not in valid]
    if not unknown:
        return
    also = " and Inductor's (torch._inductor.list_options())" if inner == "inductor" else ""
    raise OptionError(
        f"unknown: {', '.join(map(repr, unknown))}; valid are {', '.join(ours)}{also}",
        cure=did_you_mean(unknown[0], [*ours, *valid]),
    )
