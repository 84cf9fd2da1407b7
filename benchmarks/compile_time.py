"""What the compiler adds to the time of a cold torch.compile, and how that grows with the graph.

`python -m benchmarks.compile_time` prints the share of our passes in the first forward and
backward of a 24-layer transformer, and the time per node for chains of 100 to 10,000 nodes.
"""

import argparse
import os
import tempfile
import time
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph
from ampgraph.backend import records_of
from ampgraph.errors import AmpgraphWarning

CHAINS = (100, 1_000, 10_000)
BLOCK = 5  # nodes that one link of a chain adds


class Block(nn.Module):
    """A pre-norm transformer block, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return hidden


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int = 64, heads: int = 2, vocabulary: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Share:
    """Seconds of the whole compile and of our passes in it."""

    total: float
    passes: float
    nodes: int


def share_of_transformer(layers: int = 24, inner: str = "inductor") -> Share:
    """A cold compile, forward and backward, with empty caches on disk."""
    torch.compiler.reset()
    ids = torch.randint(0, 128, (1, 8))
    compiled = ampgraph.compile(Transformer(layers), inner=inner)
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        started = time.perf_counter()
        compiled(ids).backward()
        total = time.perf_counter() - started
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    found = [record.rewritten for record in records_of(compiled)]
    nodes = sum(len(rewritten.before.graph.nodes) for rewritten in found)
    return Share(total, sum(rewritten.seconds for rewritten in found), nodes)


def chain(links: int) -> nn.Module:
    """Nodes of every kind that is decided: listed, promoted, followed, and views."""

    class Chain(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            for _ in range(links):
                h = F.gelu(F.linear(x, w, b))
                x = torch.softmax(h + x, -1).view(2, 8, 16)
            return x

    return Chain()


def seconds_of_chain(nodes: int) -> Share:
    """Our passes alone on a chain; Dynamo's own time is in the total."""
    torch.compiler.reset()
    compiled = ampgraph.compile(chain(nodes // BLOCK), inner="eager")
    w = torch.randn(16, 16, requires_grad=True)
    started = time.perf_counter()
    compiled(torch.randn(2, 8, 16), w, torch.randn(16))
    total = time.perf_counter() - started
    (record,) = records_of(compiled)
    rewritten = record.rewritten
    return Share(total, rewritten.seconds, len(rewritten.before.graph.nodes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", AmpgraphWarning)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    seconds_of_chain(100)  # what is imported on first use counts for nobody
    for nodes in CHAINS:
        found = seconds_of_chain(nodes)
        each = 1e6 * found.passes / found.nodes
        print(
            f"chain of {found.nodes:6}: {found.passes:7.3f} s in our passes, {each:4.0f} us a node"
        )
    found = share_of_transformer(arguments.layers)
    print(
        f"{arguments.layers}-layer transformer, {found.nodes} nodes, forward and backward: "
        f"{found.passes:.2f} s of {found.total:.1f} s, {found.passes / found.total:.1%}"
    )


if __name__ == "__main__":
    main()
