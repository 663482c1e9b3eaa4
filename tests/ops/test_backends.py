"""Every backend against the direct formula in float64: results and every gradient."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.core import Source, depth_mix, depth_weights, inverse_rms, matching_factor
from resroute.ops import MATCHING, SiteForm

XYS = ((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (-1.0, -1.0, 2.0))
FORMS = {
    "norm alone": SiteForm(),
    "sum": SiteForm(target=0),
    "block": SiteForm(coefficients=((1.0,),), target=0),
    "first site": SiteForm(coefficients=((1.0,),) * 3, matching=1, rho_max=2.0),
    "first half": SiteForm(
        coefficients=((1.0, 1.0), (1.0, -1.0), (1.0, 1.0)), target=1, matching=1, rho_max=0.7
    ),
    "second half": SiteForm(coefficients=XYS, target=0, matching=1, rho_max=2.0),
    "no limit": SiteForm(coefficients=XYS, target=1, matching=1),
    "attached": SiteForm(coefficients=XYS, target=1, matching=2, rho_max=1.1),
    "unmatched": SiteForm(coefficients=XYS, target=-1),
    "haares": SiteForm(coefficients=((1.0, 0.0), (-1.0, 2.0)), target=0, matching=1, rho_max=2.0),
    "separate": SiteForm(
        coefficients=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), matching=2, eps=1e-3
    ),
}
NORM_EPS = 1e-5
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


class Kind(NamedTuple):
    """Dtypes of a case, and how far from the float64 formula results may be (relative norms)."""

    backend: str
    stream: torch.dtype
    update: torch.dtype
    bound: float
    device: str = "cpu"


# bfloat16 keeps 8 bits: one rounding of a result is 2^-9 relative at most, a stored prior or
# gradient adds another, and differences of near equal sums enlarge them
KINDS = [
    Kind("lean", F64, F64, 1e-10),
    Kind("lean", F32, F32, 1e-5),
    Kind("lean", F32, BF16, 2e-2),
    Kind("lean", BF16, BF16, 2e-2),
    Kind("native", F32, F32, 1e-5),
    Kind("native", F32, BF16, 2e-2),
    Kind("native", BF16, BF16, 2e-2),
]
SITE_SHAPES = [(1, 1, 1), (3, 5), (2, 3, 33), (7, 64), (40, 96)]
if torch.cuda.is_available():
    KINDS += [
        pytest.param(Kind(backend, *types, bound, "cuda"), marks=pytest.mark.gpu)
        for backend in ("triton", "lean")
        for *types, bound in ((F32, F32, 1e-5), (F32, BF16, 2e-2), (BF16, BF16, 2e-2))
    ]


@pytest.fixture(
    params=KINDS,
    ids=lambda k: f"{k.backend}-{k.stream}-{k.update}-{k.device}".replace("torch.", ""),
)
def kind(request):
    if request.param.backend == "native":
        native = pytest.importorskip("resroute.ops.native")
        if not native.available():
            pytest.skip("no C++ compiler")
    if request.param.backend == "triton":
        pytest.importorskip("triton")
    return request.param


def drawn(*shape, seed, dtype, scale=1.0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=F64)).to(device, dtype)


def leaves_of(tensors):
    """Copies that gradients flow to; None stays."""
    return [None if t is None else t.clone().requires_grad_() for t in tensors]


def wide(tensors):
    return [None if t is None else t.detach().to(F64).requires_grad_() for t in tensors]


def assert_near(found, expected, bound, name):
    __tracebackhide__ = True
    found, expected = found.detach().to(F64), expected.detach().to(F64)
    assert found.shape == expected.shape, name
    # inputs are of order one: what cancels to less is held to an absolute bound
    error = (found - expected).norm() / expected.norm().clamp(min=0.2 * expected.numel() ** 0.5)
    assert error <= bound, f"{name}: relative error {error:.2e}"


def direct_site(form, update, streams, prior, lse, key, bias, gain):
    """The formula, from `core` and autograd alone."""
    streams = list(streams)
    if form.target >= 0:
        streams[form.target] = streams[form.target] + update
    bases = [sum(c * s for c, s in zip(row, streams, strict=True)) for row in form.coefficients]
    if not bases:
        mix = streams[0] if prior is None else prior
    else:
        sources = [Source(b, inverse_rms(b, form.eps)) for b in bases]
        for k in range(1, len(bases)):
            if form.matching:
                rho = None if form.rho_max == math.inf else form.rho_max
                state, detail = sources[0].inverse_rms, sources[k].inverse_rms
                factor = matching_factor(state, detail, rho)
                detached = form.matching == MATCHING["detached"]
                sources[k] = sources[k]._replace(scale=factor.detach() if detached else factor)
        biases = [None, *([None] * (len(bases) - 1) if bias is None else bias.unbind(0))]
        if prior is None:
            mix = depth_mix(sources, depth_weights(sources, key, None, biases))
        else:
            logits = [s.inverse_rms * (s.value @ key) for s in sources]
            logits = [x if b is None else x + b for x, b in zip(logits, biases, strict=True)]
            weights = torch.stack([*logits, lse]).softmax(0)
            mix = depth_mix([*sources, Source(prior, lse)], weights)
    read = mix
    if gain is not None:
        read = mix * inverse_rms(mix, NORM_EPS).unsqueeze(-1) * gain
    return read, streams


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", SITE_SHAPES, ids=str)
def test_site(kind, name, shape):
    if kind.device == "cuda" and shape != (7, 64):
        pytest.skip("each width is minutes of compiling for a GPU; test_triton.py has others")
    draw = partial(drawn, device=kind.device)
    form, width, rows = FORMS[name], shape[-1], shape[:-1]
    num_bases = len(form.coefficients)
    num_streams = len(form.coefficients[0]) if num_bases else 1
    for variant in ("whole", "bare"):
        has_prior = variant == "whole" and num_bases > 0
        update = draw(*shape, seed=1, dtype=kind.update) if form.target >= 0 else None
        streams = [draw(*shape, seed=10 + i, dtype=kind.stream) for i in range(num_streams)]
        prior = draw(*shape, seed=2, dtype=kind.update) if has_prior else None
        small = torch.promote_types(kind.stream, F32)
        lse = draw(*rows, seed=3, dtype=small) if has_prior else None
        key = draw(width, seed=4, dtype=small, scale=width**-0.5) if num_bases else None
        bias = draw(num_bases - 1, seed=5, dtype=small) if num_bases > 1 and has_prior else None
        gain = 1 + draw(width, seed=6, dtype=small) if variant == "whole" else None
        inputs = [update, prior, lse, key, bias, gain, *streams]
        ours, theirs = leaves_of(inputs), wide(inputs)

        read_dtype = kind.update
        read, after = ops.site(
            ops.operators(kind.backend),
            form,
            ours[0],
            ours[6:],
            prior=ours[1],
            lse=ours[2],
            key=ours[3],
            bias=ours[4],
            gain=ours[5],
            norm_eps=NORM_EPS,
            read_dtype=read_dtype,
        )
        expected, expected_after = direct_site(form, theirs[0], theirs[6:], *theirs[1:6])
        assert read.dtype == read_dtype
        assert_near(read, expected, kind.bound, "read")
        for found, stream in zip(after, expected_after, strict=True):
            assert found.dtype == kind.stream
            assert_near(found, stream, kind.bound, "stream")

        probes = [draw(*shape, seed=20 + i, dtype=F64) for i in range(1 + num_streams)]
        # a stream without later readers brings no gradient
        probes[-1] = None if num_streams > 1 else probes[-1]
        for results in ((read, *after), (expected, *expected_after)):
            used = [(r, p) for r, p in zip(results, probes, strict=True) if p is not None]
            torch.autograd.backward([r for r, _ in used], [p.to(r.dtype) for r, p in used])
        for label, a, b in zip(
            ("update", "prior", "lse", "key", "bias", "gain", "x", "y", "s"),
            ours,
            theirs,
            strict=False,
        ):
            if a is not None and b.grad is not None:
                assert a.grad.dtype == a.dtype
                assert_near(a.grad, b.grad, 3 * kind.bound, f"{variant} grad {label}")


@pytest.mark.parametrize("backend", ["lean", "native"])
@pytest.mark.parametrize(
    ("target", "has_update", "words"),
    [
        (2, True, "target 2 is no stream: with 2 of them it is -1 .*to 1"),
        (-2, False, "target -2 is no stream"),
        (-1, True, "update"),
        (0, False, "update"),
    ],
)
def test_a_target_is_a_stream_with_an_update(backend, target, has_update, words):
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    operators, key = ops.operators(backend), torch.ones(5)
    streams = [drawn(3, 5, seed=i, dtype=F32) for i in range(2)]
    update = streams[0] if has_update else None
    static = ([1.0, 1.0], 1, target, 1e-6, 0, 2.0, 1e-6)
    # torch's checks raise RuntimeError
    with pytest.raises((rr.UserError, RuntimeError), match=words):
        operators.site_forward(update, streams, *[None] * 2, key, *[None] * 2, *static, F32)
    saved = operators.site_forward(
        None, streams, *[None] * 2, key, *[None] * 2, *static[:2], -1, *static[3:], F32
    )[2]
    with pytest.raises((rr.UserError, RuntimeError), match=words):
        operators.site_backward(
            None, [None] * 2, F32 if has_update else None, streams, *[None] * 2, key, *[None] * 2,
            saved, *static, [True] * 4,
        )  # fmt: skip


def direct_block(sources, keys, biases, priors):
    results = []
    for j, key in enumerate(keys):
        logits = [s.inverse_rms * (s.value @ key) for s in sources]
        if biases is not None:
            logits = [logit + b for logit, b in zip(logits, biases[j], strict=True)]
        pool = list(sources)
        if priors:
            logits.append(priors[j][1])
            pool.append(Source(priors[j][0], priors[j][1]))
        stacked = torch.stack(logits)
        results.append((depth_mix(pool, stacked.softmax(0)), stacked.logsumexp(0)))
    return results


@pytest.mark.parametrize(
    ("shape", "queries", "count", "options"),
    [
        ((1, 1), 1, 1, ""),
        ((3, 5), 2, 1, "biases"),
        ((2, 3, 33), 3, 4, "biases scales"),
        ((7, 16), 24, 10, "biases scales attached"),
        ((5, 48), 1, 7, "priors"),
        ((4, 20), 5, 2, "biases scales attached priors"),
        ((2, 12), 2, 49, "mixed"),
        ((40, 64), 9, 13, "biases scales"),
    ],
    ids=str,
)
def test_block_read(kind, shape, queries, count, options):
    draw = partial(drawn, device=kind.device)
    rows, width = shape[:-1], shape[-1]
    small = torch.promote_types(kind.stream, F32)
    mixed = "mixed" in options
    values = [
        draw(*shape, seed=n, dtype=kind.update if mixed and n % 2 else kind.stream)
        for n in range(count)
    ]
    scales = [
        draw(*rows, seed=100 + n, dtype=small) if "scales" in options and n % 3 else None
        for n in range(count)
    ]
    keys = draw(queries, width, seed=200, dtype=small, scale=2 * width**-0.5)
    biases = draw(queries, count, seed=201, dtype=small) if "biases" in options else None
    priors = []
    if "priors" in options:
        for j in range(queries):
            priors += [
                draw(*shape, seed=300 + j, dtype=kind.update),
                draw(*rows, seed=400 + j, dtype=small),
            ]
    inputs = [*values, *scales, keys, biases, *priors]
    ours, theirs = leaves_of(inputs), wide(inputs)

    def sources_of(leaves):
        attached = "attached" in options
        return [
            Source(v, inverse_rms(v, 1e-6), s if s is None or attached else s.detach())
            for v, s in zip(leaves[:count], leaves[count : 2 * count], strict=True)
        ]

    def pairs(leaves):
        flat = leaves[2 * count + 2 :]
        return list(zip(flat[::2], flat[1::2], strict=True))

    found, kept = ops.block_read(
        ops.operators(kind.backend),
        sources_of(ours),
        ours[2 * count],
        ours[2 * count + 1],
        priors=pairs(ours),
        read_dtype=kind.update,
    )
    expected = direct_block(
        sources_of(theirs), theirs[2 * count], theirs[2 * count + 1], pairs(theirs)
    )
    probe_seeds = itertools.count(500)
    used = []
    for j, ((mix, lse), (mix_, lse_)) in enumerate(zip(found, expected, strict=True)):
        assert mix.dtype == kind.update
        assert_near(mix, mix_, kind.bound, f"mix {j}")
        assert_near(lse, lse_, kind.bound, f"lse {j}")
        if queries > 2 and j == 1:
            continue  # a query whose results nobody uses
        for a, b in ((mix, mix_), (lse, lse_)):
            used.append((a, b, draw(*a.shape, seed=next(probe_seeds), dtype=F64)))
    # later readers of the sources send gradients through
    for a, b in list(zip(kept, theirs[:count], strict=True))[::2]:
        used.append((a.value, b, draw(*shape, seed=next(probe_seeds), dtype=F64)))
    torch.autograd.backward([a for a, _, _ in used], [p.to(a.dtype) for a, _, p in used])
    torch.autograd.backward([b for _, b, _ in used], [p for _, _, p in used])
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is not None and b.grad is not None:
            assert_near(a.grad, b.grad, 3 * kind.bound, f"gradient of input {i}")
