"""Everything that `resroute inspect` says of one model, as values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.config import UserError
from resroute.core import compute_dtype
from resroute.data import IGNORED_TARGET, Tokenizer, parts_of
from resroute.experiments.importance import By, Importance, importance, logits_of
from resroute.experiments.inspect.classes import CLASSES, token_classes
from resroute.experiments.inspect.prompt import TokenReads, shown_ids, token_reads
from resroute.residual import Finding, Policy, capture, health, trajectory
from resroute.residual.base import STREAM, policy_of
from resroute.residual.capture import Capture
from resroute.residual.trajectory import Trajectory
from resroute.training.metrics import finite

FORMAT_VERSION = 1
_BATCH_TOKENS = 2048
# windows of a look at gradients
_FEW = 4
# tokens of a window that are shown one by one
_MOST_SHOWN = 240

Table = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it by now, and how much in all."""
Windows = tuple[Tensor, Tensor]
"""Inputs and targets (N, T)."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was seen of one model."""

    name: str
    """Of its run."""
    label: str
    """The method's, for people."""
    corpus: str
    """Name of the text that it was looked at on."""
    step: int | None
    seed: int | None
    num_layers: int
    dim: int
    windows: int
    tokens: int
    loss: float
    """Of these windows, nats a token; not finite of a model that diverged."""
    seen: dict[str, Any]
    """`Capture.result`, gradients those of a few windows."""
    tables: dict[str, Table]
    """Depth weights of `all tokens` and of each class that occurs; empty without routing."""
    past: dict[int, Table]
    """Depth weights of all tokens at earlier checkpoints that were kept, by step."""
    records: tuple[dict[str, Any], ...]
    """Lines of the run's metrics.jsonl."""
    bases: dict[str, Any]
    """`Trajectory.result`, without blocks where an update is not finite."""
    findings: tuple[Finding, ...]
    importance: tuple[Importance, ...]
    prompt: TokenReads | None


