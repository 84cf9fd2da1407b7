"""Settings come from the environment, and a bad value says which are good."""

import pytest

from ampgraph.settings import Settings, settings


def test_the_default_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPGRAPH_VERIFY", raising=False)
    assert settings() == Settings(verify="cheap"), "users pay for the cheap laws alone"


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPGRAPH_VERIFY", "full")
    assert settings().verify == "full", "the variable should be in force at once"


def test_a_bad_value_names_the_allowed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPGRAPH_VERIFY", "deep")
    with pytest.raises(ValueError, match=r"AMPGRAPH_VERIFY='deep'.*cheap, full"):
        settings()
