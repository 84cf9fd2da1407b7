"""What every test gets: a fixed seed, a fresh Dynamo, the deep verifier; and no silent skip."""

import os
from collections.abc import Generator, Iterator

# The deep verifier is slower and so is not what users get; tests always pay for it.
os.environ.setdefault("AMPGRAPH_VERIFY", "full")

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """Each test starts from the same seed and compiles everything itself."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test is a failed one: a check that silently stopped running guards nothing."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure: {report.longrepr}"
    return report
