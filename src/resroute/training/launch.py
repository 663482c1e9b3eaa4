"""From a configuration to a finished run: what is checked first, and who may write."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from resroute import ops
from resroute.config import UserError, to_dict
from resroute.data import (
    Corpus,
    EvaluationSet,
    Mixture,
    evaluation_windows,
    open_mixture,
    training_batch,
)
from resroute.model import outline
from resroute.training.config import TrainConfig
from resroute.training.device import choose_device, deterministic_algorithms
from resroute.training.distributed import World, join
from resroute.training.metrics import Listener
from resroute.training.preemption import Preempted, StopRequest
from resroute.training.run import RunLock, claim, path_of
from resroute.training.trainer import Trainer

_one_at_a_time = threading.Lock()

# where a process finds the corpus and the folder, and on what it computes, is its own matter
_OF_A_PROCESS = ("data", "mix", "out", "device", "backend", "peak_flops")


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    fresh: bool = False,
    stop_at: int | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Train a model and write its run folder; a finished run of the same configuration is reused.

    Under `torchrun` every process calls it with the same arguments; the main one writes and
    reports. While it runs, SIGTERM and Ctrl-C finish the step, save, and raise `Preempted`. A
    process trains one model at a time, in whichever thread, since torch has one random generator;
    afterwards that of the CPU, and of the run's GPU, is where it was before.

    Args:
        config: Everything about the run.
        resume: Go on from the newest good checkpoint of an unfinished run; exact on the CPU.
        fresh: Start over; an existing run folder is kept under another name.
        stop_at: Leave the run unfinished after this step, with a checkpoint: for jobs of limited
            time.
        listener: Told what happens.

    Returns:
        The run's summary, with its folder under `path`; it has no `validation_loss` where
        `stop_at` left it unfinished.

    Raises:
        UserError: No `TrainConfig`, or one that does not fit the corpus, this machine or the run
            folder, a folder in use by another run, another training in this process, or a loss or
            gradient that is no longer finite.
        Preempted: The system asked to stop; where the run had begun, its checkpoint is written.
    """
    if not isinstance(config, TrainConfig):
        raise UserError(
            f"train takes a TrainConfig, got {type(config).__name__}; "
            "resroute.config.from_dict(rr.TrainConfig, ..) makes one of JSON values"
        )
    if stop_at is not None and stop_at < 0:
        raise UserError(f"stop_at must be at least 0, got {stop_at}")
    if torch.get_default_device().type != "cpu" or torch.is_inference_mode_enabled():
        raise UserError("training needs torch's default device cpu, outside of inference_mode")
    with _alone(), _float32(), torch.enable_grad(), join(config.device) as world, RunLock() as lock:
        listener = listener if listener is not None and world.is_main else Listener()
        return _train(config, world, lock, listener, resume=resume, fresh=fresh, stop_at=stop_at)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two trainings would draw from one random generator, and neither could be repeated."""
    if not _one_at_a_time.acquire(blocking=False):
        raise UserError(
            "this process is training another model; wait for it, or train in another process"
        )
    try:
        yield
    finally:
        _one_at_a_time.release()


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """Weights are float32, whatever the caller's default."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


def _train(
    config: TrainConfig,
    world: World,
    lock: RunLock,
    listener: Listener,
    *,
    resume: bool,
    fresh: bool,
    stop_at: int | None,
) -> dict[str, Any]:
    corpus, device, evaluation = world.together(lambda: _prepared(config, world))
    fields = {k: v for k, v in to_dict(config).items() if k not in _OF_A_PROCESS}
    orders = {"resume": resume, "fresh": fresh, "stop_at": stop_at}
    world.require_same({**fields, "corpus": corpus.fingerprint, **orders})
    request = StopRequest()
    with ops.backend(config.backend), request.listening():
        _load_kernels(config, corpus, device, world, request)
    run = world.from_main(lambda: claim(config, corpus, lock, resume=resume, fresh=fresh))
    if run.moved is not None:
        listener.message(f"the old run is kept as {run.moved}")
    if lock.warning is not None:
        listener.message(lock.warning)
    summary = world.from_main(run.summary)
    if summary is not None:
        listener.message(f"{run.path} is finished: reused (--fresh trains again)")
        return {**summary, "path": str(run.path)}
    with contextlib.ExitStack() as stack:
        gpus = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(gpus))
        stack.enter_context(ops.backend(config.backend))
        if config.deterministic:
            stack.enter_context(deterministic_algorithms(device))
        stack.enter_context(request.listening())
        trainer = Trainer(config, corpus, evaluation, run, device, listener, world, request)
        return trainer.fit(stop_at)


def _prepared(
    config: TrainConfig, world: World
) -> tuple[Corpus | Mixture, torch.device, EvaluationSet]:
    """Raise, before anything is written, what the corpus, the machine or the model would raise."""
    source = open_mixture(Path(config.data), config.mix)
    corpus = source.main if isinstance(source, Mixture) else source
    device = choose_device(config.device, world.local_rank if world.size > 1 else None)
    if config.model.vocab_size != corpus.tokenizer.vocab_size:
        raise UserError(
            f"the model's vocab_size is {config.model.vocab_size}, but {config.data} has "
            f"{corpus.tokenizer.vocab_size} symbols"
        )
    parts = config.accumulation * world.size
    if config.batch_size % parts:
        raise UserError(
            f"batch_size {config.batch_size} must be divisible by {world.size} processes times "
            f"accumulation {config.accumulation}"
        )
    if config.compile and config.parallel == "fsdp" and world.size > 1:
        raise UserError("compile does not go with parallel=fsdp: use ddp or compile=false")
    evaluation = evaluation_windows(
        corpus, context=config.model.context, max_windows=config.evaluation_windows
    )
    training_batch(
        source,
        context=config.model.context,
        batch_size=1,
        seed=config.seed,
        step=0,
        order=config.order,
    )
    outline(config.model)
    return source, device, evaluation


def _load_kernels(
    config: TrainConfig,
    corpus: Corpus | Mixture,
    device: torch.device,
    world: World,
    request: StopRequest,
) -> None:
    """Load what computes the depth routing; a build takes a minute, which a request ends."""

    def load() -> None:
        ops.prepare(ops.choose(device, torch.float32, config.model.dim).backend)

    # built by one process for all
    for agree in (world.from_main, world.together):
        agree(lambda: request.cut_short(load))
        number = request.agreed(world)
        if number is not None:
            raise Preempted(path_of(config, corpus), None, number)
