"""The training loop: what is reported, evaluated and saved when, and how a run goes on."""

import math
import statistics
import time
from typing import Any

import torch

from resroute import ops
from resroute.config import UserError, to_dict
from resroute.data import Corpus, EvaluationSet, Mixture
from resroute.files import write_json
from resroute.model.flops import flops_per_token
from resroute.residual.findings import Finding
from resroute.residual.health import health
from resroute.training import checkpoint
from resroute.training.config import TrainConfig
from resroute.training.device import (
    choose_precision,
    describe_device,
    environment,
    has_cpp_compiler,
    keep_freed_memory,
    numerics,
    product_dtype,
)
from resroute.training.distributed import World
from resroute.training.learner import Learner
from resroute.training.metrics import Listener, PeakMemory, RunStart, finite
from resroute.training.optim import learning_rate
from resroute.training.preemption import Preempted, StopRequest
from resroute.training.resume import resume_from
from resroute.training.run import FORMAT_VERSION, RunFolder
from resroute.training.speed import measured_peak

# windows over whose tokens the look at the end of a run is averaged
_LOOKED_AT_WINDOWS = 4


class Trainer:
    """One run in progress, on one of its processes."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus | Mixture,
        evaluation: EvaluationSet,
        run: RunFolder,
        device: torch.device,
        listener: Listener,
        world: World,
        request: StopRequest,
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.tokens_per_character = _tokens_per_character(corpus)
        self.evaluation = evaluation
        self.run = run
        self.device = device
        self.listener = listener
        self.world = world
        self.request = request
        self.precision = choose_precision(config.precision, device)
        self.routing = ops.choose(device, torch.float32, config.model.dim).backend
        self.numerics = numerics(config, device, self.precision, self.routing, world.size)
        peak = config.peak_flops or measured_peak(device, product_dtype(device, self.precision))
        self.peak_flops = peak * world.size
        self.memory = PeakMemory(device)
        keep_freed_memory()
        self.learner = Learner(config, corpus, world, device, self.precision)
        self.step = 0
        self.best: float | None = None
        # of the weights as they are now
        self.validation_loss: float | None = None
        self.evaluated_step = -1
        self.saved_step = -1
        self.earlier_seconds = 0.0
        # of each step since the last line of training
        self.unreported: list[float] = []
        self.started = time.perf_counter()
        self._resume()
        if config.compile and device.type == "cpu" and not has_cpp_compiler():
            listener.message("no C++ compiler found: sublayers run uncompiled")
        elif config.compile:
            self.learner.model.compile(dynamic=False)

    def fit(self, stop_at: int | None = None) -> dict[str, Any]:
        """Run to the end, or to `stop_at`; write the folder's files; return the summary."""
        config = self.config
        kept = self.world.from_main(lambda: self.run.add_session(self.step, self._environment()))
        if kept is not None:
            self.listener.message(
                f"{self.run.path / 'env.json'}: damaged; kept as {kept}, begun anew"
            )
        self.listener.message(self._headline())
        end = config.steps if stop_at is None else min(stop_at, config.steps)
        self.listener.begin(
            RunStart(
                path=self.run.path,
                label=config.model.residual.label,
                step=self.step,
                total=config.steps,
                floor=self.evaluation.floor,
                config=config,
            )
        )
        try:
            if self.step in (0, config.steps) or self.step % config.evaluate_every == 0:
                self._evaluate()
            self._stop_if_asked()
            while self.step < end:
                self._take_step()
                self.listener.advance(self.step)
                if self.step % config.checkpoint_every == 0 and self.step < end:
                    self._save()
                self._stop_if_asked()
        except Preempted:
            raise
        except KeyboardInterrupt:
            newest = checkpoint.newest(self.run.checkpoints)
            at = newest.name if newest else "none yet"
            self.listener.message(f"stopped after step {self.step}; newest checkpoint: {at}")
            raise
        self._save()
        if self.step < config.steps:
            return {"path": str(self.run.path), "step": self.step}
        return self._finish()

    def _take_step(self) -> None:
        """Take a step, and report, look and evaluate when it is time."""
        config = self.config
        began = time.perf_counter()
        rate = learning_rate(config, self.step)
        taken = self.learner.gradients(self.step)
        if not (math.isfinite(taken.loss) and math.isfinite(taken.grad_norm)):
            raise UserError(
                f"step {self.step + 1}: loss {taken.loss} with gradient norm {taken.grad_norm} at "
                f"learning rate {rate:.3g}; lower the learning rate\n{self._last_good()}"
            )
        self.learner.update(rate)
        self.unreported.append(time.perf_counter() - began)
        self.step += 1
        is_last = self.step == config.steps
        if self.step % config.log_every == 0 or is_last:
            tokens = config.batch_size * config.model.context
            speed = tokens * len(self.unreported) / sum(self.unreported)
            self.unreported.clear()
            flops = speed * flops_per_token(config.model)
            self._report(
                {
                    "kind": "train",
                    "step": self.step,
                    "tokens": self.step * tokens,
                    "loss": taken.loss,
                    "nats_per_character": taken.loss * self.tokens_per_character,
                    "learning_rate": rate,
                    "grad_norm": taken.grad_norm,
                    "tokens_per_second": speed,
                    "model_flop_utilisation": flops / self.peak_flops,
                    "memory_bytes": self.memory.read(),
                }
            )
        if self.step % config.observe_every == 0 or is_last:
            seen = self.learner.observe(self.step - 1)
            self._report({"kind": "routing", "step": self.step, **seen})
        if self.step % config.evaluate_every == 0 or is_last:
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate these weights, unless that was done or the system asks to stop."""
        if self.evaluated_step == self.step:
            return
        loss = self.learner.evaluate(self.evaluation, self._is_asked)
        averaged = None
        if loss is not None and self.learner.average is not None:
            averaged = self.learner.evaluate(self.evaluation, self._is_asked, averaged=True)
            loss = None if averaged is None else loss
        if loss is None:
            return
        if not math.isfinite(loss):
            raise UserError(
                f"step {self.step}: validation loss {loss}; lower the learning rate\n"
                f"{self._last_good()}"
            )
        self.validation_loss, self.evaluated_step = loss, self.step
        self.best = loss if self.best is None else min(self.best, loss)
        if self.saved_step == self.step:
            # its checkpoint was written before, where the system asked to stop
            folder = self.run.checkpoints / f"step_{self.step:06d}"
            self.world.from_main(lambda: checkpoint.note_evaluation(folder, loss, self.best))
        floor = self.evaluation.floor
        record = {
            "kind": "validation",
            "step": self.step,
            "tokens": self.step * self.config.batch_size * self.config.model.context,
            "loss": loss,
            **self._comparable(loss),
            "floor": floor and floor.nats,
            "floor_exact": floor and floor.exact,
        }
        self._report(record if averaged is None else {**record, "ema_loss": averaged})

    def _comparable(self, loss: float) -> dict[str, float]:
        """A validation loss in units that do not depend on the tokenizer."""
        nats = loss * self.evaluation.tokens
        return {
            "nats_per_character": nats / self.evaluation.characters,
            "bits_per_byte": nats / self.evaluation.bytes / math.log(2),
        }

    def _report(self, record: dict[str, Any]) -> None:
        # sizes may overflow before losses do
        record = finite(record)
        self.world.from_main(lambda: self.run.metrics.append(record))
        self.listener.record(record)

    def _save(self) -> None:
        if self.step == self.saved_step:
            return
        if not self.learner.is_finite():
            raise UserError(
                f"step {self.step}: the weights are no longer finite and were not saved; lower "
                f"the learning rate\n{self._last_good()}"
            )
        # lines up to here must not be lost where the checkpoint is not
        self.world.from_main(self.run.metrics.flush)
        progress = checkpoint.Progress(
            step=self.step,
            best_validation_loss=self.best,
            validation_loss=self.validation_loss if self.evaluated_step == self.step else None,
            seconds=self._seconds(),
            numerics=self.numerics,
        )
        checkpoint.save(
            self.run.checkpoints,
            self.learner.state(),
            progress,
            self.config,
            self.corpus.tokenizer,
            self.world,
        )
        self.saved_step = self.step

    def _is_asked(self) -> bool:
        """Whether any process was asked to stop."""
        return self.request.agreed(self.world) is not None

    def _stop_if_asked(self) -> None:
        number = self.request.agreed(self.world)
        if number is None:
            return
        self._save()
        raise Preempted(self.run.path, self.step, number)

    def _last_good(self) -> str:
        newest = checkpoint.newest(self.run.checkpoints)
        return f"last good checkpoint: {newest or 'none yet'}"

    def _resume(self) -> None:
        """Go on from the newest good checkpoint; without one, from the start."""
        progress = self.world.together(
            lambda: resume_from(
                self.run, self.learner, self.config, self.corpus, self.numerics, self.world,
                self.listener,
            )
        )  # fmt: skip
        if progress is not None:
            self.step = self.saved_step = progress.step
            self.best = progress.best_validation_loss
            self.earlier_seconds = progress.seconds
        # a run that starts over reports step 0 again
        last = -1 if progress is None else self.step
        kept = self.world.from_main(lambda: self.run.metrics.rewind(last))
        if self.step > 0 and not kept:
            self.listener.message(
                f"{self.run.metrics.path}: the lines up to step {self.step} are lost; the run goes "
                "on without them"
            )
        for record in kept:
            is_here = record["kind"] == "validation" and record["step"] == self.step
            if is_here and isinstance(record.get("loss"), float):
                self.validation_loss, self.evaluated_step = record["loss"], self.step

    def _environment(self) -> dict[str, Any]:
        found = environment(self.device, self.precision)
        return {**found, "processes": self.world.size, "peak_flops": self.peak_flops}

    def _headline(self) -> str:
        config = self.config
        spread = f", {self.world.size} processes ({config.parallel})" if self.world.size > 1 else ""
        return (
            f"{config.model.residual.label}: {config.model.num_layers} layers, "
            f"{self._count():,} parameters, {str(self.precision).removeprefix('torch.')} on "
            f"{describe_device(self.device)}{spread}, routing by {self.routing}"
        )

    def _count(self) -> int:
        return sum(parameter.numel() for parameter in self.learner.model.parameters())

    def _seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def _finish(self) -> dict[str, Any]:
        """Write depth weights, what health checks find, and last of all the summary."""
        records = self.world.from_main(self.run.metrics.read)
        looked_at = slice(_LOOKED_AT_WINDOWS)
        seen = self.learner.capture(
            self.evaluation.inputs[looked_at], self.evaluation.targets[looked_at]
        )
        weights = seen.table()
        # by all processes: parameters may be sharded
        findings = health(seen, self.learner.model, records)
        memory = self.world.total(float(self.memory.read() or 0))[0]
        summary = self._summary(int(memory) or None, records)
        self.world.from_main(lambda: self._write_results(weights, findings, summary))
        self.listener.health(findings)
        self.listener.end(summary)
        return {**summary, "path": str(self.run.path)}

    def _write_results(
        self,
        weights: dict[str, Any] | None,
        findings: list[Finding],
        summary: dict[str, Any],
    ) -> None:
        if weights is not None:
            write_json(self.run.path / "depth_weights.json", weights)
        found = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "findings": to_dict(findings),
        }
        write_json(self.run.path / "health.json", found)
        self.run.metrics.flush()
        write_json(self.run.path / "summary.json", summary)

    def _summary(self, memory: int | None, records: list[dict[str, Any]]) -> dict[str, Any]:
        config, floor = self.config, self.evaluation.floor
        found = [record.get("tokens_per_second") for record in records]
        speeds = [speed for speed in found if isinstance(speed, float)]
        policy, loss = self.learner.model.policy, self.validation_loss
        return {
            "format_version": FORMAT_VERSION,
            "label": config.model.residual.label,
            "method": config.model.residual.type_name,
            "corpus": self.corpus.name,
            "num_layers": config.model.num_layers,
            "seed": config.seed,
            "steps": config.steps,
            "tokens": config.steps * config.batch_size * config.model.context,
            "validation_loss": loss,
            **({} if loss is None else self._comparable(loss)),
            "best_validation_loss": self.best,
            "floor": floor and floor.nats,
            "floor_exact": floor and floor.exact,
            "parameters": self._count(),
            "policy_parameters": sum(p.numel() for p in policy.parameters()),
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "seconds": round(self._seconds(), 3),
            "processes": self.world.size,
            "peak_memory_bytes": memory,
            "memory_kind": self.memory.kind,
            "device": self.device.type if self.world.size > 1 else str(self.device),
            "precision": str(self.precision).removeprefix("torch."),
        }


def _tokens_per_character(corpus: Corpus | Mixture) -> float:
    """Of the train split; one where an older corpus, which has characters, does not tell."""
    split = (corpus.main if isinstance(corpus, Mixture) else corpus).split("train")
    return 1.0 if split.characters is None else split.tokens / split.characters
