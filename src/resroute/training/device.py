"""Where and in which precision a run computes, and what machine that is."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from resroute.config import UserError, suggestion
from resroute.model.projection import NARROW_IS_SLOW, has_matrix_tiles
from resroute.training.config import TrainConfig


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of a name; `auto` takes CUDA, then MPS, then the CPU.

    Of several processes on a machine each takes the CUDA device of its `local_rank`.

    Raises:
        UserError: A device that torch does not know or this machine does not have.
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, there in has.items() if there), "cpu")
        if local_rank is not None and name == "mps":
            # one device cannot be shared
            name = "cpu"
    if local_rank is not None and name.startswith("cuda:"):
        raise UserError(f"several processes cannot share {name!r}; use --device cuda")
    if local_rank is not None and name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ("auto", "cpu", *has)
        raise UserError(
            f"unknown device {name!r}{suggestion(name, known)}; use one of {', '.join(known)}"
        ) from error
    if device.type not in ("cpu", *has):
        raise UserError(f"device {name!r} is not supported; use auto, cpu, cuda or mps")
    if not has.get(device.type, True):
        raise UserError(
            f"device {name!r} was asked for, but torch finds none here; use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA "
            "devices, numbered from 0"
        )
    return device


def product_dtype(device: torch.device, precision: torch.dtype) -> torch.dtype:
    """What a run in `precision` multiplies matrices in, see `model.projection`."""
    return torch.float32 if device.type == "cpu" and NARROW_IS_SLOW else precision


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """float32 or bfloat16, the type of autocast; `auto` takes bfloat16 where it is faster.

    That is on GPUs that compute in it and on CPUs with AMX. A CPU with AVX512-BF16 alone multiplies
    bfloat16 matrices at about 0.6 times the speed of float32, and a training step takes 1.3 to 1.6
    times as long (LOG.md).
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "cpu" and has_matrix_tiles():
        return torch.bfloat16
    return torch.float32


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Let torch take deterministic algorithms alone.

    Raises:
        UserError: A device where that cannot be promised.
    """
    if device.type == "mps":
        raise UserError("deterministic is not to be had on mps; use --device cpu, or leave it out")
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if device.type == "cuda" and setting not in (":4096:8", ":16:8"):
        raise UserError(
            "deterministic on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of "
            "the command"
        )
    former = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former, warn_only=only_warned)
        torch.backends.cudnn.benchmark = benchmark


def numerics(
    config: TrainConfig, device: torch.device, precision: torch.dtype, routing: str, processes: int
) -> dict[str, Any]:
    """What the bits of a run depend on besides its configuration."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        # a session that was not leaves open by which algorithms its weights came about
        "deterministic": config.deterministic,
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads(),
        "processes": processes,
        "parallel": config.parallel if processes > 1 else "none",
        "accumulation": config.accumulation,
        "precision": str(precision).removeprefix("torch."),
        "backend": routing,
        "compile": config.compile,
        "torch": torch.__version__,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _processor() -> str:
    """The processor as far as kernels are chosen by it."""
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digits = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {digits}"


def keep_freed_memory() -> None:
    """Let the process keep what a step frees, for the next step; glibc alone, nothing elsewhere.

    By default large tensors go back to the system when they are freed, and the next step faults in
    each of their pages again: 2 to 5 % of a step on CPUs (LOG.md). The process then stays as large
    as its largest step.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)


def has_cpp_compiler() -> bool:
    """Whether torch.compile finds the compiler that it needs on CPUs."""
    usual = {"Darwin": "clang++", "Windows": "cl"}.get(platform.system(), "g++")
    return shutil.which(os.environ.get("CXX", usual)) is not None


def describe_device(device: torch.device) -> str:
    """A device in words, such as `cpu (x86_64, 2 threads)`; never the name of the host."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def environment(device: torch.device, precision: torch.dtype) -> dict[str, Any]:
    """What a run ran on: versions, commit and device; no host, user or path."""
    return {
        "resroute": version("resroute"),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": describe_device(device),
        "precision": str(precision).removeprefix("torch."),
        "commit": _commit(),
        "command": [Path(sys.argv[0]).name, *(_without_folders(a) for a in sys.argv[1:])],
    }


def _without_folders(argument: str) -> str:
    before, equals, path = argument.rpartition("=")
    return f"{before}{equals}{Path(path).name}" if Path(path).is_absolute() else argument


def _commit() -> str | None:
    """Commit of the source tree that this package runs from, where it is one."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
