"""Loading a trained model from a run or a checkpoint."""

from pathlib import Path

from resroute.config import UserError
from resroute.data import Tokenizer
from resroute.model import GPT, outline
from resroute.training import checkpoint
from resroute.training.config import TrainConfig
from resroute.training.tensors import REMEDY, require_shapes


def load(
    path: str | Path, *, best: bool = False, ema: bool = False
) -> tuple[GPT, Tokenizer, TrainConfig]:
    """Load a model from a run folder (its newest checkpoint) or from a checkpoint folder.

    Args:
        path: A run folder of `resroute train`, or a checkpoint folder in it.
        best: Of a run, take the kept checkpoint of least validation loss instead of the newest.
        ema: Take the average of the weights, of a run with `ema_decay`.

    Returns:
        The model on the CPU in evaluation mode, its tokenizer, and the run's configuration.

    Raises:
        UserError: No complete checkpoint there, a damaged one, one without an average, or none that
            was evaluated where the best is asked for.
    """
    saved = checkpoint.open_checkpoint(checkpoint_folder(Path(path), best=best))
    if ema and saved.config.ema_decay is None:
        raise UserError(f"{saved.path} has no average of weights; train with ema_decay")
    group = "ema" if ema else "model"
    saved.check([group])
    model = _outline(saved, group)
    model.to_empty(device="cpu")
    # in float32, whatever the caller's default
    model.float()
    saved.read({group: dict(model.state_dict())})
    return model.eval(), saved.tokenizer, saved.config


def _outline(saved: checkpoint.Saved, group: str) -> GPT:
    """The model without its numbers, once the files are seen to have its tensors.

    The configuration comes from a file too: a model as deep as it says may take long to build, and
    one as wide more memory than there is.
    """
    shapes, layers = saved.shapes(group), saved.config.model.num_layers
    if len(shapes) < layers:
        raise UserError(
            f"{saved.place(group)} has {len(shapes)} tensors, too few for {layers} layers; {REMEDY}"
        )
    model = outline(saved.config.model)
    require_shapes(saved.place(group), shapes, model.state_dict())
    return model


def checkpoint_folder(path: Path, *, best: bool = False) -> Path:
    """The checkpoint that `load` takes: a folder itself, or a run's newest or best one."""
    if (path / "state.json").exists():
        return path
    below = path / "checkpoints"
    newest = checkpoint.newest(below)
    if newest is None:
        what = "has no complete checkpoint" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; name a run folder of `resroute train`")
    folder = checkpoint.best(below) if best else newest
    if folder is None:
        raise UserError(
            f"{path}: none of its checkpoints was evaluated, so that none is the best\n"
            "leave out best, or train with checkpoint_every a multiple of evaluate_every"
        )
    return folder
