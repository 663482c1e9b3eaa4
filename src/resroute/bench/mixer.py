"""The case `mixer`: reads over depth alone, backends against plain formulas and other packages.

R rows (batch times context), D width, N sources, m queries; everything in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from resroute import ops
from resroute.bench.check import require_close
from resroute.bench.peers import read_peers
from resroute.bench.settings import Settings
from resroute.bench.timing import Comparison, Listener, alternate, seconds
from resroute.core import Source, depth_mix, depth_weights, inverse_rms, matching_factor

EPS = 1e-6
RHO_MAX = 2.0
BATCH = 2
# of the single read: that of a site with eight finished blocks
_SOURCES = 9

Inputs = Mapping[str, Tensor]
Implementation = Callable[[Inputs], Sequence[Tensor]]

# a WAV site in the second half of its block, from attention's sum X, the MLPs' Y and S
_FORM = ops.SiteForm(
    coefficients=((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (-1.0, -1.0, 2.0)),
    target=0,
    eps=EPS,
    matching=ops.MATCHING["detached"],
    rho_max=RHO_MAX,
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on one set of inputs, done by several implementations."""

    name: str
    inputs: Inputs
    """Each requires its gradient."""
    reference: Implementation
    backend: Callable[[str], Implementation]
    """The implementation of a backend's name."""
    peers: Mapping[str, Implementation]

    def outcome(self, run: Implementation) -> dict[str, Tensor]:
        """Outputs and gradients by name."""
        outputs, grads = self.forward_backward(run)
        found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        return {**found, **dict(zip(self.inputs, grads, strict=True))}

    def forward_backward(self, run: Implementation) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """Outputs, and gradients of their weighted sum."""
        outputs = run(self.inputs)
        # any fixed gradient; not constant over the width, which a norm would cancel
        width = outputs[0].shape[-1]
        ramp = torch.linspace(-1, 1, width, device=outputs[0].device)
        grads = [ramp.expand_as(output) for output in outputs]
        return outputs, torch.autograd.grad(outputs, list(self.inputs.values()), grads)

    @torch.no_grad()
    def forward(self, run: Implementation) -> Sequence[Tensor]:
        """Outputs alone."""
        return run(self.inputs)


