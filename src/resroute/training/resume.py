"""Going on: which checkpoint is good, and putting it back."""

from pathlib import Path
from typing import Any

from resroute.config import UserError
from resroute.data import Corpus, Mixture, vocabulary_difference
from resroute.files import set_aside
from resroute.training import checkpoint
from resroute.training.config import TrainConfig
from resroute.training.distributed import World
from resroute.training.learner import Learner
from resroute.training.metrics import Listener
from resroute.training.run import RunFolder


def resume_from(
    run: RunFolder,
    learner: Learner,
    config: TrainConfig,
    corpus: Corpus | Mixture,
    numerics: dict[str, Any],
    world: World,
    listener: Listener,
) -> checkpoint.Progress | None:
    """Put the newest good checkpoint of a run into a learner.

    Damaged ones are told of, and kept under another name.

    Returns:
        How far it is; None where the run has no checkpoint.

    Raises:
        UserError: No checkpoint is good, the newest good one has another vocabulary, or a
            deterministic run would go on with other bits.
    """
    paths = world.from_main(lambda: checkpoint.candidates(run.checkpoints))
    damaged: list[Path] = []
    problem = ""
    for path in paths:
        try:
            saved = _read(path, learner, world)
        except UserError as error:
            problem = str(error)
            if path != paths[-1]:
                listener.message(f"{problem}: going back")
            damaged.append(path)
            continue
        if saved.progress.step > config.steps:
            raise UserError(f"{path} is of a longer run than {config.steps} steps")
        if saved.tokenizer != corpus.tokenizer:
            raise UserError(
                f"{path} has another vocabulary than {config.data}: "
                f"{vocabulary_difference(saved.tokenizer, corpus.tokenizer)}"
            )
        _require_same_numerics(path, saved.progress.numerics, numerics, config)
        if world.is_main:
            for bad in damaged:
                listener.message(f"kept as {set_aside(bad, 'damaged')}")
        listener.message(f"resumed from {path}")
        return saved.progress
    if paths:
        raise UserError(f"{run.path}: none of its {len(paths)} checkpoints can be used\n{problem}")
    left = world.from_main(lambda: [path.name for path in checkpoint.named(run.checkpoints)])
    if left:
        raise UserError(
            f"{run.path}: none of its checkpoints is whole ({', '.join(reversed(left))})\n"
            "put one back, or start over with --fresh"
        )
    if world.is_main and run.metrics.read():
        listener.message("no checkpoint yet: starting from step 0")
    return None


def _read(path: Path, learner: Learner, world: World) -> checkpoint.Saved:
    """Read a checkpoint on every process, or on none."""

    def opened() -> checkpoint.Saved:
        saved = checkpoint.open_checkpoint(path)
        # one process checks every byte for all
        if world.is_main:
            saved.check(saved.groups)
        return saved

    saved = world.together(opened)
    saved.read(learner.state(), world)
    return saved


def _require_same_numerics(
    path: Path, theirs: dict[str, Any], ours: dict[str, Any], config: TrainConfig
) -> None:
    if not config.deterministic:
        return
    named = [
        f"{name} ({theirs.get(name, 'unknown')} there, {ours[name]} here)"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    if named:
        raise UserError(
            f"{path}: a deterministic run cannot go on to the bit, since it differs in "
            f"{', '.join(named[:3])}\nleave out --deterministic to go on all the same"
        )
