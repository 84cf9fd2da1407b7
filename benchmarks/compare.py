"""One comparison: every peer on one program, held to the same answer before anything is timed."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.cases import CASES, Program, Size, in_dtype
from benchmarks.measure import host_reads, median_seconds, peak_bytes, seconds_of_first, settle
from benchmarks.peers import BASELINE, NEEDED, PEERS, Call, Peer, Setting

# A low-precision peer may be this much further from float64 than eager autocast: fusing rounds
# elsewhere, and a seed's luck moves the error by a few tenths. One whose weights themselves are low
# has lost more than autocast has: that is shown, not refused.
SLACK, LOW_WEIGHTS_SLACK = 1.5, 10.0
# Two float32 programs that sum in another order.
FLOAT32 = 1e-3


@dataclass
class Row:
    """What one peer took: seconds, bytes, and relative L2 errors against float64.

    `wrong` says why a peer's figures are left out; `reads` counts waits for a GPU, None without.
    """

    peer: str
    seconds: float | None = None
    ratio: float | None = None
    peak: int | None = None
    first: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    reads: int | None = None
    wrong: str | None = None


@dataclass
class Comparison:
    """All rows of one case, with what was asked for."""

    case: str
    task: str
    dtype: str
    size: str
    device: str
    parameters: int
    rows: list[Row]

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if row.wrong]


def compare(
    case: str,
    size: Size,
    setting: Setting,
    peers: Iterable[str] = PEERS,
    rounds: int = 9,
    repeats: int = 1,
    seed: int = 0,
) -> Comparison:
    """Build the program once, give each peer a copy, check, then time in turn.

    A peer that raises, or whose answer is wrong, gets no figures but a reason.
    """
    torch.manual_seed(seed)
    torch.compiler.reset()
    program = CASES[case].program(size, setting.task)
    wide = in_dtype(copy.deepcopy(program), torch.float64)
    exact = prepared(PEERS["eager fp32"], wide, setting)[1]()
    chosen = [name for name in PEERS if name in {*peers, *NEEDED}]
    rows = {name: Row(name) for name in chosen}
    calls: dict[str, Call] = {}
    for name in chosen:
        try:
            calls[name] = _first_of(PEERS[name], program, setting, exact, rows[name])
        except Exception as error:
            rows[name].wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for name in chosen:
        rows[name].wrong = rows[name].wrong or _why_wrong(PEERS[name], rows, setting.dtype)
        if rows[name].wrong:
            calls.pop(name, None)
    for name, seconds in median_seconds(calls, setting.device, rounds, repeats).items():
        _fill(rows[name], seconds, calls[name], setting)
    base = rows[BASELINE].seconds
    for row in rows.values():
        row.ratio = base / row.seconds if base and row.seconds else None
    return Comparison(
        case, setting.task, str(setting.dtype).removeprefix("torch."), size,
        setting.device.type, sum(p.numel() for p in program[0].parameters()), list(rows.values()),
    )  # fmt: skip


def prepared(
    peer: Peer, program: Program, setting: Setting
) -> tuple[Call, Callable[[], dict[str, Tensor]]]:
    """The peer's call, and the same call with what it answers: its output and, in training, the
    gradients that it leaves, as float64 vectors."""
    if setting.task == "infer":
        call = peer.serve(program, setting)
        return call, lambda: {"output": vector([call()])}
    call, model = peer.train(program, setting)
    return call, lambda: _answer_of_step(call(), model)


def _answer_of_step(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The loss, and the direction of the gradient: its length is clipped, or is still scaled."""
    gradient = vector([p.grad for p in model.parameters() if p.grad is not None])
    return {"output": vector([loss]), "gradients": gradient / gradient.norm()}


def _first_of(
    peer: Peer, program: Program, setting: Setting, exact: dict[str, Tensor], row: Row
) -> Call:
    """The peer's call, run once: its time, and how far its answer is from `exact`."""
    call, answer = prepared(peer, program, setting)
    kept: dict[str, Tensor] = {}
    row.first = seconds_of_first(lambda: kept.update(answer()), setting.device)
    for name, value in kept.items():
        row.errors[name] = float((value - exact[name]).norm() / exact[name].norm())
    return call


def _why_wrong(peer: Peer, rows: dict[str, Row], dtype: torch.dtype) -> str | None:
    """Why a peer's answer is not to be trusted, or None."""
    slack = LOW_WEIGHTS_SLACK if peer.own_weights else SLACK
    for name, error in rows[peer.name].errors.items():
        # A loss is one number, which eager autocast may hit by luck: one rounding is never wrong.
        low = max(slack * rows["eager autocast"].errors.get(name, 0.0), torch.finfo(dtype).eps)
        limit = low if peer.low else FLOAT32
        if not error <= limit:
            return f"wrong {name}: {error:.2g} from float64, at most {limit:.2g}"
    return None


def _fill(row: Row, seconds: float, call: Call, setting: Setting) -> None:
    row.seconds = seconds
    row.peak = peak_bytes(call, setting.device)
    if setting.device.type == "cuda":
        settle(setting.device)
        row.reads = host_reads(call)


def vector(tensors: Iterable[Tensor]) -> Tensor:
    """All elements, in float64, on the host."""
    return torch.cat([t.detach().double().flatten().cpu() for t in tensors])
