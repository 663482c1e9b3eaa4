"""Training: the loop, its optimizer, checkpoints, several processes, and run folders."""

from resroute.training.config import TrainConfig as TrainConfig
from resroute.training.launch import train as train
from resroute.training.load import load as load
from resroute.training.metrics import Listener as Listener
from resroute.training.metrics import RunStart as RunStart
from resroute.training.preemption import Preempted as Preempted

__all__ = ["Listener", "Preempted", "RunStart", "TrainConfig", "load", "train"]
