"""The op lists against the installed torch: its header, its dispatcher, and what its kernels do."""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ampgraph.errors import PolicyError
from ampgraph.internals.ops import OpOverload, autocast_kernels, name_of, schema_of
from ampgraph.oplists import (
    DEVICE_TYPES,
    Category,
    append_target,
    base_rules,
    check_device_type,
    cuda,
    one_category_each,
)

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "LOWER_PRECISION_FP": Category.ALLOW,
    "FP32": Category.DENY,
    "FP32_SET_OPT_DTYPE": Category.SET_DTYPE,
    "DIFFERENT_REDISPATCH_SIGNATURE": Category.APPEND_DTYPE,
    "PROMOTE": Category.PROMOTE,
}

# Where the CUDA rules differ from the header's lists, if torch is of a version or build to have it.
BESIDE_THE_HEADER = {
    "aten::cudnn_convolution": Category.ALLOW,  # cuDNN is CUDA's alone
    "aten::cudnn_convolution_transpose": Category.ALLOW,
    "aten::_cudnn_rnn": Category.ALLOW,  # registered in ATen/cudnn/AutocastRNN.cpp
    "aten::linalg_matrix_sqrth": Category.DENY,  # registered beside the lists in 2.14
    "aten::binary_cross_entropy": Category.BANNED,  # not a cast policy
}

# Rules that are read from torch's source, for their kernels check more than dtypes.
NOT_OBSERVABLE = {"aten::_cudnn_rnn"}

LOW, F32 = torch.bfloat16, torch.float32


def difference(wanted: Mapping[str, Category], got: Mapping[str, Category]) -> list[str]:
    """Each op the two disagree about, by name."""
    return [
        f"{op}: {wanted.get(op, 'not there')} in torch, {got.get(op, 'not there')} here"
        for op in sorted(wanted.keys() | got.keys())
        if wanted.get(op) != got.get(op)
    ]


def header_rules() -> dict[str, Category]:
    """The five list macros of ATen/autocast_mode.h, as registered names."""
    text = HEADER.read_text().replace("\\\n", " ")
    rules: dict[str, Category] = {}
    for macro, category in MACROS.items():
        found = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)
        assert found is not None, f"the header has no list {macro}"
        pattern = r'ADD_NS\(\w+\),\s*"([\w.]+)"' if "SIGNATURE" in macro else r"_\(([\w, ]+)\)"
        for row in re.findall(pattern, found[1]):
            rules["aten::" + ".".join(part.strip() for part in row.split(","))] = category
    return rules


def test_the_cuda_list_is_the_headers() -> None:
    registered = autocast_kernels("cuda")
    beside = {op: rule for op, rule in BESIDE_THE_HEADER.items() if op in registered}
    wanted = header_rules() | beside
    assert difference(wanted, base_rules("cuda")) == []


def test_the_xpu_list_is_the_headers() -> None:
    wanted = header_rules() | {"aten::binary_cross_entropy": Category.BANNED}
    assert difference(wanted, base_rules("xpu")) == []


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_every_registered_op_is_listed_and_no_other(device_type: str) -> None:
    registered = {op for op in autocast_kernels(device_type) if op.startswith("aten::")}
    listed = set(base_rules(device_type))
    assert sorted(registered - listed) == [], f"{device_type}: registered by torch, not listed"
    assert sorted(listed - registered) == [], f"{device_type}: listed, not registered by torch"


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_each_rule_is_what_autocast_does(device_type: str) -> None:
    """Call every listed op under autocast and look at what reaches the kernel below."""
    rules = observable_rules(device_type)
    observed = {op: observed_category(op, device_type) for op in rules}
    assert difference(observed, rules) == []


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_set_dtype_rules_respect_a_given_dtype_and_other_inputs(device_type: str) -> None:
    for op in cuda.SET_DTYPE & observable_rules(device_type).keys():
        given = reaching(op, device_type, LOW, dtype=torch.float64)
        assert given == ({LOW}, {torch.float64}), f"{op} overrides the caller's dtype"
        integers = reaching(op, device_type, torch.int64)
        assert integers == ({torch.int64}, set()), f"{op} sets a dtype for integers"


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_ineligible_tensors_are_left_alone(device_type: str) -> None:
    for op, category in observable_rules(device_type).items():
        if category is not Category.BANNED:
            for dtype in (torch.float64, torch.int64):
                assert reaching(op, device_type, dtype)[0] == {dtype}, f"{op} casts {dtype}"


def test_append_targets_exist_and_take_a_dtype() -> None:
    for op in cuda.APPEND_DTYPE & base_rules("cuda").keys():
        schema = schema_of(overload(append_target("cuda", op)))
        assert schema.arguments[-1].name == "dtype", f"{schema} takes no dtype at the end"


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_each_row_is_an_op_of_this_torch(device_type: str) -> None:
    for op in base_rules(device_type):
        assert name_of(overload(op)) == op, f"{op} is not the dispatcher's name"


def test_devices_share_as_few_ops_as_the_docstring_says() -> None:
    shared = base_rules("cpu").keys() & base_rules("cuda").keys()
    of_2_13 = {op for op in shared if op != "aten::linalg_matrix_sqrth" and not is_named(op)}
    assert len(of_2_13) == 39, sorted(of_2_13)


