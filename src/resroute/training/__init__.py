"""Training: the loop, its optimizer, checkpoints and run folders."""

from resroute.training.checkpoint import load as load
from resroute.training.config import TrainConfig as TrainConfig
from resroute.training.metrics import Listener as Listener
from resroute.training.trainer import train as train

__all__ = ["Listener", "TrainConfig", "load", "train"]
