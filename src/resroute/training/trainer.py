"""The training loop."""

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from resroute import ops
from resroute.config import UserError
from resroute.data import Corpus, EvaluationSet, evaluation_windows, open_corpus, training_batch
from resroute.files import write_json
from resroute.model import GPT
from resroute.residual.diagnostics import depth_map
from resroute.training import checkpoint
from resroute.training.config import TrainConfig
from resroute.training.device import (
    choose_device,
    choose_precision,
    describe_device,
    environment,
    has_cpp_compiler,
    keep_freed_memory,
)
from resroute.training.metrics import Listener, PeakMemory
from resroute.training.optim import learning_rate, make_optimizer
from resroute.training.run import FORMAT_VERSION, RunFolder, claim

# windows whose depth weights are averaged at the end of a run
_DEPTH_WINDOWS = 4


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    fresh: bool = False,
    stop_at: int | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Train a model and write its run folder; a finished run of the same configuration is reused.

    Args:
        config: Everything about the run.
        resume: Go on from the newest checkpoint of an unfinished run; exact on the CPU.
        fresh: Start over; an existing run folder is kept under another name.
        stop_at: Leave the run unfinished after this step, with a checkpoint: for jobs of limited
            time.
        listener: Told what happens.

    Returns:
        The run's summary, with its folder under `path`; it has no `validation_loss` where
        `stop_at` left it unfinished.

    Raises:
        UserError: A configuration that does not fit the corpus, this machine or the run folder,
            or a loss that is no longer finite.
    """
    listener = listener or Listener()
    if stop_at is not None and stop_at < 0:
        raise UserError(f"stop_at must be at least 0, got {stop_at}")
    corpus = open_corpus(Path(config.data))
    if config.model.vocab_size != corpus.tokenizer.vocab_size:
        raise UserError(
            f"the model's vocab_size is {config.model.vocab_size}, but {config.data} has "
            f"{corpus.tokenizer.vocab_size} symbols"
        )
    # before anything is written: may raise
    evaluation = evaluation_windows(
        corpus, context=config.model.context, max_windows=config.evaluation_windows
    )
    training_batch(corpus, context=config.model.context, batch_size=1, seed=config.seed, step=0)
    _require_buildable(config)
    device = choose_device(config.device)
    with ops.backend(config.backend):
        ops.choose(device, torch.float32, config.model.dim)
    run = claim(config, corpus, resume=resume, fresh=fresh)
    if run.moved is not None:
        listener.message(f"the old run is kept as {run.moved}")
    summary = run.summary()
    if summary is not None:
        listener.message(f"{run.path} is finished: reused (--fresh trains again)")
        return {**summary, "path": str(run.path)}
    with ops.backend(config.backend):
        return Trainer(config, corpus, evaluation, run, device, listener).fit(stop_at)


def _require_buildable(config: TrainConfig) -> None:
    """Raise what building the model would raise; its warnings come when it is built."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GPT(config.model)


