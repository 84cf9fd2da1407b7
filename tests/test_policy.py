"""Policies: which rule wins, what contradicts, what libraries register, and the files."""

import copy
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ampgraph import errors
from ampgraph.errors import AmpgraphError, OptionError, PolicyError
from ampgraph.oplists import DEVICE_TYPES, base_rules, registered
from ampgraph.policy import Category, ModuleRule, Policy, Rule, register_op

aten = torch.ops.aten
CUDA, CPU = Policy.autocast("cuda"), Policy.autocast("cpu")


@pytest.fixture
def _no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of this test's own."""
    monkeypatch.setattr(registered, "_REGISTRY", registered._Registry())


@torch.library.custom_op("ampgraph_policy::gated", mutates_args=())
def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(w)


def fragment() -> Any:
    """A way to define further ops in this file's namespace; the class has no annotations."""
    return cast("Any", torch.library.Library)("ampgraph_policy", "FRAGMENT")


# Verdicts


@pytest.mark.parametrize(
    ("policy", "op", "category", "because"),
    [
        (CUDA, aten.linear.default, Category.ALLOW, "cuda autocast list: lower_precision_fp"),
        (CUDA, aten.exp.default, Category.DENY, "cuda autocast list: fp32"),
        (CUDA, aten.softmax.int, Category.SET_DTYPE, "cuda autocast list: fp32_set_opt_dtype"),
        (CUDA, aten.norm.Scalar, Category.APPEND_DTYPE, "cuda autocast list: fp32_append_dtype"),
        (CUDA, aten.dot.default, Category.PROMOTE, "cuda autocast list: promote"),
        (CUDA, aten.binary_cross_entropy.default, Category.BANNED, "cuda autocast list: banned"),
        (CUDA, aten.relu.default, Category.FOLLOW, "no rule: follows its inputs"),
        (CUDA, aten.sum.IntList_out, Category.FOLLOW, "no rule: follows its inputs"),
        (CUDA, aten.exp_.default, Category.FOLLOW, "no rule: follows its inputs"),
        (CPU, aten.exp.default, Category.FOLLOW, "no rule: follows its inputs"),
        (CPU, aten.cat.default, Category.PROMOTE, "cpu autocast list: promote"),
    ],
    ids=str,
)
def test_autocasts_own_rules(
    policy: Policy, op: torch._ops.OpOverload, category: Category, because: str
) -> None:
    assert policy.rule_for(op) == Rule(category, because)


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_a_policy_without_rules_is_the_base_list(device_type: str) -> None:
    policy = Policy.autocast(device_type)
    for name, category in base_rules(device_type).items():
        op, _, overload = name.removeprefix("aten::").partition(".")
        found = policy.rule_for(getattr(getattr(aten, op), overload or "default"))
        assert found.category is category, name


def test_each_method_gives_its_category_and_a_new_policy() -> None:
    policy = CUDA.allow(F.relu).deny("aten.mm", aten.sum).promote("aten::mul").follow(torch.exp)
    assert policy.rule_for(aten.relu.default) == Rule(Category.ALLOW, "op rule: allow aten::relu")
    assert policy.rule_for(aten.mm.default).category is Category.DENY
    assert policy.rule_for(aten.sum.dim_IntList).category is Category.DENY
    assert policy.rule_for(aten.mul.Tensor).category is Category.PROMOTE
    assert policy.rule_for(aten.exp.default).category is Category.FOLLOW
    assert CUDA.ops == ()
    assert CUDA.rule_for(aten.mm.default).category is Category.ALLOW


def test_the_later_call_replaces_the_earlier_one() -> None:
    policy = CUDA.allow("aten::tanh").deny(torch.tanh)
    assert policy.ops == (("aten::tanh", Category.DENY),)


def test_an_overloads_rule_beats_its_ops_rule_in_either_order() -> None:
    for policy in (
        CUDA.deny("aten::softmax.int").follow("aten::softmax"),
        CUDA.follow("aten::softmax").deny("aten::softmax.int"),
    ):
        rule = policy.rule_for(aten.softmax.int)
        assert rule == Rule(Category.DENY, "op rule: deny aten::softmax.int")


