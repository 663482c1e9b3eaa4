"""The command `sweep`: options to a design, a live table while it runs."""

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from resroute import experiments
from resroute.cli.commands import corpus_named, overrides, residual_of
from resroute.config import UserError, with_overrides
from resroute.experiments import CellState, Estimate, Estimator
from resroute.model import PRESETS
from resroute.residual import PreNorm, ResidualConfig
from resroute.training import TrainConfig

# rows of cells that the live table has room for
_MOST_RUNNING = 12


def sweep(options: argparse.Namespace) -> None:
    """Run a suite, or print its plan."""
    suite = experiments.make_suite(options.suite, _design(options))
    out = Path(options.out or f"runs/{options.suite}")
    engine, threads = _engine(options)
    estimator = Estimator(engine.jobs, threads)
    tasks = experiments.plan_tasks(suite, out)
    results = None if options.results is None else Path(options.results)
    reuse = None if options.reuse is None else Path(options.reuse)
    if reuse is not None and results is None:
        raise UserError("--reuse copies cells into a folder of results: name it with --results")
    if options.dry_run:
        # what the sweep itself would refuse
        experiments.make_plan(suite, tasks, out, results)
        states = experiments.states(tasks, results, reuse)
        print("\n".join(_plan_lines(suite, states, estimator(states), out)))
        return
    if options.hours is not None and options.hours < 0:
        raise UserError(f"--hours must not be negative, got {options.hours:g}")
    until = math.inf if options.hours is None else time.monotonic() + 3600 * options.hours

    def may_start(task: experiments.Task) -> bool:
        # cells that finish on the way are the better clock, so the estimate is made anew
        return (
            math.isinf(until)
            or time.monotonic() + estimator(experiments.states(tasks)).seconds[task.name] <= until
        )

    with _Display(estimator) as display:
        states = experiments.sweep(
            suite,
            out,
            engine,
            results=results,
            reuse=reuse,
            may_start=may_start,
            watch=display.watch,
            say=display.say,
        )
    Console(width=None if sys.stdout.isatty() else 100).print(_summary(states))
    failed = [state.task.name for state in states if state.state == "failed"]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(states)} cells failed: {', '.join(failed[:3])}"
            f"{', ..' if len(failed) > 3 else ''}\ntheir logs are in {out / 'logs'}; the same "
            "command tries them again"
        )
    waiting = sum(state.state == "waiting" for state in states)
    held = f", {waiting} wait: they need more --hours" if waiting else ""
    done = len(states) - waiting
    compares = f"; `resroute report {results or out}` compares them" if done else ""
    print(f"\n{out}: {done} cells finished{held}{compares}")


def _engine(options: argparse.Namespace) -> tuple[experiments.Engine, int]:
    """The engine, and the threads of a cell on it."""
    if options.engine == "ray":
        if options.jobs is not None:
            raise UserError("--jobs is for the local engine; with ray give --cpus and --gpus")
        cpus = options.cpus or 1
        if options.dry_run:
            raise UserError("--dry-run times cells on this machine; leave out --engine ray")
        return experiments.RayEngine(cpus=cpus, gpus=options.gpus or 0.0), cpus
    if options.cpus is not None or options.gpus is not None:
        raise UserError("--cpus and --gpus are for --engine ray; the local engine has --jobs")
    engine = experiments.LocalEngine(options.jobs, options.device)
    return engine, engine.threads


def _design(options: argparse.Namespace) -> experiments.Design:
    seeds = options.seeds
    more = max(seeds, 5) if options.primary_seeds is None else options.primary_seeds
    return experiments.Design(
        bases=tuple(_base(options, source) for source in options.data),
        layers=tuple(options.layers),
        seeds=seeds,
        primary_seeds=more,
        blocks=options.blocks,
        methods=tuple(_method(name, options.blocks) for name in options.methods),
        rates=None if options.rates is None else experiments.read_rates(Path(options.rates)),
        axis=tuple(options.axis),
    )


def _method(name: str, blocks: int) -> ResidualConfig:
    residual = residual_of(name, None)
    return residual_of(name, blocks) if hasattr(residual, "num_blocks") else residual