class Trainer:
    """One run in progress."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        evaluation: EvaluationSet,
        run: RunFolder,
        device: torch.device,
        listener: Listener,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.evaluation = evaluation
        self.run = run
        self.device = device
        self.listener = listener
        self.precision = choose_precision(config.precision, device)
        self.memory = PeakMemory(device)
        keep_freed_memory()
        torch.manual_seed(config.seed)
        self.model = GPT(config.model).to(device)
        self.optimizer = make_optimizer(self.model, config)
        self.step = 0
        self.best: float | None = None
        self.validation_loss: float | None = None
        self.earlier_seconds = 0.0
        self.saved_step = -1
        self.started = time.perf_counter()
        self._resume()
        if config.compile and device.type == "cpu" and not has_cpp_compiler():
            listener.message("no C++ compiler found: sublayers run uncompiled")
        elif config.compile:
            self.model.compile(dynamic=False)

    def fit(self, stop_at: int | None = None) -> dict[str, Any]:
        """Run to the end, or to `stop_at`; write the folder's files; return the summary."""
        config = self.config
        self.run.add_session(self.step, environment(self.device, self.precision))
        routing = ops.choose(self.device, torch.float32, config.model.dim)
        self.listener.message(
            f"{config.model.residual.label}: {config.model.num_layers} layers, "
            f"{self._count():,} parameters, {str(self.precision).removeprefix('torch.')} on "
            f"{describe_device(self.device)}, routing by {routing.backend}"
        )
        # its kernels may have to be built
        ops.prepare(routing.backend)
        end = config.steps if stop_at is None else min(stop_at, config.steps)
        self.listener.begin(
            config.model.residual.label, self.step, config.steps, self.evaluation.floor
        )
        if self.step == 0 and self.validation_loss is None:
            self._evaluate()
        try:
            self._run_to(end)
        except KeyboardInterrupt:
            newest = checkpoint.latest(self.run.checkpoints)
            at = newest.name if newest else "none yet"
            self.listener.message(f"stopped after step {self.step}; newest checkpoint: {at}")
            raise
        self._save()
        if self.step < config.steps:
            return {"path": str(self.run.path), "step": self.step}
        return self._finish()

    def _run_to(self, end: int) -> None:
        """Take steps up to `end`, and report, evaluate and save when it is time."""
        config = self.config
        for record in self._steps(end):
            if self.step % config.log_every == 0 or self.step == config.steps:
                self._report(record)
            if self.step % config.evaluate_every == 0 or self.step == config.steps:
                self._evaluate()
            self.listener.advance(self.step)
            if self.step % config.checkpoint_every == 0 and self.step < end:
                self._save()

    def _steps(self, end: int) -> Iterator[dict[str, Any]]:
        """Take steps up to `end`; yield each one's record."""
        tokens_per_step = self.config.batch_size * self.config.model.context
        while self.step < end:
            began = time.perf_counter()
            rate = learning_rate(self.config, self.step)
            loss, norm = self._train_step(rate)
            self.step += 1
            yield {
                "kind": "train",
                "step": self.step,
                "tokens": self.step * tokens_per_step,
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": norm,
                "tokens_per_second": tokens_per_step / (time.perf_counter() - began),
            }

    def _train_step(self, rate: float) -> tuple[float, float]:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = training_batch(
            self.corpus,
            context=config.model.context,
            batch_size=config.batch_size,
            seed=config.seed,
            step=self.step,
        )
        self.model.train()
        total = 0.0
        for part_inputs, part_targets in zip(
            inputs.chunk(config.accumulation), targets.chunk(config.accumulation), strict=True
        ):
            loss = self._loss(part_inputs, part_targets) / config.accumulation
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm).item()
        self._require_finite(total, norm, rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        with self._autocast():
            loss: Tensor = self.model(inputs, targets)[1]
        return loss

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16
        )

    def _require_finite(self, loss: float, norm: float, rate: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise UserError(
            f"step {self.step + 1}: loss {loss} with gradient norm {norm} at learning rate "
            f"{rate:.3g}; lower the learning rate\n{self._last_good()}"
        )

    def _last_good(self) -> str:
        return f"last good checkpoint: {checkpoint.latest(self.run.checkpoints) or 'none yet'}"

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.model.eval()
        total, counted = 0.0, 0
        for inputs, targets in zip(
            self.evaluation.inputs.split(self.config.batch_size),
            self.evaluation.targets.split(self.config.batch_size),
            strict=True,
        ):
            count = int((targets >= 0).sum())
            total += self._loss(inputs, targets).item() * count
            counted += count
        self.validation_loss = total / counted
        if not math.isfinite(self.validation_loss):
            raise UserError(
                f"step {self.step}: validation loss {self.validation_loss}; lower the learning "
                f"rate\n{self._last_good()}"
            )
        is_best = self.best is None or self.validation_loss < self.best
        self.best = self.validation_loss if is_best else self.best
        floor = self.evaluation.floor
        self._report(
            {
                "kind": "validation",
                "step": self.step,
                "tokens": self.step * self.config.batch_size * self.config.model.context,
                "loss": self.validation_loss,
                "floor": floor and floor.nats,
                "floor_exact": floor and floor.exact,
            }
        )

    def _report(self, record: dict[str, Any]) -> None:
        self.run.metrics.append(record)
        self.listener.record(record)

    def _save(self) -> None:
        if self.step == self.saved_step:
            return
        self.saved_step = self.step
        state = checkpoint.Checkpoint(
            step=self.step,
            model=self.model.state_dict(),
            optimizer=checkpoint.optimizer_tensors(self.optimizer),
            random_state=torch.get_rng_state(),
            best_validation_loss=self.best,
            seconds=self._seconds(),
        )
        checkpoint.save(self.run.checkpoints, state, self.config, self.corpus.tokenizer)

    def _resume(self) -> None:
        """Go on from the newest checkpoint; without one, from the start."""
        newest = checkpoint.latest(self.run.checkpoints)
        if newest is None:
            if self.run.metrics.read():
                self.listener.message("no checkpoint yet: starting from step 0")
            self.run.metrics.rewind(-1)
            return
        state, _, tokenizer = checkpoint.read(newest)
        if tokenizer != self.corpus.tokenizer:
            raise UserError(f"{newest} has another vocabulary than {self.config.data}")
        checkpoint.load_weights(self.model, state.model, newest)
        # before the first step AdamW has no state
        if state.step > 0:
            checkpoint.restore_optimizer(self.optimizer, state.optimizer, newest)
        torch.set_rng_state(state.random_state)
        self.step = self.saved_step = state.step
        self.best = state.best_validation_loss
        self.earlier_seconds = state.seconds
        kept = self.run.metrics.rewind(self.step)
        for record in kept:
            if record["kind"] == "validation" and record["step"] == self.step:
                self.validation_loss = record["loss"]
        self.listener.message(f"resumed from {newest}")

    def _count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def _finish(self) -> dict[str, Any]:
        """Write depth weights and, last of all, the summary."""
        if self.validation_loss is None:
            # the record of the last step was lost
            self._evaluate()
        self.model.eval()
        with torch.no_grad(), self._autocast():
            inputs = self.evaluation.inputs[:_DEPTH_WINDOWS].to(self.device)
            weights = depth_map(self.model.policy, lambda: self.model(inputs))
        if weights is not None:
            write_json(self.run.path / "depth_weights.json", weights)
        config, floor = self.config, self.evaluation.floor
        speeds = [
            record["tokens_per_second"]
            for record in self.run.metrics.read()
            if record["kind"] == "train"
        ]
        summary = {
            "format_version": FORMAT_VERSION,
            "label": config.model.residual.label,
            "method": config.model.residual.type_name,
            "corpus": self.corpus.name,
            "num_layers": config.model.num_layers,
            "seed": config.seed,
            "steps": config.steps,
            "tokens": config.steps * config.batch_size * config.model.context,
            "validation_loss": self.validation_loss,
            "best_validation_loss": self.best,
            "floor": floor and floor.nats,
            "floor_exact": floor and floor.exact,
            "parameters": self._count(),
            "policy_parameters": sum(p.numel() for p in self.model.policy.parameters()),
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "seconds": round(self._seconds(), 3),
            "peak_memory_bytes": self.memory.read(),
            "memory_kind": self.memory.kind,
            "device": str(self.device),
            "precision": str(self.precision).removeprefix("torch."),
        }
        write_json(self.run.path / "summary.json", summary)
        self.listener.end(summary)
        return {**summary, "path": str(self.run.path)}
