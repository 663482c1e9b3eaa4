"""An inspection as files: the page, its figures, and all numbers."""

import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from resroute.analysis.figures import styled
from resroute.config import UserError
from resroute.experiments.inspect.data import shortened
from resroute.experiments.inspect.figures import images
from resroute.experiments.inspect.inspection import FORMAT_VERSION, Inspection
from resroute.experiments.inspect.page import HEADINGS, render_page, run_labels
from resroute.files import write_bytes, write_text

MOST = 2


def save_inspection(
    inspections: Sequence[Inspection], out: Path, *, title: str | None = None
) -> list[Path]:
    """Write a page that needs nothing but itself, figures as PNG and SVG, and the numbers.

    `inspect.html` shows one model, or two beside each other; its script draws the figures, and
    without it they stand there as they are in `figures/`. `inspect.json` has every number, the
    fields of `Inspection` a run. Each file replaces its former version in one step.

    Args:
        inspections: One or two.
        out: The folder to write to, made if missing.
        title: The page's heading.

    Returns:
        The files written, the page first.

    Raises:
        UserError: More than two, matplotlib missing, or `out` not writable.
    """
    if not 1 <= len(inspections) <= MOST:
        raise UserError(f"a page shows one model or two, got {len(inspections)}")
    labels = run_labels(inspections)
    drawn = {kind: dict(images(inspections, labels, kind)) for kind in ("png", "svg")}
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(out, error) from None
    heading = title or f"Inside {' and '.join(dict.fromkeys(one.name for one in inspections))}"
    page = render_page(inspections, heading, drawn["svg"])
    files = [out / "inspect.html"]
    # a title from a command line may hold what UTF-8 cannot
    write_bytes(files[0], page.encode("utf-8", errors="replace"))
    runs = [shortened(dataclasses.asdict(one)) for one in inspections]
    numbers = json.dumps({"format_version": FORMAT_VERSION, "runs": runs}, allow_nan=False)
    write_text(out / "inspect.json", numbers + "\n")
    files.append(out / "inspect.json")
    for name in HEADINGS:
        for kind, found in drawn.items():
            file = out / "figures" / f"{name}.{kind}"
            if name in found:
                write_bytes(file, found[name])
                files.append(file)
            else:
                # of a former page
                file.unlink(missing_ok=True)
    return files


def writable(out: Path) -> None:
    """Look whether a page can be drawn and its folder be made; nothing is made yet.

    Raises:
        UserError: matplotlib is missing, or something is in the folder's way.
    """
    with styled():
        pass
    figures = out / "figures"
    try:
        places = (figures, *figures.parents)
        # a link to nowhere is in the way too
        found = next(place for place in places if place.exists() or place.is_symlink())
        if not found.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(found, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _refusal(out, error) from None


def _refusal(out: Path, error: OSError) -> UserError:
    return UserError(f"{out}: cannot be made ({error.strerror}); choose another folder")