def _base(options: argparse.Namespace, source: str) -> TrainConfig:
    """What all cells of a corpus share; a tenth of the steps warms up and is between looks."""
    corpus = corpus_named(source)
    steps = options.steps
    model = PRESETS[options.preset](
        min(options.layers),
        vocab_size=corpus.tokenizer.vocab_size,
        context=options.context,
        # replaced by each cell's own
        residual=PreNorm(),
    )
    config = TrainConfig(
        model=model,
        data=str(corpus.path),
        steps=steps,
        batch_size=options.batch,
        learning_rate=options.lr,
        warmup_steps=steps // 10,
        evaluate_every=max(1, steps // 10),
        evaluation_windows=256,
        log_every=max(1, steps // 40),
        observe_every=max(1, steps // 8),
        checkpoint_every=max(1, steps // 4),
        keep=1,
        precision=options.precision,
        device=options.device,
    )
    return with_overrides(config, overrides(options.set))


def _plan_lines(
    suite: experiments.Suite, states: list[CellState], left: Estimate, out: Path
) -> list[str]:
    """A line a cell, with what tells it from others, then what it comes to."""
    axes = {name: value for name, value in _axes(states).items() if name not in ("rate", "steps")}
    rows = [["cell", "method", "corpus", "rate", "steps", *axes, "time", "state"]]
    for state in states:
        config = state.task.config
        rows.append([
            state.task.name,
            experiments.series_label(config),
            Path(config.data).name,
            f"{config.learning_rate:.2g}",
            f"{config.steps:,}",
            *(f"{value(config):g}" for value in axes.values()),
            _time(left.seconds[state.task.name]),
            state.state,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["<", "<", "<", *(">" for _ in axes), ">", ">", ">", "<"]
    lines = [
        "  ".join(
            f"{text:{align}{width}}"
            for text, align, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    counts = Counter(state.state for state in states)
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    basis = f"{left.from_finished} estimated by finished ones, others by a timed step"
    c = suite.primary
    contrast = f"{c.treatment} minus {c.baseline} at {c.num_layers} layers" if c else "none"
    return [
        *lines,
        "",
        f"{len(states)} cells in {out}: {told}",
        f"primary contrast: {contrast}",
        f"about {left.wall:.0f} s ({_time(left.wall)}), {left.jobs} at a time; {basis}",
    ]


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


class _Display:
    """A table that changes on a terminal; elsewhere a line for each cell that ends."""

    def __init__(self, estimator: Estimator) -> None:
        self.console = Console(stderr=True)
        self.estimator = estimator
        self.live = Live(console=self.console, refresh_per_second=2, transient=True)
        self.ended: set[str] | None = None
        self.began = time.monotonic()

    def __enter__(self) -> "_Display":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def watch(self, states: list[CellState]) -> None:
        """Show how far the cells have come."""
        left = self.estimator(states)
        counts = Counter(state.state for state in states)
        others = (f", {counts['failed']} failed" if counts["failed"] else "") + (
            f", about {_time(left.wall)} left"
        )
        running = f"{counts['running']} running"
        line = f"{counts['finished']}/{len(states)} finished, {running}{others}"
        finished = {state.task.name for state in states if state.state == "finished"}
        if self.ended is None:
            self.ended = finished
            if not self.console.is_terminal:
                self.say(line)
        new = [s for s in states if s.task.name in finished - self.ended]
        known, self.ended = len(finished) - len(new), finished
        for number, state in enumerate(new, 1):
            loss = "no loss" if state.loss is None else f"loss {state.loss:.4f}"
            done = f"{known + number}/{len(states)} finished{others}"
            self.say(f"{state.task.name}: {loss}, {_time(state.seconds or 0)}; {done}")
        if self.console.is_terminal:
            self.live.update(Group(_running(states), Text(), _summary(states), Text(line)))


def _running(states: list[CellState]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("running", "corpus", "step", "loss"):
        table.add_column(heading, justify="left" if heading in ("running", "corpus") else "right")
    cells = [state for state in states if state.state == "running"]
    for state in cells[:_MOST_RUNNING]:
        config = state.task.config
        loss = "" if state.loss is None else f"{state.loss:.3f}"
        step = f"{state.step}/{config.steps}"
        table.add_row(state.task.name, Path(config.data).name, step, loss)
    if len(cells) > _MOST_RUNNING:
        table.add_row(f"and {len(cells) - _MOST_RUNNING} more")
    return table


def _summary(states: list[CellState]) -> Table:
    """Mean loss so far over the seeds of each method and corpus, a column a depth.

    Where a suite moves along an axis of its own, a row is also of one place on it.
    """
    losses: dict[tuple[str, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    depths = sorted({state.task.config.model.num_layers for state in states})
    axes = _axes(states)
    for state in states:
        config = state.task.config
        places = [f"{value(config):g}" for value in axes.values()]
        row = losses[Path(config.data).name, experiments.series_label(config), *places]
        if state.state == "finished" and state.loss is not None:
            row[config.model.num_layers].append(state.loss)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("corpus")
    table.add_column("method")
    for axis in axes:
        table.add_column(axis, justify="right")
    for depth in depths:
        table.add_column(f"{depth} layers", justify="right")
    for names, by_depth in losses.items():
        cells = [
            f"{sum(v) / len(v):.4f} (n={len(v)})" if (v := by_depth[depth]) else "-"
            for depth in depths
        ]
        table.add_row(*names, *cells)
    return table


def _axes(states: list[CellState]) -> dict[str, Callable[[TrainConfig], float]]:
    """What differs among cells of one method, corpus, depth and seed, besides its blocks."""
    known: dict[str, Callable[[TrainConfig], float]] = {
        "rate": lambda config: config.learning_rate,
        "width": lambda config: config.model.dim,
        "steps": lambda config: config.steps,
        "blocks": lambda config: getattr(config.model.residual, "num_blocks", None) or 0,
    }
    found: dict[str, dict[object, set[float]]] = {name: defaultdict(set) for name in known}
    for state in states:
        config = state.task.config
        key = (config.data, experiments.series_label(config), config.model.num_layers, config.seed)
        for name, value in known.items():
            found[name][key].add(value(config))
    return {
        name: value
        for name, value in known.items()
        if any(len(places) > 1 for places in found[name].values())
    }