def test_the_default_overload_can_be_meant_alone() -> None:
    policy = CUDA.deny("aten::sum.default")
    assert policy.rule_for(aten.sum.default).category is Category.DENY
    assert policy.rule_for(aten.sum.dim_IntList).category is Category.SET_DTYPE


def test_rules_leave_in_place_and_out_overloads_alone() -> None:
    policy = CUDA.deny("aten::add")
    assert policy.rule_for(aten.add.Tensor).category is Category.DENY
    assert policy.rule_for(aten.add.out).category is Category.FOLLOW
    assert policy.rule_for(aten.add_.Tensor).category is Category.FOLLOW


def test_a_rule_lifts_a_ban() -> None:
    policy = CUDA.deny(F.binary_cross_entropy)
    assert policy.rule_for(aten.binary_cross_entropy.default).category is Category.DENY


@pytest.mark.parametrize("op", ["aten::batch_norm", "aten::native_batch_norm.default"])
def test_ops_with_hidden_writes_cannot_be_allowed(op: str) -> None:
    with pytest.raises(PolicyError, match="updates its running statistics"):
        CUDA.allow(op)
    assert CUDA.deny(op).ops == ((op, Category.DENY),)


def test_verdicts_are_kept() -> None:
    policy = CUDA.deny("aten::tanh")
    assert policy.rule_for(aten.tanh.default) is policy.rule_for(aten.tanh.default)


