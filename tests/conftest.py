"""What every test gets: a fixed seed, a fresh Dynamo, the deep verifier; and no silent skip."""

import os
from collections.abc import Generator, Iterator

# The deep verifier is slower and so is not what users get; tests always pay for it.
os.environ.setdefault("AMPGRAPH_VERIFY", "full")

import pytest
import torch

from ampgraph import backend


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """Each test starts from the same seed, compiles everything itself and is warned anew."""
    torch.manual_seed(0)
    backend._warned.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skipped test is a failed one: a check that silently stopped running guards nothing."""
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which fails: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests that skip themselves, or that a marker skips."""
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Modules that skip themselves whole."""
    report = yield
    fail_if_skipped(report)
    return report
