"""Every Python snippet of the README and of docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
]


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.splitlines()[-1][:30])
def test_snippet_runs(
    snippet: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "Error" not in capsys.readouterr().out


def test_the_graph_shown_is_the_graph_made() -> None:
    """The before/after example in the README is what the compiler really writes."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import ampgraph

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.proj(x), target)

    args = (torch.randn(8, 64), torch.zeros(8, dtype=torch.long))
    report = ampgraph.explain(Head(), args, policy=ampgraph.Policy.autocast("cuda"))
    made = report.after.print_readable(print_output=False)
    shown = re.findall(r'^\w+: "[^"]*" = (\S+?)\(', README, flags=re.MULTILINE)
    assert len(shown) == 7
    ops = re.findall(r'^ +\w+: "[^"]*" = (\S+?)\(', made, flags=re.MULTILINE)
    assert ops == shown