# Contradictions and bad arguments


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "op": (lambda: CUDA.deny("aten::gleu"), "did you mean .*aten::gelu"),
    "device": (lambda: Policy.autocast("gpu"), "use one of cuda, cpu, xpu, mps"),
    "two categories": (
        lambda: Policy("cuda", (("aten::mm", Category.DENY), ("aten.mm", Category.ALLOW))),
        "aten::mm has two rules: deny and allow",
    ),
    "autocast's category": (
        lambda: Policy("cuda", (("aten::mm", Category.SET_DTYPE),)),
        "unknown category 'fp32_set_opt_dtype'\n.*use one of allow, deny, promote, follow",
    ),
    "two dtypes": (
        lambda: CUDA.module("a.*", dtype="float32").module("a.*", dtype="float16"),
        "module 'a.*' has two dtypes: torch.float32 and torch.float16",
    ),
    "float64": (lambda: CUDA.module("a", dtype=torch.float64), "use one of float32, bfloat16"),
    "dtype name": (lambda: CUDA.module("a", dtype="fp32"), "use one of float32, bfloat16"),
    "rule dtype": (lambda: ModuleRule("a", torch.int64), "cannot compute in int64"),
    "class without module": (
        lambda: CUDA.module("class:Linear", dtype="float16"),
        "qualified|no m",
    ),
    "not a module": (lambda: CUDA.module(int, dtype="float16"), "names no module"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rules_are_errors(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(PolicyError, match=message):
        call()


# Module rules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)


class OwnNorm(nn.LayerNorm):
    pass


def test_a_path_rule_is_a_glob() -> None:
    rule = ModuleRule("layers.*.norm", torch.float32)
    assert rule.matches("layers.0.norm", nn.LayerNorm)
    assert not rule.matches("layers.0.lin", nn.Linear)
    assert not rule.matches("encoder.layers.0.norm", nn.LayerNorm)
    assert ModuleRule("*norm", torch.float32).matches("encoder.layers.0.norm", "any.Class")


def test_a_class_rule_includes_subclasses_of_a_real_type_only() -> None:
    rule = CUDA.module(nn.LayerNorm, dtype="float32").modules[0]
    assert rule.match == "class:torch.nn.modules.normalization.LayerNorm"
    assert rule.matches("", nn.LayerNorm)
    assert rule.matches("", OwnNorm)
    assert rule.matches("", "torch.nn.modules.normalization.LayerNorm")
    assert not rule.matches("", f"{OwnNorm.__module__}.OwnNorm")
    assert not rule.matches("", nn.Linear)


def test_every_spelling_of_a_class_is_one_rule() -> None:
    by_class = CUDA.module(nn.LayerNorm, dtype="float32")
    assert by_class == CUDA.module("class:torch.nn.LayerNorm", dtype=torch.float32)


def test_a_class_that_is_imported_later_still_matches() -> None:
    rule = ModuleRule("class:ampgraph_later.Norm", torch.float32)
    assert not rule.matches("", nn.LayerNorm)
    later = SimpleNamespace(Norm=nn.LayerNorm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ampgraph_later", later)
        assert rule.matches("", OwnNorm)


def test_the_innermost_match_wins_then_the_last_rule() -> None:
    stack = [("", Net), ("layers.0", Block), ("layers.0.norm", nn.LayerNorm)]
    policy = CUDA.module("layers.*", dtype="float16").module(Block, dtype="bfloat16")
    found = policy.module_rule_for(stack[:2])
    assert found is not None
    assert found.dtype is torch.bfloat16
    found = policy.module("*", dtype="float32").module_rule_for(stack)
    assert found is not None
    assert found.match == "*"
    found = policy.module("layers.0", dtype="float32").module_rule_for(stack)
    assert found is not None
    assert found.match == "layers.*", "the norm itself is layers.0.norm, which * crosses"
    assert CUDA.module_rule_for(stack) is None
    assert policy.module_rule_for([("head", nn.Linear)]) is None


def test_a_repeated_rule_moves_to_the_end() -> None:
    policy = CUDA.module("a", dtype="float16").module("b", dtype="float32")
    assert [rule.match for rule in policy.module("a", dtype="float16").modules] == ["b", "a"]


def test_unmatched_names_the_patterns_that_match_nothing() -> None:
    policy = CUDA.module("layers.*.norm", dtype="float32").module("layer.*", dtype="float32")
    policy = policy.module(nn.Linear, dtype="float16").module(nn.Conv2d, dtype="float32")
    wanted = ["layer.*", "class:torch.nn.modules.conv.Conv2d"]
    assert policy.unmatched(Net()) == wanted
    compiled = torch.compile(Net(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert policy.unmatched(compiled) == wanted


# What libraries register


@pytest.mark.usefixtures("_no_registrations")
def test_a_registered_op_has_its_rule_until_a_policy_overrides_it() -> None:
    op = torch.ops.ampgraph_policy.gated.default
    assert CPU.rule_for(op).category is Category.FOLLOW
    before = CPU.hash
    register_op("ampgraph_policy::gated", "allow", device_type="cpu")
    because = "registered by its library: allow ampgraph_policy::gated"
    assert CPU.rule_for(op) == Rule(Category.ALLOW, because)
    assert CUDA.rule_for(op).category is Category.FOLLOW
    assert CPU.hash != before
    assert CPU.deny(gated).rule_for(op).category is Category.DENY


@pytest.mark.usefixtures("_no_registrations")
def test_registering_an_aten_op_updates_verdicts_already_found() -> None:
    policies = [Policy.autocast(device_type) for device_type in DEVICE_TYPES]
    assert {p.rule_for(aten.tanh.default).category for p in policies} == {Category.FOLLOW}
    register_op("aten::tanh", Category.DENY)
    assert {p.rule_for(aten.tanh.default).category for p in policies} == {Category.DENY}


@pytest.mark.usefixtures("_no_registrations")
def test_registrations_are_checked() -> None:
    register_op("ampgraph_policy::gated", "allow")
    register_op(gated, Category.ALLOW, device_type="cuda")
    with pytest.raises(PolicyError, match="registered as allow for mps, and now as deny"):
        register_op("ampgraph_policy::gated", "deny", device_type="mps")
    register_op("aten::tanh", "allow", device_type="mps")
    with pytest.raises(PolicyError, match="registered as allow for mps, and now as deny"):
        register_op("aten::tanh", "deny")
    assert "aten::tanh" not in registered.rules_for("cuda"), "for all devices or for none"
    with pytest.raises(PolicyError, match="registered as allow, and now as deny"):
        register_op("ampgraph_policy::gated", "deny")
    with pytest.raises(PolicyError, match="use one of allow, deny, promote, follow"):
        register_op("ampgraph_policy::gated", "banned")
    with pytest.raises(PolicyError, match="did you mean ampgraph_policy::gated"):
        register_op("ampgraph_policy::gatde", "allow")
    with pytest.raises(PolicyError, match="no autocast rules for device type 'npu'"):
        register_op("ampgraph_policy::gated", "allow", device_type="npu")


def test_register_autocast_of_a_custom_op_is_honoured() -> None:
    seen: list[torch.dtype] = []

    @torch.library.custom_op("ampgraph_policy::cast_me", mutates_args=())
    def cast_me(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x.clone()

    op = torch.ops.ampgraph_policy.cast_me.default
    assert CPU.rule_for(op).category is Category.FOLLOW
    cast_me.register_autocast("cpu", torch.float16)
    because = "registered by its library: register_autocast to float16"
    assert CPU.rule_for(op) == Rule(Category.ALLOW, because, torch.float16)
    assert CUDA.rule_for(op).category is Category.FOLLOW
    assert CPU.follow(cast_me).rule_for(op).dtype is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_me(torch.ones(2))
    assert seen == [torch.float16], "the registered dtype, not the region's"


def test_register_autocast_of_any_other_op_is_honoured() -> None:
    library = fragment()
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", torch.clone, "CompositeExplicitAutograd")
    op = torch.ops.ampgraph_policy.plain.default
    assert CUDA.rule_for(op).category is Category.FOLLOW
    torch.library.register_autocast("ampgraph_policy::plain", "cuda", torch.float32, lib=library)
    rule = CUDA.rule_for(op)
    assert (rule.category, rule.dtype) == (Category.ALLOW, torch.float32)
    assert CPU.rule_for(op).category is Category.FOLLOW


def test_an_autocast_kernel_in_code_is_spoken_of() -> None:
    library = fragment()
    library.define("coded(Tensor x) -> Tensor")
    library.impl("coded", torch.clone, "AutocastCPU")
    rule = CPU.rule_for(torch.ops.ampgraph_policy.coded.default)
    assert rule.category is Category.FOLLOW
    assert "register_op can name a category" in rule.because


# Files


OPS = st.sampled_from(["aten::gelu", "aten::softmax.int", "aten::add", "aten::sum.default"])
WORDS = st.sampled_from(["allow", "deny", "promote", "follow"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
PATTERNS = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: not text.startswith("class:")
) | st.sampled_from(["class:torch.nn.Linear", "class:my.lib.Norm"])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    policy = Policy.autocast(draw(st.sampled_from(DEVICE_TYPES)))
    for op, word in draw(st.dictionaries(OPS, WORDS)).items():
        policy = getattr(policy, word)(op)
    for pattern, dtype in draw(st.dictionaries(PATTERNS, DTYPES)).items():
        policy = policy.module(pattern, dtype=dtype)
    return policy


@settings(deadline=None)  # the first example reads torch's op names
@given(policies())
def test_a_policy_survives_its_file(policy: Policy) -> None:
    read = Policy.from_toml(policy.to_toml())
    assert read == policy
    assert read.hash == policy.hash
    assert hash(read) == hash(policy)
    assert read.to_toml() == policy.to_toml()


@settings(deadline=None)
@given(policies(), policies())
def test_hashes_agree_with_equality(one: Policy, other: Policy) -> None:
    assert (one == other) == (one.hash == other.hash)


@settings(deadline=None)
@given(policies())
def test_a_policy_can_be_copied_and_pickled(policy: Policy) -> None:
    policy.rule_for(aten.mm.default)
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy
        assert twin.rule_for(aten.mm.default) == policy.rule_for(aten.mm.default)


def test_the_file_is_readable(tmp_path: Path) -> None:
    policy = CUDA.deny(F.gelu).allow("aten::tanh").module("enc.*.norm", dtype="float32")
    policy.module(nn.LayerNorm, dtype="bfloat16").save(tmp_path / "amp.toml")
    assert (tmp_path / "amp.toml").read_text() == (
        "# ampgraph policy: torch.autocast's rules for this device type, with these changes.\n"
        'device_type = "cuda"\n'
        "modules = [\n"
        '    { match = "enc.*.norm", dtype = "float32" },\n'
        '    { match = "class:torch.nn.modules.normalization.LayerNorm", dtype = "bfloat16" },\n'
        "]\n"
        "\n"
        "[ops]\n"
        '"aten::gelu" = "deny"\n'
        '"aten::tanh" = "allow"\n'
    )
    assert Policy.load(str(tmp_path / "amp.toml")).modules[0] == policy.modules[0]


def test_files_written_by_hand_may_use_tables_and_dots() -> None:
    text = '[ops]\n"aten.gelu" = "deny"\n[[modules]]\nmatch = "a"\ndtype = "torch.float32"\n'
    assert Policy.from_toml(f'device_type = "cpu"\n{text}') == CPU.deny("aten::gelu").module(
        "a", dtype="float32"
    )


HEAD = 'device_type = "cuda"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "key 'device_type' is missing"),
        ("device_type = 3", "key 'device_type' is 3 and not a string"),
        ('device_type = "gpu"', "use one of cuda, cpu, xpu, mps"),
        ("device_type = x", "not a TOML file: .*line 1"),
        (HEAD + "opps = {}", "unknown key 'opps'\n.*\n.*use device_type, ops, modules"),
        (HEAD + "ops = 3", "key 'ops' must be a table"),
        (HEAD + 'ops = { "aten::gelu" = 1 }', "key 'aten::gelu' is 1 and not a string"),
        (HEAD + 'ops = { "aten::gelu" = "fp32" }', "use one of allow, deny, promote, follow"),
        (HEAD + 'ops = { "aten::gleu" = "deny" }', "there is no op 'aten::gleu'\n.*\n.*aten::gelu"),
        (HEAD + '[ops]\n"aten::mm" = "deny"\n"aten::mm" = "deny"', "not a TOML file"),
        (HEAD + '[ops]\n"aten::mm" = "deny"\n"aten.mm" = "allow"', "aten::mm has two rules"),
        (HEAD + "modules = 3", "key 'modules' must be a list"),
        (HEAD + "modules = [3]", "key 'modules' must be a list"),
        (HEAD + 'modules = [{ match = "a" }]', "key 'dtype' is missing"),
        (HEAD + 'modules = [{ match = "a", dtype = "f8" }]', "use one of float32"),
        (HEAD + 'modules = [{ mach = "a" }]', "unknown key .* 'mach'\n.*\n.*use match, dtype"),
    ],
)
def test_bad_files_name_themselves_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=message) as caught:
        Policy.load(path)
    assert caught.value.where == str(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_binary_file_is_a_policy_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read the policy file"):
        Policy.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="cannot read the policy file"):
        Policy.load(tmp_path / "binary.toml")


def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "amp.toml"
    CUDA.save(path)

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        CPU.save(path)
    assert Policy.load(path) == CUDA
    assert [file.name for file in tmp_path.iterdir()] == ["amp.toml"], "no draft is left"


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to(tmp_path / "amp.toml")
    CPU.save(tmp_path / "link.toml")
    assert (tmp_path / "link.toml").is_symlink()
    assert Policy.load(tmp_path / "amp.toml") == CPU


def test_the_hash_includes_the_base_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CUDA.hash
    lists = dict(base_rules("cuda"))
    del lists["aten::layer_norm"]
    monkeypatch.setattr("ampgraph.policy.base_rules", lambda _: lists)
    assert CUDA.hash != before


# Errors


def test_errors_say_what_where_and_the_cure() -> None:
    error = OptionError("unknown option 'x'", where="model.py:3: y = f(x)", cure="use y")
    assert str(error) == ("option: unknown option 'x'\n  at model.py:3: y = f(x)\n  cure: use y")
    assert str(OptionError("bad")) == "option: bad"


def test_every_error_is_an_ampgraph_error_and_survives_pickling() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [k for k in kinds if k.__module__ == errors.__name__ and not issubclass(k, Warning)]
    assert len(kinds) >= 8
    for kind in kinds:
        assert issubclass(kind, AmpgraphError)
        error = kind("what", where="where", cure="cure")
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is kind
        assert str(twin) == str(error)
