"""The case `step`: a training step of each method on each backend against PreNorm's."""

from collections.abc import Iterator

import torch

from resroute.bench.check import Truth, require_close
from resroute.bench.plain import PlainGPT
from resroute.bench.settings import Settings, served
from resroute.bench.timing import Comparison, Listener, alternate
from resroute.bench.workload import GPTStep, Step, make_model, torch_step, warm
from resroute.model import GPT
from resroute.residual import PreNorm

PLAIN = "plain torch"


def step(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time methods x backends, each in turn with PreNorm as the library runs it (`auto`).

    A step is forward, backward and fused AdamW. Both sides have the same precision and are
    compiled or not alike. The first row is PreNorm itself against the same model in plain torch.
    """
    compiled = settings.compiles
    usual = served("auto", settings)
    truth = Truth(settings, PreNorm())
    checks = {"formula": truth.require_formula(usual)}
    baseline = GPTStep(settings, PreNorm(), usual, compiled=compiled)
    checks["step"] = truth.require_step(baseline)
    yield _against_plain(settings, baseline, checks, listener)
    for residual in settings.methods:
        truth = Truth(settings, residual)
        for backend in settings.served():
            checks = {"formula": truth.require_formula(backend)}
            routed = GPTStep(settings, residual, backend, compiled=compiled)
            checks["step"] = truth.require_step(routed)
            label = f"{residual.label} on {backend}"
            pairs = alternate_steps(baseline, routed, settings, label, listener)
            yield Comparison(
                name=residual.label,
                backend=backend,
                against="PreNorm",
                unit="s",
                pairs=pairs,
                details={
                    "parameters": routed.parameters,
                    "num_blocks": routed.num_blocks,
                    "deviation": checks,
                },
            )


def alternate_steps(
    baseline: Step, measured: Step, settings: Settings, label: str, listener: Listener
) -> tuple[tuple[float, float], ...]:
    """Time two steps in turn, with nothing of other models in torch's compiled code."""
    # guards of earlier models would be tried before theirs, and past a few torch stops compiling
    torch.compiler.reset()
    listener.message(f"{label}: checked, warming up")
    warm(baseline), warm(measured)
    return alternate(
        baseline.seconds,
        measured.seconds,
        pairs=settings.pairs,
        label=label,
        listener=listener,
    )


def plain_of(model: GPT) -> PlainGPT:
    """The plain model with a PreNorm model's weights."""
    config = model.config
    plain = PlainGPT(
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        dim=config.dim,
    )
    plain.load_state_dict(model.state_dict())
    return plain.to(model.embedding.weight.device)


def _against_plain(
    settings: Settings, ours: GPTStep, checks: dict[str, float], listener: Listener
) -> Comparison:
    plain = plain_of(make_model(settings, PreNorm()))
    checks = {**checks, "plain": _require_equal(settings, plain)}
    theirs = torch_step(settings, plain, plain.loss)
    pairs = alternate_steps(theirs, ours, settings, f"PreNorm against {PLAIN}", listener)
    return Comparison(
        name="PreNorm",
        backend=ours.backend,
        against=PLAIN,
        unit="s",
        pairs=pairs,
        details={"parameters": ours.parameters, "deviation": checks},
    )


def _require_equal(settings: Settings, plain: PlainGPT) -> float:
    """Compare the plain model's logits, loss and gradients with our reference's, on one row."""
    reference = GPTStep(
        settings, PreNorm(), "reference", compiled=False, precision=torch.float32, batch=1
    )
    with torch.no_grad():
        logits = reference.model(reference.tokens)[0]
        require_close(PLAIN, {"logits": plain(reference.tokens)}, {"logits": logits})
    loss = plain.loss(reference.tokens, reference.targets)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return require_close(PLAIN, found, reference.outcome())
