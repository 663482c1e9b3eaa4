"""What each command does: options in, library calls, results on stdout."""

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resroute import analysis, data, experiments, training
from resroute.cli.display import Display, byte_progress, printable
from resroute.cli.signals import cleaning_up
from resroute.config import UserError, from_dict, suggestion, variants, with_overrides
from resroute.data import Corpus
from resroute.data.sources import STORYWORLD, corpus_of
from resroute.model import PRESETS
from resroute.residual import HAARES, ResidualConfig
from resroute.training.device import choose_device
from resroute.training.distributed import join
from resroute.training.track import TRACKERS, Listeners

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

METHODS: dict[str, Callable[..., ResidualConfig]] = {
    **{name.replace("_", "-"): method for name, method in variants(ResidualConfig).items()},
    "haares": HAARES,
}
"""Methods by the name that `--method` takes."""


def demo(options: argparse.Namespace) -> None:
    """Train the three methods and print how they compare."""
    corpus = corpus_named(options.data, clean=options.clean)
    is_default = options.data == STORYWORLD
    out = Path(options.out or ("runs/demo" if is_default else f"runs/demo-{corpus.name}"))
    configs = experiments.demo_configs(
        corpus, out, num_layers=options.layers, steps=options.steps, seed=options.seed
    )
    with Display() as display:
        runs, files = experiments.demo(corpus, out, configs, fresh=options.fresh, listener=display)
    console = terminal()
    console.print()
    _print_table(console, runs)
    for run in runs:
        console.print(f"\n[bold]{run.label}[/bold] writes:", highlight=False)
        console.print((run.sample or "").strip(), markup=False, highlight=False)
    print_files(files)


def prepare(options: argparse.Namespace) -> None:
    """Make a corpus folder and print what is in it."""
    with cleaning_up():
        if options.source == STORYWORLD:
            corpus = _prepare_storyworld(options)
        elif options.source in data.PUBLISHED:
            corpus = _prepare_published(options)
        else:
            corpus = _prepare_file(options)
    _print_corpus(corpus)


def _prepare_storyworld(options: argparse.Namespace) -> Corpus:
    _require_unused(
        options, "clean", "repair", "wikipedia", "separator", "tokens", "unknown", "from"
    )
    knobs = _given(options, *_KNOBS)
    sizes = _given(options, "seed", "characters")
    name = "-".join([STORYWORLD, *(f"{key}{value}" for key, value in {**sizes, **knobs}.items())])
    return data.prepare_storyworld(
        Path(options.out or f"data/{name}"), **sizes, story=data.StoryConfig(**knobs)
    )


def _prepare_published(options: argparse.Namespace) -> Corpus:
    _require_unused(options, "repair", "wikipedia", "separator", *_STORY)
    name = options.source
    with byte_progress(name) as progress:
        if options.from_ is None:
            files = data.fetch(name, Path("data/downloads"), progress)
        else:
            files = data.local(name, Path(options.from_))
    print(files.corpus.licence, file=sys.stderr)
    tokens = _tokens(options.tokens)
    with byte_progress(name) as progress:
        return data.prepare_published(
            files,
            Path(options.out or f"data/{name}{_suffix(options)}"),
            clean=options.clean,
            tokens=tokens,
            unknown=options.unknown or "error",
            processes=options.processes,
            progress=progress,
        )


def _prepare_file(options: argparse.Namespace) -> Corpus:
    _require_unused(options, "from", *_STORY)
    source = Path(options.source)
    stem = source.name.split(".")[0] if source.name.split(".")[0] else source.stem
    tokens = _tokens(options.tokens)
    with byte_progress(source.name) as progress:
        return data.prepare_text(
            source,
            Path(options.out or f"data/{stem}{_suffix(options)}"),
            separator=options.separator or "auto",
            clean=options.clean,
            repair=options.repair,
            wikipedia=options.wikipedia,
            tokens=tokens,
            unknown=options.unknown or "error",
            processes=options.processes,
            progress=progress,
        )


_KNOBS = ("length", "entities", "distance", "held_out")
_STORY = ("seed", "characters", *_KNOBS)


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: vars(options)[name] for name in names if vars(options)[name] is not None}


def _require_unused(options: argparse.Namespace, *names: str) -> None:
    """Refuse options that belong to another kind of source."""
    for name in names:
        if vars(options).get("from_" if name == "from" else name):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} has no use for {options.source}: leave it out")


