"""Time and memory on this machine's processor, at small sizes: every peer beside the others."""

import argparse
import warnings
from pathlib import Path

import torch
from rich.console import Console

from ampgraph.errors import AmpgraphWarning
from benchmarks.cases import CASES
from benchmarks.compare import compare
from benchmarks.peers import PEERS, Setting
from benchmarks.results import FOLDER, as_data, save, show, without_caches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--task", nargs="+", choices=("infer", "train"), default=["infer", "train"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of cpu.json")


def main(arguments: argparse.Namespace) -> bool:
    """Measure, print, write; whether an answer was wrong."""
    warnings.simplefilter("ignore", AmpgraphWarning)
    console = Console()
    done = []
    for case in arguments.case:
        for task in arguments.task:
            for dtype in arguments.dtype:
                setting = Setting(torch.device("cpu"), DTYPES[dtype], task)
                with without_caches():
                    done.append(compare(case, "small", setting, arguments.peer, arguments.rounds))
                show(done[-1], console)
    console.print(f"saved {save('cpu', {'comparisons': as_data(done)}, arguments.out)}")
    return any(comparison.wrong for comparison in done)