def mixer(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time one read, a block's reads and a whole site, forward and forward + backward.

    Backends are timed in turn with the plain formulas (`reference`), and with those packages of
    others that are installed; each must give the reference's outputs and gradients first.
    """
    peers, missing = read_peers()
    for line in missing:
        listener.message(line)
    for operation in operations(settings, peers):
        expected = operation.outcome(operation.reference)
        found = {
            name: require_close(f"{operation.name}: {name}", operation.outcome(run), expected)
            for name, run in operation.peers.items()
        }
        for backend in settings.served():
            run = operation.reference if backend == "reference" else operation.backend(backend)
            what = f"{operation.name} on {backend}"
            found[backend] = require_close(what, operation.outcome(run), expected)
            listener.message(f"{what}: checked")
            baselines = {"reference": operation.reference, **operation.peers}
            if backend == "reference":
                del baselines["reference"]
            for against, baseline in baselines.items():
                for mode, group in (("forward", "fwd"), ("forward_backward", "fwd+bwd")):
                    measure = partial(_seconds, settings.torch_device, operation, mode)
                    pairs = alternate(
                        partial(measure, baseline),
                        partial(measure, run),
                        pairs=settings.pairs,
                        label=f"{what} against {against}, {group}",
                        listener=listener,
                    )
                    yield Comparison(
                        name=operation.name,
                        backend=backend,
                        against=against,
                        group=group,
                        unit="s",
                        pairs=pairs,
                        details={"deviation": {k: found[k] for k in found if k != "reference"}},
                    )


def _seconds(device: torch.device, operation: Operation, mode: str, run: Implementation) -> float:
    return seconds(lambda: getattr(operation, mode)(run), device)


def operations(
    settings: Settings, peers: Mapping[str, Callable[..., Sequence[Tensor]]]
) -> Iterator[Operation]:
    """The operations that are timed, with random inputs."""
    generator = torch.Generator().manual_seed(0)
    shape = (settings.batch or BATCH, settings.context)
    dim = settings.dim

    def random(*sizes: int, std: float = 1.0) -> Tensor:
        numbers = std * torch.randn(sizes, generator=generator)
        return numbers.to(settings.torch_device).requires_grad_()

    sites = 2 * -(-settings.layers // settings.num_blocks)
    for queries, sources in ((1, _SOURCES), (sites, 1 + 3 * (settings.num_blocks - 1))):
        inputs = {f"source {i}": random(*shape, dim) for i in range(sources)}
        inputs["keys"] = random(queries, dim, std=dim**-0.5)
        yield Operation(
            name=f"{queries} read{'s' if queries > 1 else ''} of {sources}",
            inputs=inputs,
            reference=_reads,
            backend=lambda name: partial(_backend_reads, name),
            peers={name: partial(_peer_reads, read) for name, read in peers.items()},
        )
    names = ("update", "x", "y", "s", "prior")
    inputs = {name: random(*shape, dim) for name in names}
    inputs["lse"] = random(*shape)
    inputs["key"] = random(dim, std=dim**-0.5)
    inputs["bias"], inputs["gain"] = random(2), random(dim)
    yield Operation(
        name="a WAV site",
        inputs=inputs,
        reference=_site,
        backend=lambda name: partial(_backend_site, name),
        peers={},
    )


def _sources(inputs: Inputs) -> list[Tensor]:
    return [tensor for name, tensor in inputs.items() if name.startswith("source")]


def _reads(inputs: Inputs) -> list[Tensor]:
    sources = [Source(value, inverse_rms(value, EPS)) for value in _sources(inputs)]
    no_bias = [None] * len(sources)
    return [
        depth_mix(sources, depth_weights(sources, key, None, no_bias))
        for key in inputs["keys"].unbind(0)
    ]


def _backend_reads(backend: str, inputs: Inputs) -> list[Tensor]:
    values = _sources(inputs)
    with torch.no_grad():
        # the operator's gradient takes it for the function of the value that it is
        inverse = [inverse_rms(value, EPS) for value in values]
    sources = [Source(value, r) for value, r in zip(values, inverse, strict=True)]
    mixes, _ = ops.block_read(
        ops.operators(backend), sources, inputs["keys"], read_dtype=values[0].dtype
    )
    return [mix for mix, _ in mixes]


def _peer_reads(read: Callable[..., Sequence[Tensor]], inputs: Inputs) -> Sequence[Tensor]:
    return read(_sources(inputs), inputs["keys"], EPS)


def _site(inputs: Inputs) -> list[Tensor]:
    x = inputs["x"] + inputs["update"]
    y, key = inputs["y"], inputs["key"]
    state = x + y
    bases = (state, x - y, 2 * inputs["s"] - state)
    inverse = [inverse_rms(basis, EPS) for basis in bases]
    logits = [r * (basis @ key) for r, basis in zip(inverse, bases, strict=True)]
    details = [logit + b for logit, b in zip(logits[1:], inputs["bias"], strict=True)]
    weights = torch.stack([inputs["lse"], logits[0], *details]).softmax(0).unsqueeze(-1)
    mix = weights[0] * inputs["prior"] + weights[1] * state
    for weight, basis, r in zip(weights[2:], bases[1:], inverse[1:], strict=True):
        scale = matching_factor(inverse[0], r, RHO_MAX).detach()
        mix = mix + weight * scale.unsqueeze(-1) * basis
    return [F.rms_norm(mix, mix.shape[-1:], inputs["gain"], EPS), x]


def _backend_site(backend: str, inputs: Inputs) -> list[Tensor]:
    read, streams = ops.site(
        ops.operators(backend),
        _FORM,
        inputs["update"],
        [inputs["x"], inputs["y"], inputs["s"]],
        prior=inputs["prior"],
        lse=inputs["lse"],
        key=inputs["key"],
        bias=inputs["bias"],
        gain=inputs["gain"],
        read_dtype=inputs["x"].dtype,
    )
    return [read, streams[0]]
