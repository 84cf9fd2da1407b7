"""Our passes are a small and linear part of compiling."""

import cProfile
import pstats
from typing import Any

import pytest

from ampgraph import backend
from benchmarks.compile_time import seconds_of_chain, share_of_transformer


def calls_of_chain(nodes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many Python calls the passes make for a chain: what time would say, without the noise."""
    profile, rewrite = cProfile.Profile(), backend.rewrite_graph

    def profiled(*args: Any, **kwargs: Any) -> Any:
        return profile.runcall(rewrite, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "rewrite_graph", profiled)
        seconds_of_chain(nodes)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


def test_calls_grow_as_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of_chain(100, monkeypatch)  # what is made on first use counts for nobody
    small, large = (calls_of_chain(n, monkeypatch) for n in (100, 1_000))
    assert large < 11 * small, f"{small} calls for 100 nodes, {large} for 1,000"


@pytest.mark.slow
def test_share_of_a_24_layer_transformer() -> None:
    found = share_of_transformer(24)
    assert found.passes < 0.1 * found.total, f"{found.passes:.2f} s of {found.total:.1f} s"
