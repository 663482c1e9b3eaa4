"""A trained run, looked at: its weights, its text, its log and its earlier checkpoints."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from resroute.config import UserError
from resroute.data import END_OF_TEXT, Tokenizer, evaluation_windows, vocabulary_difference
from resroute.data.sources import corpus_of
from resroute.experiments.importance import By
from resroute.experiments.inspect.inspection import (
    Inspection,
    Progress,
    Table,
    Windows,
    inspect_model,
)
from resroute.experiments.inspect.prompt import shown_ids
from resroute.files import read_json_lines
from resroute.model import GPT
from resroute.residual import capture
from resroute.training import TrainConfig, load
from resroute.training.checkpoint import candidates, open_checkpoint
from resroute.training.load import checkpoint_folder
from resroute.training.metrics import finite

LEAST_WINDOWS, USUAL_TOKENS = 4, 4096
"""Windows that are looked at unless told otherwise: as many as have so many tokens."""
# windows of a look at an earlier checkpoint
_FEW = 4


def inspect_run(
    path: str | Path,
    *,
    data: str | None = None,
    windows: int | None = None,
    by: Sequence[By] | None = None,
    prompt: str | None = None,
    best: bool = False,
    ema: bool = False,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Inspection:
    """Look at a trained model on windows of text that it was not trained on.

    Args:
        path: A run folder, or a checkpoint in it.
        data: A corpus or text file; the run's own unless given. Its validation split is used.
        windows: How many; by default as many as have 4,096 tokens, and at least 4.
        by: What is left out in turn to see what the loss needs; see `inspect_model`.
        prompt: A text to show token by token; the first window's start unless given.
        best: Take the weights of least validation loss.
        ema: Take the averaged weights.
        device: Where to compute.
        progress: Told what is going on.

    Raises:
        UserError: No model there, a text that is gone, or one that the model's tokenizer does not
            know.
    """
    folder = checkpoint_folder(Path(path), best=best)
    try:
        model, tokenizer, config = _loaded(folder, ema=ema)
    except UserError:
        # a run that is still in training may have written a newer one and dropped this
        newer = checkpoint_folder(Path(path), best=best)
        if newer == folder:
            raise
        folder = newer
        model, tokenizer, config = _loaded(folder, ema=ema)
    if folder.parent.name != "checkpoints":
        # one may stand in the folder, or name it by a link
        place = folder.resolve()
        folder = place if place.parent.name == "checkpoints" else folder
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    context = config.model.context
    if prompt is not None:
        # what cannot be read is said before minutes of work
        shown_ids(tokenizer, prompt)
    count = windows or max(LEAST_WINDOWS, USUAL_TOKENS // context)
    name, found = _windows_of(data or config.data, tokenizer, context, count)
    step = open_checkpoint(folder).progress.step
    records = _records(run / "metrics.jsonl", step)
    tell = progress or (lambda what, done, total: None)
    earlier = _past(folder, found[0][:_FEW], ema=ema, device=device, tell=tell)
    return inspect_model(
        model.to(device),
        found,
        name=run.resolve().name,
        label=config.model.residual.label,
        corpus=name,
        step=step,
        seed=config.seed,
        tokenizer=tokenizer,
        by=by,
        prompt=prompt,
        past=dict(earlier),
        records=records,
        progress=tell,
    )


def _past(
    folder: Path, inputs: torch.Tensor, *, ema: bool, device: torch.device | str, tell: Progress
) -> Iterator[tuple[int, Table]]:
    """Depth weights of the checkpoints beside and before one, without those that are damaged."""
    beside = candidates(folder.parent) if folder.parent.name == "checkpoints" else []
    earlier = beside[beside.index(folder) + 1 :] if folder in beside else []
    for done, path in enumerate(reversed(earlier)):
        tell("earlier checkpoints", done, len(earlier))
        try:
            model, _, _ = _loaded(path, ema=ema)
        except UserError:
            continue
        with capture(model.to(device)) as seen, torch.no_grad():
            model(inputs.to(device))
        table = seen.table()
        if table is not None:
            yield open_checkpoint(path).progress.step, finite(table)


def _records(path: Path, step: int) -> list[dict[str, Any]]:
    """Lines of metrics, without those that came after a step; of one told twice, the later."""
    if not path.is_file():
        return []
    found: dict[Any, dict[str, Any]] = {}
    for where, record in read_json_lines(path, "inspect a copy without it", may_be_torn=True):
        kind, at = record.get("kind"), record.get("step")
        if type(kind) is not str or type(at) is not int:
            raise UserError(f"{where}: names no kind or step; inspect a copy without it")
        if at <= step:
            found[kind, at] = record
    return list(found.values())


def _loaded(folder: Path, *, ema: bool) -> tuple[GPT, Tokenizer, TrainConfig]:
    with warnings.catch_warnings():
        # notes on the model's shape were for its training
        warnings.simplefilter("ignore")
        return load(folder, ema=ema)


def _windows_of(source: str, tokenizer: Tokenizer, context: int, count: int) -> tuple[str, Windows]:
    """The text's name, and windows of it: of a corpus's validation split, or of a text file."""
    path = Path(source)
    if path.is_file():
        return path.stem, _windows_of_text(path, tokenizer, context, count)
    try:
        corpus = corpus_of(source)
    except UserError as error:
        raise UserError(f"{error}\nname a corpus or text with --data") from None
    if corpus.tokenizer != tokenizer:
        difference = vocabulary_difference(tokenizer, corpus.tokenizer)
        raise UserError(
            f"{source}: not the model's vocabulary: {difference}\nname the corpus that it was "
            "trained on, or a text file, which is read with the model's own"
        )
    found = evaluation_windows(corpus, "val", context=context, max_windows=count)
    return corpus.name, (found.inputs, found.targets)


def _readable(tokenizer: Tokenizer, text: str) -> str:
    """A text without the line break that ends it, where the vocabulary has none."""
    try:
        tokenizer.encode("\n")
    except UserError:
        return text.removesuffix("\n").removesuffix("\r")
    return text


def _windows_of_text(path: Path, tokenizer: Tokenizer, context: int, count: int) -> Windows:
    """Windows from the start of a text, one after the other."""
    try:
        # tokens of words have about four characters
        with path.open(encoding="utf-8", newline="") as file:
            text = _without_half_an_end(file.read(8 * (count * context + 1)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"{path}: cannot be read as text ({reason})") from None
    try:
        ids = torch.tensor([int(i) for i in tokenizer.encode(_readable(tokenizer, text))])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    rows = min(count, (len(ids) - 1) // context)
    if rows < 1:
        raise UserError(
            f"{path}: {len(ids)} tokens, too few for a window of context {context} and its "
            "targets\nname a longer text"
        )
    inputs, targets = (ids[k : k + rows * context].view(rows, context) for k in (0, 1))
    return inputs, targets


def _without_half_an_end(text: str) -> str:
    """A text that was cut where it was long enough, without part of an `<|endoftext|>`."""
    start = text.rfind(END_OF_TEXT[0], 1 - len(END_OF_TEXT))
    return text[:start] if start >= 0 and END_OF_TEXT.startswith(text[start:]) else text
