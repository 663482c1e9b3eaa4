"""Loading a trained model from a run or a checkpoint."""

from pathlib import Path

import torch

from resroute.config import UserError
from resroute.data import Tokenizer
from resroute.model import GPT
from resroute.training import checkpoint
from resroute.training.config import TrainConfig


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
        UserError: No complete checkpoint there, a damaged one, or one without an average.
    """
    saved = checkpoint.open_checkpoint(_folder(Path(path), best=best))
    if ema and saved.config.ema_decay is None:
        raise UserError(f"{saved.path} has no average of weights; train with ema_decay")
    with torch.device("meta"):
        model = GPT(saved.config.model)
    model.to_empty(device="cpu")
    # in float32, whatever the caller's default
    model.float()
    saved.read({"ema" if ema else "model": dict(model.state_dict())})
    return model.eval(), saved.tokenizer, saved.config


def _folder(path: Path, *, best: bool) -> Path:
    if (path / "state.json").exists():
        return path
    below = path / "checkpoints"
    newest = next(iter(checkpoint.candidates(below)), None)
    folder = checkpoint.best(below) or newest if best else newest
    if folder is None:
        what = "has no complete checkpoint" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; name a run folder of `resroute train`")
    return folder
