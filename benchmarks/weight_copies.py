"""What a call pays to see that its weight copies are current.

`python -m benchmarks.weight_copies` prints the microseconds for each parameter; what copies save
is in `python -m benchmarks cpu --case mlp-50m --task infer`.
"""

import torch
from torch import nn

from ampgraph.copies import Reader
from benchmarks.measure import median_seconds


def check_time(count: int = 200, rounds: int = 2000) -> float:
    """Microseconds for each parameter to see in a call that its copy is current."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
    reader = Reader(range(count), [torch.bfloat16] * count, grad=False)
    reads = {"read": lambda: reader.read(params, kept=True)}
    found = median_seconds(reads, torch.device("cpu"), rounds, repeats=1)
    return 1e6 * found["read"] / count


if __name__ == "__main__":
    print(f"checking a copy: {check_time():.2f} us")
