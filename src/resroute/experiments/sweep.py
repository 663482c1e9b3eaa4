"""A sweep: every cell of a suite trained once, on any engine, and gone on with after a stop."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from resroute.analysis import Run, read_run
from resroute.config import UserError
from resroute.data import open_mixture
from resroute.experiments.cell import FAILED, FINISHED, STOPPED, Outcome, Task
from resroute.experiments.engines import Engine
from resroute.experiments.plan import Plan, grown, read_plan, write_plan
from resroute.experiments.results import RUNS_FILE, add_result, read_results
from resroute.experiments.suites import Suite
from resroute.files import lock_file, read_json
from resroute.training import Preempted
from resroute.training.metrics import MetricsFile
from resroute.training.preemption import StopRequest

_LOCK = ".sweep.lock"
_LOGS = "logs"
# times that a cell is started again after its process has died
_RETRIES = 2


Unfinished = Literal["waiting", "running", "failed"]


@dataclass(frozen=True, kw_only=True)
class CellState:
    """How far a cell has come."""

    task: Task
    state: Unfinished | Literal["finished"]
    step: int
    loss: float | None
    """Of the latest evaluation, in nats per character."""
    seconds: float | None
    """That a finished cell has trained."""


class SweepStopped(Preempted):
    """A sweep was asked to stop; its running cells have saved."""

    def __init__(self, path: Path, finished: int, total: int, number: int) -> None:
        KeyboardInterrupt.__init__(
            self,
            f"{path}: stopped with {finished} of {total} cells finished; the running ones are "
            "saved, and the same command goes on",
        )
        self.path, self.step, self.signal = path, finished, number


def plan_tasks(suite: Suite, out: Path) -> list[Task]:
    """The suite's cells with their run folders below `out`.

    Raises:
        UserError: A corpus that cannot be opened or that a cell does not fit.
    """
    fingerprints: dict[tuple[str, tuple[str, ...]], str] = {}
    tasks = []
    for cell in suite.cells:
        source = (cell.data, cell.mix)
        if source not in fingerprints:
            fingerprints[source] = open_mixture(Path(cell.data), cell.mix).fingerprint
        name = cell.run_name(fingerprints[source])
        tasks.append(Task(name=name, config=dataclasses.replace(cell, out=str(out / name))))
    return tasks


def make_plan(suite: Suite, tasks: Sequence[Task], out: Path, results: Path | None) -> Plan:
    """The plan of a suite's cells, joined to what its folders hold.

    Raises:
        UserError: A folder is of another suite, or its primary contrast is another.
    """
    plan = Plan(
        suite=suite.name,
        baseline=suite.baseline,
        primary=suite.primary,
        runs=tuple(task.name for task in tasks),
        primary_seeds=() if suite.primary_seeds is None else (suite.primary_seeds,),
        rates=suite.rates,
    )
    plan = grown(read_plan(out), plan, out)
    return plan if results is None else grown(read_plan(results), plan, results)


def states(
    tasks: Sequence[Task], results: Path | None = None, reuse: Path | None = None
) -> list[CellState]:
    """How far each cell has come, read from its run folder, or from folders of results.

    Raises:
        UserError: A damaged file.
    """
    recorded = {
        run.name: run.summary
        for folder in (results, reuse)
        if folder is not None
        for run in _recorded(folder)
    }
    return [
        _finished(task, recorded[task.name]) if task.name in recorded else _state(task, "waiting")
        for task in tasks
    ]


def sweep(
    suite: Suite,
    out: Path,
    engine: Engine,
    *,
    results: Path | None = None,
    reuse: Path | None = None,
    may_start: Callable[[Task], bool] = lambda _: True,
    watch: Callable[[list[CellState]], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> list[CellState]:
    """Train every cell of a suite that is not finished yet.

    Cells go on from their checkpoints, so that the same call again, after a kill or with more
    seeds, does what is left. A cell whose process dies is started again twice; one that fails for
    good (its loss is no longer finite) is left, and the others go on.

    Args:
        suite: The cells, and what is declared beforehand.
        out: The sweep's folder: a run folder a cell, `suite.json`, `logs/`.
        engine: Who runs them.
        results: A folder to which each finished cell is added at once (see `write_results`); cells
            that it already has are not trained again, also where their run folders are gone.
        reuse: Another folder of results, of any suite: cells of equal configurations that it has
            are copied to `results` and not trained, but for those of a primary contrast.
        may_start: Asked before each cell; one that may not is left waiting.
        watch: Told all states, about every second.
        say: Told a line where something happens.

    Returns:
        The states of all cells at the end.

    Raises:
        UserError: A folder is in use by another sweep, belongs to another suite, or its primary
            contrast is another.
        SweepStopped: SIGTERM or Ctrl-C; the running cells have saved.
    """
    tasks = plan_tasks(suite, out)
    plan = make_plan(suite, tasks, out, results)
    with contextlib.ExitStack() as stack:
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_locked(out))
        write_plan(out, plan)
        if results is not None and reuse is not None:
            _take_over(tasks, plan, results, reuse)
        request = StopRequest()
        stack.enter_context(request.listening())
        sweep_ = _Sweep(tasks, plan, out, engine, results, may_start, watch, say, request)
        return sweep_.run()


def _recorded(results: Path) -> list[Run]:
    return read_results(results) if (results / RUNS_FILE).is_file() else []


def _take_over(tasks: Sequence[Task], plan: Plan, results: Path, reuse: Path) -> None:
    """Add those cells to a folder of results that another one already has."""
    wanted = {task.name for task in tasks} - {run.name for run in _recorded(results)}
    found = [run for run in read_results(reuse) if run.name in wanted]
    c = plan.primary
    for run in found:
        if c and run.num_layers == c.num_layers and run.label in (c.treatment, c.baseline):
            raise UserError(
                f"{reuse} has {run.name}, a cell of the primary contrast, which is declared before "
                "its cells are made; leave out --reuse"
            )
    for run in found:
        add_result(run, results, plan)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        held = lock_file(out / _LOCK, timeout=0)
    except Timeout:
        raise UserError(
            f"{out} is in use by another sweep; wait for it, or give another folder with --out"
        ) from None
    try:
        yield
    finally:
        # none where the file system has no locks; the runs' folders say so
        if held is not None:
            held.release()


class _Sweep:
    """The loop over an engine's outcomes."""

    def __init__(
        self,
        tasks: list[Task],
        plan: Plan,
        out: Path,
        engine: Engine,
        results: Path | None,
        may_start: Callable[[Task], bool],
        watch: Callable[[list[CellState]], None],
        say: Callable[[str], None],
        request: StopRequest,
    ) -> None:
        self.tasks = tasks
        self.plan = plan
        self.out = out
        self.engine = engine
        self.results = results
        self.may_start = may_start
        self.watch = watch
        self.say = say
        self.request = request
        self.failed: set[str] = set()
        self.tries: dict[str, int] = {}
        self.states = {state.task.name: state for state in states(tasks, results)}
        self.looked = 0.0
        # a log that is younger than this is that of a running cell
        self.ended = dict.fromkeys(self.states, time.time())

    def run(self) -> list[CellState]:
        left = [task for task in self.tasks if self.states[task.name].state != "finished"]
        for state in self._all():
            if state.state == "finished":
                # of an earlier call without results
                self._record(state.task)
        self._look()
        while left:
            again: list[Task] = []
            running = self.engine.run(filter(self.may_start, left), self.out / _LOGS)
            with contextlib.closing(running):
                for found in running:
                    if self.request.signal is not None:
                        running.close()
                        raise self._stopped(self.request.signal)
                    if found is not None:
                        self.ended[found.name] = time.time()
                        (task,) = (task for task in left if task.name == found.name)
                        if self._is_to_try_again(found):
                            again.append(task)
                        elif found.code == FINISHED:
                            self._record(task)
                    self._look(now=found is not None)
            left = again
        return self._all()

    def _record(self, task: Task) -> None:
        """Add a finished cell to the results; without its folder it is there already."""
        folder = Path(str(task.config.out))
        if self.results is not None and (folder / "summary.json").is_file():
            run = dataclasses.replace(read_run(folder), name=task.name)
            add_result(run, self.results, self.plan)

    def _is_to_try_again(self, found: Outcome) -> bool:
        if found.code == FINISHED:
            return False
        self.tries[found.name] = self.tries.get(found.name, 0) + 1
        last = found.message.splitlines()[-1] if found.message else f"exit code {found.code}"
        if found.code == FAILED or self.tries[found.name] > _RETRIES:
            self.failed.add(found.name)
            self.say(f"{found.name} failed: {last}")
            return False
        why = "was stopped" if found.code == STOPPED else f"died: {last}"
        self.say(f"{found.name} {why}; it is tried again")
        return True

    def _look(self, *, now: bool = True) -> None:
        """Read how far cells have come; not more often than every second unless one has ended."""
        if not now and time.monotonic() - self.looked < 1.0:
            return
        self.looked = time.monotonic()
        for task in self.tasks:
            if self.states[task.name].state != "finished":
                self.states[task.name] = _state(task, self._unfinished(task.name))
        self.watch(self._all())

    def _unfinished(self, name: str) -> Unfinished:
        if name in self.failed:
            return "failed"
        log = self.out / _LOGS / f"{name}.log"
        is_running = log.is_file() and log.stat().st_mtime > self.ended[name]
        return "running" if is_running else "waiting"

    def _all(self) -> list[CellState]:
        return [self.states[task.name] for task in self.tasks]

    def _stopped(self, number: int) -> SweepStopped:
        finished = sum(s.state == "finished" for s in states(self.tasks, self.results))
        return SweepStopped(self.out, finished, len(self.tasks), number)


def _state(task: Task, unfinished: Unfinished) -> CellState:
    folder = Path(str(task.config.out))
    if (folder / "summary.json").is_file():
        return _finished(task, read_json(folder / "summary.json", "remove its folder"))
    step, loss = _progress(folder)
    return CellState(task=task, state=unfinished, step=step, loss=loss, seconds=None)


def _finished(task: Task, summary: dict[str, Any]) -> CellState:
    return CellState(
        task=task,
        state="finished",
        step=task.config.steps,
        loss=summary.get("nats_per_character", summary.get("validation_loss")),
        seconds=summary.get("seconds"),
    )


def _progress(folder: Path) -> tuple[int, float | None]:
    """Last step and last validation loss that a run has reported."""
    step, loss = 0, None
    for record in MetricsFile(folder / "metrics.jsonl").read():
        step = max(step, record.get("step", 0))
        if record.get("kind") == "validation":
            loss = record.get("nats_per_character", record.get("loss"))
    return step, loss