def inspect_model(
    model: nn.Module,
    windows: Windows,
    *,
    name: str = "model",
    label: str | None = None,
    corpus: str = "text",
    step: int | None = None,
    seed: int | None = None,
    tokenizer: Tokenizer | None = None,
    by: Sequence[By] | None = None,
    prompt: str | None = None,
    past: Mapping[int, Table] | None = None,
    records: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> Inspection:
    """Look at a model on windows of text; its weights, gradients and mode stay as they are.

    Of a model that diverged, numbers that are not finite are None, and what needs a loss is left
    out.

    Args:
        model: Maps tokens (B, T) to logits (B, T, V), alone or first in a tuple, or as `.logits`;
            holds one policy.
        windows: Inputs and targets (N, T); targets are already shifted, negative ones not counted.
        name: What the model is called.
        label: What its method is called, unless as usual.
        corpus: What the text is called.
        step: Training steps behind it.
        seed: Of its training.
        tokenizer: The model's, for classes of tokens and a text token by token.
        by: What is left out in turn to see what the loss needs; sources only of methods that have
            some. By default layers, sources, and blocks of methods that have them.
        prompt: A text to show token by token; the start of the first window unless given.
        past: Depth weights at earlier steps, as `Capture.table` gives them.
        records: Lines of the run's metrics.jsonl.
        progress: Told what is going on.

    Raises:
        UserError: Windows that do not fit, or a prompt that the vocabulary does not have.
    """
    policy, tell = policy_of(model), progress or (lambda what, done, total: None)
    _require_windows(windows)
    if tokenizer is not None and prompt is not None:
        # what cannot be read is said before minutes of work
        shown_ids(tokenizer, prompt)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        seen, values = _looked(model, windows, tokenizer, by, tell)
        reads = None
        routes = policy.source_names() != (STREAM,)
        if tokenizer is not None and routes and math.isfinite(values["loss"]):
            tell("tokens", 0, 1)
            shown = next(parts_of(*windows, 1))[0][0, :_MOST_SHOWN].tolist()
            ids = shown if prompt is None else shown_ids(tokenizer, prompt)
            reads = token_reads(model, tokenizer, ids[: windows[0].shape[1]])
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    return Inspection(
        name=name,
        label=label or policy.label,
        corpus=corpus,
        step=step,
        seed=seed,
        num_layers=policy.num_layers,
        dim=policy.dim,
        past=dict(past or {}),
        records=tuple(map(dict, records)),
        findings=tuple(health(seen, model, records)),
        prompt=reads,
        **values,
    )


def _require_windows(windows: Windows) -> None:
    inputs, targets = windows
    if inputs.dim() != 2 or inputs.shape != targets.shape or not (targets >= 0).any():
        raise UserError(
            "windows must be inputs and targets of one shape (N, T), with a target that counts, "
            f"got {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )


def _looked(
    model: nn.Module,
    windows: Windows,
    tokenizer: Tokenizer | None,
    by: Sequence[By] | None,
    tell: Progress,
) -> tuple[Capture, dict[str, Any]]:
    """What a capture saw, and the fields of an inspection that the model alone gives."""
    inputs, targets = windows
    device = next(model.parameters()).device
    rows = max(1, _BATCH_TOKENS // inputs.shape[1])
    parts = list(parts_of(inputs, targets, rows))
    classes = None if tokenizer is None else token_classes(tokenizer)
    total, counted = 0.0, 0
    with (
        torch.no_grad(),
        capture(model, classes=classes, class_names=CLASSES) as seen,
        trajectory(model) as moved,
    ):
        for done, (part, wanted) in enumerate(parts):
            tell("reads and updates", done, len(parts))
            total += _loss(model, part.to(device), wanted.to(device)).item()
            counted += int((wanted >= 0).sum())
    tell("gradients", 0, 1)
    result = finite(seen.result())
    _add_gradients(model, (inputs[:_FEW], targets[:_FEW]), result)
    routes = policy_of(model).source_names() != (STREAM,)
    measured = []
    wanted_by = _usual(policy_of(model)) if by is None else by
    for one in wanted_by if math.isfinite(total) else ():
        if one == "source" and not routes:
            continue

        def count(done: int, total: int, one: str = one) -> None:
            tell(f"the loss without each {one}", done, total)

        measured.append(importance(model, windows, one, batch=rows, progress=count))
    return seen, {
        "windows": len(inputs),
        "tokens": seen.tokens,
        "loss": total / counted,
        "seen": result,
        "tables": _tables(seen),
        "bases": _bases(moved),
        "importance": tuple(measured),
    }


def _usual(policy: Policy[Any]) -> Sequence[By]:
    blocks: list[range] = getattr(policy, "blocks", [])
    has_blocks = any(len(block) > 1 for block in blocks)
    return ("layer", "block", "source") if has_blocks else ("layer", "source")


def _tables(seen: Capture) -> dict[str, Table]:
    table = seen.table()
    if table is None:
        return {}
    tables = {"all tokens": finite(table)}
    # the readout mixes in every method that mixes at all, but for one that reads its plain sum
    mixing = next(site for site in seen.result()["sites"] if site["weights"])
    for name, found in mixing["classes"].items():
        if found["tokens"]:
            of_class = seen.table(name)
            assert of_class is not None
            tables[name] = {**finite(of_class), "tokens": found["tokens"]}
    return tables


def _bases(moved: Trajectory) -> dict[str, Any]:
    if all(bool(moved.gram(number).isfinite().all()) for number in range(len(moved.blocks))):
        return moved.result()
    return {"blocks": []}


def _add_gradients(model: nn.Module, windows: Windows, result: dict[str, Any]) -> None:
    """Put gradient norms of one backward pass into what a capture gave without any."""
    device = next(model.parameters()).device
    # what fills windows up has no gradient: nothing that counts comes after it
    inputs, targets = (part.to(device) for part in windows)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with capture(model) as seen, torch.enable_grad():
        loss = _loss(model, inputs, targets) / max(1, int((targets >= 0).sum()))
        if loss.requires_grad:
            # gradients that a caller has stay, and what a caller does as they come is not done
            torch.autograd.grad(loss, parameters, allow_unused=True)
    for site, other in zip(result["sites"], seen.result()["sites"], strict=True):
        for name in ("update_gradient", "read_gradient"):
            site[name] = other[name]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all targets that count."""
    logits = logits_of(model, inputs)
    return F.cross_entropy(
        logits.to(compute_dtype(logits.dtype)).flatten(0, 1),
        targets.masked_fill(targets < 0, IGNORED_TARGET).flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="sum",
    )