def _suffix(options: argparse.Namespace) -> str:
    """Of a default folder's name, so that other tokens or documents make another corpus."""
    usual = {"tokens": "characters", "separator": "auto", "unknown": "error"}
    given = _given(options, *usual)
    words = [Path(word).stem for name, word in given.items() if word != usual[name]]
    return "".join(f"-{word}" for word in [*words, *["repair"] * options.repair])


def _tokens(text: str | None) -> data.Tokens:
    """What `--tokens` means: characters, a number of BPE tokens, a tokenizer.json, a corpus."""
    if text is None or text == "characters":
        return "characters"
    if text.isascii() and text.isdigit():
        return int(text)
    path = Path(text)
    if path.is_dir():
        return data.open_corpus(path).tokenizer
    return data.SubwordTokenizer.from_file(path)


def describe(options: argparse.Namespace) -> None:
    """Print what is in a text file or a corpus."""
    path = Path(options.path)
    with byte_progress(path.name) as progress:
        found = data.describe(path, max_order=options.order, progress=progress)
    print("\n".join(printable(line) for line in data.render(found)))


def facts(options: argparse.Namespace) -> None:
    """Print whether a model gets the facts of stories right."""
    device = choose_device(options.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tokenizer, config = training.load(options.run_folder, best=options.best)
    story = data.StoryConfig()
    if Path(config.data).is_dir():
        source = data.open_corpus(Path(config.data)).meta.source
        story = from_dict(data.StoryConfig, source.get("story", {}), where=f"{config.data}: story")
    story = dataclasses.replace(story, **_given(options, *_KNOBS))
    if not isinstance(tokenizer, data.CharTokenizer):
        raise UserError(f"{options.run_folder}: stories are told to models of characters alone")
    scores = experiments.score_facts(
        model.to(device),
        tokenizer,
        story,
        seed=options.seed,
        stories=options.stories,
        device=device,
    )
    print("\n".join(experiments.fact_lines(scores)))


def train(options: argparse.Namespace) -> None:
    """Train one model, on the processes that `torchrun` has started."""
    if options.resume and options.fresh:
        raise UserError("--resume goes on and --fresh starts over: give one of them")
    residual = residual_of(options.method, options.blocks)
    with join(options.device) as world:
        # made by one process for all
        path = world.from_main(lambda: corpus_named(options.data, clean=options.clean).path)
        corpus = world.together(lambda: data.open_corpus(path))
        model = PRESETS[options.preset](
            options.layers,
            vocab_size=corpus.tokenizer.vocab_size,
            context=options.context,
            residual=residual,
        )
        config = training.TrainConfig(
            model=model,
            data=str(corpus.path),
            out=options.out,
            steps=options.steps,
            batch_size=options.batch,
            learning_rate=options.lr,
            warmup_steps=min(50, options.steps // 10),
            seed=options.seed,
            precision=options.precision,
            device=options.device,
            deterministic=options.deterministic,
        )
        config = with_overrides(config, overrides(options.set))
        trackers = [TRACKERS[name]() for name in dict.fromkeys(options.track)]
        with Display() as display:
            summary = training.train(
                config,
                resume=options.resume,
                fresh=options.fresh,
                listener=Listeners(display, *trackers),
            )
        if not world.is_main:
            return
    _print_table(terminal(), [analysis.read_run(Path(summary["path"]))])
    print(f"\n{summary['path']}")


def sample(options: argparse.Namespace) -> None:
    """Print continuations of a prompt, one as it is drawn, several one after the other."""
    device = choose_device(options.device)
    with warnings.catch_warnings():
        # notes on the model's shape were for its training
        warnings.simplefilter("ignore")
        model, tokenizer, _ = training.load(options.run_folder, best=options.best, ema=options.ema)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def run(on_text: Callable[[str], None] | None) -> list[str]:
        return experiments.sample(
            model.to(device),
            tokenizer,
            prompt=options.prompt,
            count=options.count,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop=options.stop,
            seed=options.seed,
            on_text=on_text,
        )

    if options.count == 1:
        # the prompt is echoed with the first new text, when nothing can be wrong any more
        waiting = [options.prompt]

        def continue_text(text: str) -> None:
            write(waiting.pop() + text if waiting else text)

        run(continue_text)
        print(*waiting)
        return
    for number, text in enumerate(run(None), start=1):
        print(f"--- {number}\n{text}")


def report(options: argparse.Namespace) -> None:
    """Print the table of the runs below a folder, or of a results folder, and write the report."""
    folder = Path(options.folder)
    runs, plan = experiments.runs_of(folder), experiments.read_plan(folder)
    finished = {run.name for run in runs}
    planned = [name for name in plan.runs if name not in finished] if plan else []
    unfinished = list(dict.fromkeys([*planned, *analysis.unfinished_runs(folder)]))
    if not runs and not unfinished:
        raise UserError(f"{folder}: no run in this folder; `resroute train` makes one")
    made = experiments.make_report(
        runs,
        title=options.title or f"resroute: {folder.resolve().name}",
        plan=plan,
        unfinished=unfinished,
    )
    files: list[Path] | UserError
    try:
        # before anything is printed: whoever reads that may go away
        files = experiments.save_report(made, runs, Path(options.out or folder), plan)
    except UserError as error:
        files = error
    console = terminal()
    if made.has_groups:
        table = experiments.groups_table(made.study, is_short=True)
        print_plain(console, experiments.terminal_table(table, bold=console.is_terminal))
    else:
        _print_table(console, runs)
    for line in [*made.findings, *made.notes, "\n".join(made.health)]:
        if line:
            print(f"\n{printable(line)}")
    if isinstance(files, UserError):
        raise files
    print_files(files)


def residual_of(method: str, blocks: int | None) -> ResidualConfig:
    """The method of a name that `METHODS` has, with its number of blocks."""
    name = method.lower().replace("_", "-")
    if name not in METHODS:
        raise UserError(
            f"unknown method {method!r}{suggestion(name, METHODS)}; known: {', '.join(METHODS)}"
        )
    make = METHODS[name]
    if blocks is None:
        return make()
    try:
        return make(num_blocks=blocks)
    except TypeError as error:
        raise UserError(f"the method {name} has no blocks; leave out --blocks") from error


def overrides(settings: list[str]) -> dict[str, str]:
    """Fields by name, as `--set` gives them."""
    found = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key.isprintable() and key and equals):
            raise UserError(f"--set {setting!r}: needs KEY=VALUE, such as residual.rho_max=1")
        if key.removeprefix("model.") in ("residual", "residual.type"):
            raise UserError(f"--set {key}: the method is chosen with --method")
        # the method is what people set most
        found[f"model.{key}" if key.startswith("residual.") else key] = value
    return found


def corpus_named(source: str, *, clean: bool = False) -> Corpus:
    """The corpus of a name, prepared with a progress bar where it is new."""
    with cleaning_up(), byte_progress(Path(source).name) as progress:
        return corpus_of(source, clean=clean, progress=progress)


def _print_corpus(corpus: Corpus) -> None:
    symbols = corpus.tokenizer.vocab_size
    print(f"{corpus.path}: {symbols} symbols, separator {corpus.meta.separator}")
    for split in data.SPLITS:
        size = corpus.split(split)
        noun = "document" if size.documents == 1 else "documents"
        print(f"  {split:5} {size.tokens:>13,} tokens in {size.documents:,} {noun}")
    cleaned: dict[str, Any] = corpus.meta.source.get("cleaned", {})
    changed = [f"{count:,} {what.replace('_', ' ')}" for what, count in cleaned.items() if count]
    if changed:
        print(f"  cleaned: {', '.join(changed)}")
    if copies := corpus.meta.source.get("document_copies"):
        what = "document is a copy" if copies == 1 else "documents are copies"
        compared = corpus.meta.source.get("compared_documents")
        extent = f" (of the first {compared:,})" if compared else ""
        print(f"  {copies:,} {what} of an earlier one{extent}")
    if unknown := corpus.meta.source.get("unknown_characters"):
        what = (
            "spelled as bytes" if getattr(corpus.tokenizer, "unknown", "") == "byte" else "left out"
        )
        print(f"  {what}: {unknown:,} characters outside the vocabulary")


def _print_table(console: "Console", runs: list[analysis.Run]) -> None:
    print_plain(console, analysis.comparison_table(runs, bold=console.is_terminal))


def print_plain(console: "Console", table: "Table") -> None:
    """A table, without the spaces that rich fills its lines with where nobody watches."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_files(files: list[Path]) -> None:
    """Print what was written; of what lies deeper, the folder."""
    folder = files[0].parent
    shown = [str(p) if p.parent == folder else f"{p.parent}/" for p in files]
    print("\nwrote " + "\n      ".join(dict.fromkeys(shown)))


def terminal() -> "Console":
    """Where tables are printed."""
    from rich.console import Console

    # tables need room where nobody watches; a terminal has its own width
    return Console(width=None if sys.stdout.isatty() else 100, soft_wrap=False)
