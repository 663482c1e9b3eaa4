"""How long a sweep will take: from cells that are finished, else from a short timed step."""

import dataclasses
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resroute import ops
from resroute.config import fingerprint, to_dict
from resroute.experiments.sweep import CellState
from resroute.model import GPT, GPTConfig
from resroute.model.flops import flops_per_token
from resroute.training import TrainConfig
from resroute.training.device import choose_device, choose_precision, product_dtype

# of a model that is timed; deeper ones are extrapolated
_LAYERS = 8
_TOKENS = 2048
# a forward pass, against forward and backward
_EVALUATION = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of training by cell, on one job."""

    seconds: Mapping[str, float]
    """Left, by the cell's name; finished cells have 0."""
    jobs: int
    from_finished: int
    """Cells whose estimate is the time of a finished one of its kind."""

    @property
    def wall(self) -> float:
        """Seconds until the last cell is finished, where each job always has one."""
        longest = max(self.seconds.values(), default=0.0)
        return max(sum(self.seconds.values()) / self.jobs, longest)


class Estimator:
    """Estimates what is left of a sweep; remembers what it has timed.

    A cell of the model and batch of a finished one takes its time, in proportion to its steps.
    For any other a few steps of a shallower model are timed here, and taken in proportion to the
    FLOPs of a token (`flops_per_token`); on another machine, or beside other work, it is off.

    Args:
        jobs: Cells at a time.
        threads: Of a cell.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs = jobs
        self.threads = threads
        self._timed: dict[str, float] = {}

    def __call__(self, states: Sequence[CellState]) -> Estimate:
        """The seconds that each cell still needs."""
        known: dict[str, list[float]] = {}
        for state in states:
            if state.seconds is not None and state.task.config.steps:
                seconds = state.seconds / state.task.config.steps
                known.setdefault(_kind(state.task.config), []).append(seconds)
        left: dict[str, float] = {}
        from_finished = 0
        for state in states:
            config, kind = state.task.config, _kind(state.task.config)
            left[state.task.name] = 0.0
            if state.state in ("finished", "failed"):
                continue
            from_finished += kind in known
            step = statistics.median(known[kind]) if kind in known else self._time(kind, config)
            left[state.task.name] = step * max(0, config.steps - state.step)
        return Estimate(seconds=left, jobs=self.jobs, from_finished=from_finished)

    def _time(self, kind: str, config: TrainConfig) -> float:
        if kind not in self._timed:
            self._timed[kind] = _timed(config, self.threads)
        return self._timed[kind]


def _kind(config: TrainConfig) -> str:
    """Cells of one kind take equal time a step."""
    fields: dict[str, Any] = to_dict(config)
    names = ("model", "batch_size", "precision", "device", "backend", "compile", "accumulation")
    return fingerprint({name: fields[name] for name in names})


def _timed(config: TrainConfig, threads: int) -> float:
    """Seconds of a step of this configuration, evaluations in proportion."""
    device = choose_device(config.device)
    precision = product_dtype(device, choose_precision(config.precision, device))
    model_config = _shallow(config.model)
    windows = max(1, min(config.batch_size, _TOKENS // config.model.context))
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings(), ops.backend(config.backend):
            warnings.simplefilter("ignore")
            # a look at the clock draws nothing from the caller's generator
            with torch.random.fork_rng(devices=[]):
                model = GPT(model_config).to(device)
                size = (windows, config.model.context + 1)
                tokens = torch.randint(config.model.vocab_size, size).to(device)
            runs = []
            for _ in range(3):
                began = time.perf_counter()
                with torch.autocast(device.type, precision, enabled=precision is torch.bfloat16):
                    _, loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                runs.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(former)
    # the first one warms up
    seconds = min(runs[1:])
    whole = flops_per_token(config.model) / flops_per_token(model_config)
    per_step = seconds * whole * config.batch_size / windows
    evaluated = config.evaluation_windows / config.batch_size / config.evaluate_every
    return per_step * (1 + _EVALUATION * evaluated)


def _shallow(model: GPTConfig) -> GPTConfig:
    """The model with few layers, but enough for its depth blocks."""
    blocks = getattr(model.residual, "num_blocks", None) or 1
    depth = min(model.num_layers, max(_LAYERS, blocks))
    return dataclasses.replace(model, num_layers=depth)