def test_an_op_in_two_sets_is_an_error() -> None:
    sets: dict[str, Any] = {category.name: frozenset[str]() for category in Category}
    sets |= {"ALLOW": {"aten::mm"}, "DENY": {"aten::mm"}, "APPEND_TARGET": {}}
    with pytest.raises(PolicyError, match="lists aten::mm as allow and as deny"):
        one_category_each("cuda", cast("ModuleType", SimpleNamespace(**sets)))


def test_an_append_row_without_target_is_an_error() -> None:
    sets: dict[str, Any] = {category.name: frozenset[str]() for category in Category}
    sets |= {"APPEND_DTYPE": {"aten::norm.Scalar"}, "APPEND_TARGET": {}}
    with pytest.raises(PolicyError, match="APPEND_TARGET does not match"):
        one_category_each("cuda", cast("ModuleType", SimpleNamespace(**sets)))


def test_unknown_device_types_are_an_error() -> None:
    with pytest.raises(PolicyError, match="use one of cuda, cpu, xpu, mps"):
        check_device_type("tpu")


# What autocast does, observed: the op's autograd kernel is replaced by one that stops the call.


class _ReachedError(Exception):
    """Carries the tensors' dtypes and the dtype arguments that reached a kernel."""

    def __init__(self, arguments: object) -> None:
        leaves = tree_leaves(arguments)
        self.tensors = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.dtypes = {leaf for leaf in leaves if isinstance(leaf, torch.dtype)}


def observable_rules(device_type: str) -> dict[str, Category]:
    """The rules whose effect can be seen by calling the op with arguments of no meaning."""
    rules = base_rules(device_type)
    hidden = NOT_OBSERVABLE | {op for op in rules if is_named(op)}
    return {op: category for op, category in rules.items() if op not in hidden}


def is_named(op: str) -> bool:
    """Whether an overload is for named tensors, which torch 2.13 no longer has."""
    return "imname" in op or "names_" in op


def observed_category(op: str, device_type: str) -> Category:
    """The category of a rule by its effect on float32, on bfloat16 and on both together."""
    try:
        wide = reaching(op, device_type, F32)
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return Category.BANNED
        raise
    low, both = reaching(op, device_type, LOW), reaching(op, device_type, LOW, F32)
    if low == ({LOW}, {F32}):
        has_dtype = any(a.name == "dtype" for a in schema_of(overload(op)).arguments)
        return Category.SET_DTYPE if has_dtype else Category.APPEND_DTYPE
    seen = (wide[0], low[0], both[0])
    effects = {
        Category.ALLOW: ({LOW}, {LOW}, {LOW}),
        Category.DENY: ({F32}, {F32}, {F32}),
        Category.PROMOTE: ({F32}, {LOW}, {F32}),
    }
    found = [category for category, effect in effects.items() if effect == seen]
    assert len(found) == 1, f"{op} does what no category does: {seen}"
    return found[0]


def reaching(
    op: str, device_type: str, *tensors: torch.dtype, dtype: torch.dtype | None = None
) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """What reaches the kernel below autocast in a bfloat16 region; fake tensors off the CPU."""
    called = append_target("cuda", op) if op in cuda.APPEND_DTYPE else op
    library = cast("Any", torch.library.Library)("aten", "IMPL")

    def stop(*args: object, **kwargs: object) -> None:
        raise _ReachedError((args, kwargs))

    try:
        key = f"Autograd{device_type.upper()}"
        library.impl(called.removeprefix("aten::"), stop, key, allow_override=True)
        args, kwargs = arguments_for(overload(op), device_type, tensors, dtype)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, LOW)
        overload(op)(*args, **kwargs)
    except _ReachedError as reached:
        return reached.tensors, reached.dtypes
    finally:
        torch.set_autocast_enabled(device_type, False)
        library._destroy()
    raise AssertionError(f"{op} never reached a kernel")


def arguments_for(
    op: OpOverload,
    device_type: str,
    tensors: tuple[torch.dtype, ...],
    dtype: torch.dtype | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that fit the schema: no kernel runs, so shapes need not make sense."""
    dtypes = itertools.chain(tensors, itertools.repeat(tensors[-1]))
    args, kwargs = [], {}
    for argument in schema_of(op).arguments:
        value = dtype if argument.name == "dtype" else value_for(argument, device_type, dtypes)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def value_for(argument: Any, device_type: str, dtypes: Iterator[torch.dtype]) -> Any:
    """A value of an argument's type: tensors where there may be one, else the default."""
    kind = str(argument.type)
    if "Tensor" in kind:
        count = 2 if "List" in kind else 1
        made = [tensor(device_type, next(dtypes)) for _ in range(count)]
        return made if "List" in kind else made[0]
    if argument.has_default_value():
        return argument.default_value
    simple = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "bool": False, "str": "x"}
    if kind.startswith("Optional"):
        return None
    if kind.startswith("List"):
        return [simple[kind.removeprefix("List[").removesuffix("]")]]
    return simple[kind]


def tensor(device_type: str, dtype: torch.dtype) -> torch.Tensor:
    """A small tensor, fake where there may be no device."""
    if device_type == "cpu":
        return torch.zeros(2, 2, dtype=dtype)
    with FakeTensorMode():
        return torch.zeros(2, 2, dtype=dtype, device=device_type)


def overload(name: str) -> OpOverload:
    """The overload with a dispatcher's name."""
    op, _, suffix = name.removeprefix("aten::").partition(".")
    found = getattr(getattr(torch.ops.aten, op), suffix or "default")
    assert isinstance(found, OpOverload), f"{name} is no op"
    return found
