"""The case `memory`: the most memory that a step's forward and backward pass hold at once."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from resroute.bench.check import Truth
from resroute.bench.settings import Settings, served
from resroute.bench.timing import Comparison, Listener
from resroute.bench.workload import GPTStep, warm
from resroute.config import UserError
from resroute.files import read_json
from resroute.residual import PreNorm


def memory(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Compare the peak of each method on each backend with PreNorm's.

    Two rows each: `activations`, what a step allocates beyond what was there before it (gradients
    of parameters count as they come into being), and `all`, the same with parameters and the
    optimizer's state. See `peak_bytes` for what is counted.
    """
    device = settings.torch_device
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"memory is counted on the CPU and on CUDA GPUs, got device {device}")
    baseline = _measure(settings, Truth(settings, PreNorm()), served("auto", settings), listener)
    for residual in settings.methods:
        truth = Truth(settings, residual)
        for backend in settings.served():
            peak, fixed, details = _measure(settings, truth, backend, listener)
            for group, a, b in (
                ("activations", baseline[0], peak),
                ("all", baseline[0] + baseline[1], peak + fixed),
            ):
                yield Comparison(
                    name=residual.label,
                    backend=backend,
                    against="PreNorm",
                    group=group,
                    unit="bytes",
                    pairs=((float(a), float(b)),),
                    details=details,
                )


def _measure(
    settings: Settings, truth: Truth, backend: str, listener: Listener
) -> tuple[int, int, dict[str, Any]]:
    """Peak of a step, bytes of parameters and optimizer, and the details of a row."""
    checks = {"formula": truth.require_formula(backend)}
    step = GPTStep(settings, truth.residual, backend, compiled=settings.compiles)
    checks["step"] = truth.require_step(step)
    listener.message(f"{truth.residual.label} on {backend}: checked, measuring")
    torch.compiler.reset()
    warm(step)

    def work() -> None:
        step.gradients()
        step.clear()

    peak = peak_bytes(work, step.device)
    tensors: list[torch.Tensor] = [*step.model.parameters()]
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    fixed = sum(tensor.nbytes for tensor in tensors)
    details = {"parameters": step.parameters, "num_blocks": step.num_blocks, "deviation": checks}
    return peak, fixed, details


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `work` holds at once beyond what was there before it.

    On CUDA this is torch's own count of allocated bytes. On the CPU every allocation and release
    of torch's CPU allocator is recorded by its profiler and summed up: the storage of all tensors,
    those of compiled code and C++ operators included, by their size and not by pages or by what
    the process keeps for later. Not counted is what is not allocated by torch: the scratch of
    matrix libraries, stacks, Python.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with _quiet():
            recorder.export_chrome_trace(str(trace))
        events = read_json(trace, "run it again")["traceEvents"]
    records = [event for event in events if event.get("name") == "[memory]"]
    records = [event["args"] for event in sorted(records, key=lambda event: float(event["ts"]))]
    records = [record for record in records if record["Device Type"] == 0]
    if not records:
        return 0
    before = records[0]["Total Allocated"] - records[0]["Bytes"]
    return int(max(record["Total Allocated"] for record in records) - before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's library, which writes to the process's own stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
