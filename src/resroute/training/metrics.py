"""What a run reports while it runs: lines of metrics, memory, and whoever listens."""

import contextlib
import gc
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resroute.config import UserError, documented
from resroute.data import Floor
from resroute.files import flush, read_json_lines, write_text, writing
from resroute.residual.findings import Finding
from resroute.training.config import TrainConfig


@documented
@dataclass(frozen=True, kw_only=True)
class RunStart:
    """A run that starts, or goes on."""

    path: Path
    """Its folder."""
    label: str
    """The method's name."""
    step: int
    """Steps taken before."""
    total: int
    """Steps of the whole run."""
    floor: Floor | None
    """The least loss that any model can reach, where the corpus knows it."""
    config: TrainConfig
    """As it was given."""


class Listener:
    """Receives the events of a run; override what you want to see. The library never prints."""

    def message(self, text: str) -> None:
        """A line that a person should read."""

    def begin(self, run: RunStart) -> None:
        """A run starts, or goes on."""

    def record(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl was written."""

    def advance(self, step: int) -> None:
        """A step was taken."""

    def health(self, findings: list[Finding]) -> None:
        """The run has taken its last step, and was checked; a healthy model has no findings."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is over and its files are written."""


class MetricsFile:
    """metrics.jsonl: one object a line, appended and flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add a line.

        Raises:
            UserError: The disk does not take it.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def flush(self) -> None:
        """Wait until every line is on the disk; errors as `append`."""
        if self.path.exists():
            with writing(self.path):
                flush(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a torn last line, as a kill leaves it, is left out."""
        if not self.path.exists():
            return []
        lines = read_json_lines(self.path, "delete that line", may_be_torn=True)
        return [record for _, record in lines]

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop what was reported after `step`, and what was reported twice; return the rest."""
        kept: dict[tuple[str, int], dict[str, Any]] = {}
        for record in self.read():
            kind, at = record.get("kind"), record.get("step")
            if not isinstance(kind, str) or type(at) is not int:
                raise UserError(f"{self.path}: a line names no kind or step; delete that line")
            if at <= step:
                kept.setdefault((kind, at), finite(record))
        write_text(self.path, "".join(_line(record) for record in kept.values()))
        return list(kept.values())


def finite(value: Any) -> Any:
    """JSON values with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


class PeakMemory:
    """The most memory in use since construction.

    On CUDA, bytes that torch had allocated. Elsewhere the process's resident set: on Linux its peak
    since construction, else its peak since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            _release_free_memory()
            # resets VmHWM; refused in some containers, where the older peak then stands
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    @property
    def kind(self) -> str:
        """`cuda` or `resident`."""
        return "cuda" if self.device.type == "cuda" else "resident"

    def read(self) -> int | None:
        """Bytes, or None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "linux":
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        if os.name == "posix":
            import resource

            # bytes on macOS
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return None


def _release_free_memory() -> None:
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        # not glibc: nothing to give back
        return
