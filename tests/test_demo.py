"""The demonstration's two halves, with a quick inner compiler, and the pieces they print with."""

from collections.abc import Callable
from importlib import util

import pytest
import torch

from ampgraph import demo


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated C++ and the last few epochs are what these tests need not wait for."""
    monkeypatch.setattr(demo, "inner", lambda: "eager")
    monkeypatch.setattr(demo, "EPOCHS", 2)


def test_encoder_in_bf16_finds_the_same_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    demo.encode()
    out = capsys.readouterr().out
    assert out.count("24 of 24") == 2, f"top-1 and top-3 should both be unchanged:\n{out}"
    assert "aten.linear" in out, f"the decisions should name the most frequent op:\n{out}"
    assert 'linear: "bf16[24, ' in out, f"the excerpt should show a linear in bf16:\n{out}"


@pytest.mark.parametrize("prepare", [demo.eager, demo.mixed])
def test_digits_are_learnt(prepare: Callable[[torch.nn.Module], demo.Module]) -> None:
    train, test = demo.load_digits()
    forward = demo.fit(demo.network().to(demo.device()), prepare, train, "test")
    assert demo.accuracy(forward, test) > 0.8, "two epochs should teach it most digits"


def test_neighbours_are_the_nearest_others() -> None:
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]]))
    assert demo.neighbours(vectors, 2).tolist() == [[1, 2], [0, 2], [1, 0]], "nearest first"


def test_excerpt_is_statements_around_the_first_linear() -> None:
    code = "\n".join(
        [*(f"a{i} = f()  # n" for i in range(9)), "# File: x", "", "b = linear(a8);  a8 = None"]
    )
    assert demo.excerpt(code, count=4) == ["a7 = f()  # n", "a8 = f()  # n", "b = linear(a8)"], (
        "comments, blank lines and clean-up should be gone"
    )


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"ampgraph\[demo\]"):
        demo.main()
