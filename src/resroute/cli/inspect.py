"""The command `inspect`: one model, or two, into a summary and a page."""

import argparse
from pathlib import Path

from resroute.cli.commands import print_files, print_plain, terminal
from resroute.cli.display import printable, task_progress
from resroute.config import UserError, suggestion
from resroute.experiments.importance import BY, By
from resroute.experiments.inspect import (
    Inspection,
    inspect_run,
    run_labels,
    save_inspection,
    setup_line,
    shown_ids,
    summary,
    writable,
)
from resroute.training.checkpoint import open_checkpoint
from resroute.training.device import choose_device
from resroute.training.load import checkpoint_folder


def inspect(options: argparse.Namespace) -> None:
    """Print what a model's router learned, and write the page."""
    by = _what(options.without)
    paths = [Path(path) for path in (options.run_folder, options.against) if path is not None]
    out = Path(options.out) if options.out else _folder(options, paths)
    device = choose_device(options.device)
    # what cannot be read or written is said before minutes of work
    for path in paths:
        saved = open_checkpoint(checkpoint_folder(path, best=options.best))
        if options.prompt is not None:
            shown_ids(saved.tokenizer, options.prompt)
    writable(out)
    found: list[Inspection] = []
    for path in paths:
        with task_progress() as progress:
            found.append(
                inspect_run(
                    path,
                    data=options.data,
                    windows=options.windows,
                    by=by,
                    prompt=options.prompt,
                    best=options.best,
                    ema=options.ema,
                    device=device,
                    progress=progress,
                )
            )
    files = save_inspection(found, out, title=options.title)
    console = terminal()
    for one, label in zip(found, run_labels(found), strict=True):
        if len(found) > 1:
            print(f"\n== {printable(label)}")
        print(f"\n{printable(setup_line(one))}\n")
        for part in summary(one):
            if isinstance(part, str):
                print(f"{printable(part)}\n")
            else:
                print_plain(console, part)
    print_files(files)


def _what(names: list[str] | None) -> list[By] | None:
    """What is to be left out; nothing for `none`."""
    if names is None:
        return None
    if names == ["none"]:
        return []
    known: dict[str, By] = {name: name for name in BY}
    for name in names:
        if name not in known:
            raise UserError(
                f"--without {name}{suggestion(name, known)}; known: none, {', '.join(known)}"
            )
    return [known[name] for name in dict.fromkeys(names)]


def _folder(options: argparse.Namespace, paths: list[Path]) -> Path:
    """Where the page goes: below the run, apart from pages of other weights or of two runs."""
    path = paths[0]
    is_checkpoint = path.resolve().parent.name == "checkpoints"
    run = path.resolve().parent.parent if is_checkpoint else path
    marks = [
        *([path.resolve().name] if is_checkpoint else []),
        *(["best"] if options.best else []),
        *(["ema"] if options.ema else []),
        *(["against", paths[1].resolve().name] if len(paths) > 1 else []),
    ]
    return run / "-".join(["inspect", *marks])
