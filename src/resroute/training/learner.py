"""A model, its optimizer and the average of its weights: steps, evaluations, and their state."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from resroute.data import Corpus, EvaluationSet, Mixture, parts_of, training_batch
from resroute.residual.capture import Capture, capture
from resroute.residual.observe import Observation, observe
from resroute.training.config import TrainConfig
from resroute.training.distributed import Spread, World, local_parts
from resroute.training.ema import Average
from resroute.training.optim import make_optimizer
from resroute.training.tensors import Group, Groups

OBSERVED_TOKENS = 256
"""Most tokens of the window on which a look at the routing is taken."""


@dataclass(frozen=True)
class Step:
    """What a step did.

    Attributes:
        loss: Mean over all counted targets of the step, before it.
        grad_norm: Before it was clipped.
    """

    loss: float
    grad_norm: float


class Learner:
    """The part of a run that computes; the same calls in the same order on every process."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus | Mixture,
        world: World,
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.world = world
        self.device = device
        self.precision = precision
        torch.manual_seed(config.seed)
        self.spread = Spread(config.model, world, device, config.parallel, precision)
        self.model = self.spread.model
        self.model.activation_checkpointing = config.activation_checkpointing
        self.optimizer = make_optimizer(self.model, config)
        self._start_optimizer()
        self.average = None if config.ema_decay is None else Average(self.model, config.ema_decay)

    def gradients(self, step: int) -> Step:
        """Compute the clipped gradients of a step; `update` follows them."""
        config, world = self.config, self.world
        self._seed(step)
        rows = config.batch_size // world.size
        inputs, targets = training_batch(
            self.corpus,
            context=config.model.context,
            batch_size=config.batch_size,
            seed=config.seed,
            step=step,
            rows=slice(world.rank * rows, (world.rank + 1) * rows),
            order=config.order,
        )
        (counted,) = world.total(float(_counted(targets)))
        self.model.train()
        losses, shares = [], []
        parts = list(
            zip(inputs.chunk(config.accumulation), targets.chunk(config.accumulation), strict=True)
        )
        for number, (part_inputs, part_targets) in enumerate(parts, start=1):
            with self.spread.accumulating(is_last=number == len(parts)):
                count = _counted(part_targets)
                # a micro-batch without a target that counts has no mean; it adds nothing
                share = count / counted
                loss = self._loss(part_inputs, part_targets) if count else None
                if loss is None:
                    loss = self._loss(part_inputs, part_targets.clamp_min(0)) * 0.0
                # processes' gradients are averaged: their number makes it a sum
                (loss * (share * world.size)).backward()
                losses.append(loss.detach())
                shares.append(share)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        # the device is waited for once a step, and what has no float64 (MPS) is asked for none
        *found, length = torch.stack([*losses, _plain(norm)]).tolist()
        (total,) = world.total(sum(loss * share for loss, share in zip(found, shares, strict=True)))
        return Step(total, length)

    def update(self, rate: float) -> None:
        """Move the weights by the gradients that are there, and drop these."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()

    @torch.no_grad()
    def evaluate(
        self, evaluation: EvaluationSet, should_stop: Callable[[], bool], *, averaged: bool = False
    ) -> float | None:
        """Mean loss of all counted targets, the windows shared among processes.

        Args:
            evaluation: The windows.
            should_stop: Asked after every batch; all processes get the same answer.
            averaged: Evaluate the average of the weights.

        Returns:
            The loss; None where it was stopped.
        """
        world = self.world
        self.model.eval()
        size = max(1, self.config.batch_size // (self.config.accumulation * world.size))
        batches = list(
            zip(evaluation.inputs.split(size), evaluation.targets.split(size), strict=True)
        )
        total, counted = 0.0, 0
        with ExitStack() as stack:
            if averaged:
                assert self.average is not None
                stack.enter_context(self.average.in_place())
            # a last time all run, whether or not a batch is left: sharded models need every process
            for first in range(0, len(batches), world.size):
                index = first + world.rank
                inputs, targets = batches[index if index < len(batches) else 0]
                loss = self._loss(inputs, targets)
                if index < len(batches):
                    count = _counted(targets)
                    total += loss.item() * count
                    counted += count
                if should_stop():
                    self.spread.settle()
                    return None
            self.spread.settle()
        total, count_all = world.total(total, float(counted))
        return total / count_all

    @torch.no_grad()
    def observe(self, step: int) -> Observation:
        """Look at the routing on the first window of a step's batch."""
        inputs, _ = training_batch(
            self.corpus,
            context=self.config.model.context,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            step=step,
            rows=slice(0, 1),
            order=self.config.order,
        )
        window = inputs[:, :OBSERVED_TOKENS].to(self.device)
        self.model.eval()
        with self._autocast():
            found = observe(self.model.policy, lambda: self.model(window))
        self.spread.settle()
        return found

    @torch.no_grad()
    def capture(self, inputs: Tensor, targets: Tensor) -> Capture:
        """Look closely at the routing on some windows, without what fills them up."""
        self.model.eval()
        with capture(self.model) as found, self._autocast():
            for part, _ in parts_of(inputs, targets, len(inputs)):
                self.model(part.to(self.device))
        self.spread.settle()
        return found

    def is_finite(self) -> bool:
        """Whether all weights are finite, on every process."""
        shares = local_parts([parameter.detach() for parameter in self.model.parameters()])
        is_bad = any(not bool(share.isfinite().all()) for share in shares)
        return not self.world.total(float(is_bad))[0]

    def state(self) -> Groups:
        """The tensors of a checkpoint, by group and name; writing into them restores it."""
        groups: Groups = {"model": dict(self.model.state_dict()), "optimizer": self._moments()}
        if self.average is not None:
            groups["ema"] = self.average.state()
        return groups

    def _moments(self) -> Group:
        """State of the optimizer, by `<parameter>|<field>`."""
        tensors = {}
        for group in self.optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                for field, value in self.optimizer.state[parameter].items():
                    tensors[f"{name}|{field}"] = value
        return tensors

    def _start_optimizer(self) -> None:
        """Give AdamW the state of zeros that its first step would make, so that it can be read."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=self.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with self._autocast():
            loss: Tensor = self.spread.forward(inputs, targets)[1]
        return loss

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16
        )

    def _seed(self, step: int) -> None:
        """Seed what dropout draws from: a function of seed, step and process, so that no state
        of a random generator needs to be kept.
        """
        words = np.random.SeedSequence([self.config.seed, step, self.world.rank])
        torch.manual_seed(int(words.generate_state(1, np.uint64)[0]))


def _counted(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def _plain(norm: Tensor) -> Tensor:
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return full
