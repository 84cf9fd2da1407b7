"""The repository's shape: imports only go down, and the wheel ships every package."""

import ast
import os
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"ampgraph": "ampgraph", "ampgraph.passes": "passes", "ampgraph.kernels": "kernels"}

# Top floor first. A module imports from its own floor or from a lower one.
FLOORS = (
    ("ampgraph", "ampgraph.demo"),
    (
        "ampgraph.backend",
        "ampgraph.capture",
        "ampgraph.compiler",
        "ampgraph.copies",
        "ampgraph.explain",
        "ampgraph.kernels_of",
        "ampgraph.launches",
        "ampgraph.offline",
        "ampgraph.report",
        "ampgraph.scaler",
        "ampgraph.staleness",
        "ampgraph.steps",
    ),
    ("ampgraph.pipeline",),
    ("ampgraph.passes*",),
    ("ampgraph.kernels*",),
    (
        "ampgraph.decision",
        "ampgraph.dispatch",
        "ampgraph.gradients",
        "ampgraph.graph",
        "ampgraph.hoststate",
        "ampgraph.listener",
        "ampgraph.mend",
        "ampgraph.options",
        "ampgraph.place",
        "ampgraph.runtime",
        "ampgraph.shadow",
        "ampgraph.state",
        "ampgraph.verdict",
        "ampgraph.verify",
    ),
    ("ampgraph.opnames", "ampgraph.oplists*", "ampgraph.policy", "ampgraph.policyfile"),
    (
        "ampgraph.errors",
        "ampgraph.fakecuda*",
        "ampgraph.files",
        "ampgraph.internals*",
        "ampgraph.settings",
    ),
)


def floor(module: str) -> int:
    """The index of a module's floor, 0 at the top."""
    for level, patterns in enumerate(FLOORS):
        if any(fnmatch(module, pattern) for pattern in patterns):
            return level
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module the wheel should hold: its import name and its file."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                names = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join([package, *(n for n in names if n != "__init__")]), path


def imports(path: Path) -> Iterator[str]:
    """The modules a file imports; `from package import module` counts as the module."""
    known = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import absolutely"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def packages() -> list[str]:
    """The packages found in the tree."""
    return sorted(module for module, path in modules() if path.name == "__init__.py")


def test_imports_only_go_down() -> None:
    for module, path in modules():
        level = floor(module)
        for name in imports(path):
            top = name.partition(".")[0]
            assert top not in FOLDERS.values() or top == "ampgraph", (
                f"{path}: write ampgraph.{name}"
            )
            assert top != "ampgraph" or floor(name) >= level, f"{module} must not import {name}"


def test_wheel_ships_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(config["packages"]) == packages(), "list every package in pyproject.toml"


@pytest.mark.parametrize("folder", ["passes", "kernels"])
def test_links_lead_to_the_top_folders(folder: str) -> None:
    link = ROOT / "ampgraph" / folder
    assert link.is_symlink(), f"ampgraph/{folder} should be a link, for tools that read the tree"
    assert os.readlink(link) == f"../{folder}", f"ampgraph/{folder} should lead to ../{folder}"
