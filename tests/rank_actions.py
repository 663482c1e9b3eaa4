"""Jobs of `workers.py` that look at what each of several processes does."""

import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as sharded_units
from torch.utils._python_dispatch import TorchDispatchMode

import resroute as rr
from resroute.config import from_dict
from resroute.data import evaluation_windows, open_corpus
from resroute.training import learner as learner_module
from resroute.training.device import choose_precision
from resroute.training.distributed import World, join
from resroute.training.learner import Learner
from resroute.training.tensors import write_gathered


def learn(
    config: dict[str, Any],
    *,
    steps: int = 6,
    windows: tuple[int, ...] = (),
    out: str | None = None,
    counting: bool = False,
    gradients: bool = False,
) -> dict[str, Any]:
    """Take steps without a run folder.

    Returns:
        `steps`: loss and gradient norm of each; `rows`: what each read; `units`: names and dtypes
        of parameters that each gathered together; `counts` of its collectives, where counting;
        `evaluations` on so many windows each, `averaged` too where the run averages, and their
        units. Weights before and after the steps, and the last `gradients` where they are wanted,
        are below `out`.
    """
    chosen = from_dict(rr.TrainConfig, config)
    corpus = open_corpus(Path(chosen.data))
    device = torch.device("cpu")
    found: dict[str, list[Any]] = {"steps": [], "rows": [], "counts": [], "units": []}
    found |= {"evaluations": [], "averaged": [], "units_of_evaluations": []}
    with join("cpu") as world, reading(found["rows"]):
        learner = Learner(chosen, corpus, world, device, choose_precision(chosen.precision, device))
        write(out, "initial", learner, world)
        for step in range(steps):
            counts = Counts()
            with gathering() as units, counts if counting else nullcontext():
                taken = learner.gradients(step)
            if gradients and step == steps - 1:
                write(out, "gradients", learner, world, gradients=True)
            learner.update(chosen.learning_rate)
            found["steps"].append([taken.loss, taken.grad_norm])
            found["counts"].append(counts.calls)
            found["units"].append(units)
        for count in windows:
            evaluation = evaluation_windows(corpus, context=chosen.model.context, max_windows=count)
            with gathering() as units:
                found["evaluations"].append(learner.evaluate(evaluation, bool))
            found["units_of_evaluations"].append(units)
            if learner.average is not None:
                found["averaged"].append(learner.evaluate(evaluation, bool, averaged=True))
        write(out, "final", learner, world)
    return found


def write(
    out: str | None, name: str, learner: Learner, world: World, *, gradients: bool = False
) -> None:
    """Write whole weights, or gradients, from all processes' shares."""
    if out is None:
        return
    groups = {name: group for name, group in learner.state().items() if name != "optimizer"}
    if gradients:
        named = learner.model.named_parameters()
        groups = {"model": {name: p.grad for name, p in named if p.grad is not None}}
    folder = Path(out, name)
    if world.is_main:
        folder.mkdir(parents=True)
    write_gathered(folder if world.is_main else None, groups, world)


@contextmanager
def reading(rows: list[Any]) -> Iterator[None]:
    """Note the inputs of each training batch that is read."""
    read = learner_module.training_batch

    def noted(*arguments: Any, **options: Any) -> Any:
        inputs, targets = read(*arguments, **options)
        rows.append(inputs.tolist())
        return inputs, targets

    learner_module.training_batch = noted
    yield
    learner_module.training_batch = read


@contextmanager
def gathering() -> Iterator[list[Any]]:
    """Note which sharded parameters are gathered together, and in which dtype."""
    gather = sharded_units.foreach_all_gather
    units: list[Any] = []

    def noted(parameters: Any, *arguments: Any) -> Any:
        dtypes = {str(p.param_dtype or p.orig_dtype) for p in parameters}
        units.append([sorted(p._param_fqn for p in parameters), sorted(dtypes)])
        return gather(parameters, *arguments)

    sharded_units.foreach_all_gather = noted
    yield units
    sharded_units.foreach_all_gather = gather


class Counts(TorchDispatchMode):
    """Counts collectives by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(
        self, call: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if call.namespace in ("c10d", "_c10d_functional"):
            name = call.overloadpacket.__name__
            self.calls[name] = self.calls.get(name, 0) + 1
        return call(*arguments, **(options or {}))


class Ear(rr.Listener):
    """Keeps the kinds of what it is told, and fails after a step."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.heard: list[str] = []

    def advance(self, step: int) -> None:
        if step == self.fails_at:
            raise rr.UserError("the ear hurts")

    def message(self, text: str) -> None:
        self.heard.append(text)

    def begin(self, run: Any) -> None:
        self.heard.append("begin")

    def record(self, record: dict[str, Any]) -> None:
        self.heard.append(f"{record['kind']} {record['step']}")

    def end(self, summary: dict[str, Any]) -> None:
        self.heard.append("end")


def train_watched(
    config: dict[str, Any], fails_at: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train; say what this process was told and which paths of the run's folder it changed."""
    changed = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int)
        writes = writes and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        if (writes or changes) and config["out"] in str(arguments[0]):
            changed.add(Path(str(arguments[0])).name)

    ear = Ear(fails_at)
    sys.addaudithook(note)
    summary = rr.train(from_dict(rr.TrainConfig, config), listener=ear, **options)
    return {"summary": summary, "heard": ear.heard, "changed": sorted(changed)}


def train_each(configs: list[dict[str, Any]], options: list[dict[str, Any]]) -> dict[str, Any]:
    """Train by a configuration and options of this process's own."""
    rank = int(os.environ["RANK"])
    return rr.train(from_dict(rr.TrainConfig, configs[rank]), **options[rank])


def train_failing(
    config: dict[str, Any], rank: int, module: str, name: str, **options: Any
) -> dict[str, Any]:
    """Train, while a function fails on one process by a mistake that has a remedy."""

    def fails(*_: Any, **__: Any) -> None:
        raise rr.UserError(f"{name} fails here")

    if int(os.environ["RANK"]) == rank:
        setattr(importlib.import_module(module), name, fails)
    return rr.train(from_dict(rr.TrainConfig, config), **options)


def prepare_together(mistaken: list[int]) -> int:
    """Do something together in which some processes are mistaken."""
    with join("cpu") as world:

        def prepare() -> int:
            if world.rank in mistaken:
                raise rr.UserError(f"the fault of {world.rank}")
            return world.rank

        return world.together(prepare)


def meet(port: int, late: float) -> float:
    """Meet at a store that is there already, as under torchrun; the main process comes late."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if os.environ["RANK"] == "0":
        time.sleep(late)
    with join("cpu") as world:
        return world.total(1.0)[0]


def meet_again(times: int) -> list[float]:
    """Meet, part and meet again at one address, the processes early or late by turns."""
    found = []
    for turn in range(times):
        if os.environ["RANK"] == str(turn % 2):
            time.sleep(0.2)
        with join("cpu") as world:
            found.append(world.total(1.0)[0])
    return found


ACTIONS = {
    "meet_again": meet_again,
    "meet": meet,
    "learn": learn,
    "train_watched": train_watched,
    "train_each": train_each,
    "train_failing": train_failing,
    "prepare_together": prepare_together,
}
