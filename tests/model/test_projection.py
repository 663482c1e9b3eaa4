"""bfloat16 products through float32: values, gradients, and when they are taken."""

import pytest
import torch
from torch import nn

from resroute.model import projection
from resroute.model.projection import project


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    monkeypatch.setattr(projection, "NARROW_IS_SLOW", True)


@pytest.fixture
def case():
    torch.manual_seed(0)
    layer = nn.Linear(24, 40)
    return layer, torch.randn(3, 50, 24).bfloat16(), torch.randn(3, 50, 40).bfloat16()


def exact(layer, x, grad):
    """In float64, from the rounded input: output and gradients."""
    weight = layer.weight.detach().double().requires_grad_()
    bias = layer.bias.detach().double().requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = nn.functional.linear(wide, weight, bias)
    return [y.detach(), *torch.autograd.grad(y, (wide, weight, bias), grad.double())]


# torch's own tracing of autograd functions warns
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("compiled", [False, True])
def test_is_nearer_to_the_exact_product_than_autocast(case, compiled):
    layer, x, grad = case
    x.requires_grad_()
    expected = exact(layer, x, grad)
    errors = []
    for function in (torch.compile(project, backend="aot_eager") if compiled else project,
                     lambda layer, x: layer(x)):  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            y = function(layer, x)
        assert y.dtype == torch.bfloat16
        found = [y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)]
        errors.append(
            [(a.double() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
        )
    wide, narrow = errors
    # one rounding of the output and of the input's gradient; the weight's is not rounded at all,
    # also where the backward pass is traced under autocast
    assert wide[0] < 3e-3
    assert wide[1] < 3e-3
    assert wide[2] < 1e-6
    assert all(a <= b * 1.05 for a, b in zip(wide, narrow, strict=True))


def test_frozen_inputs_and_weights(case):
    layer, x, grad = case
    expected = exact(layer, x, grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = project(layer, x)
    y.backward(grad)
    torch.testing.assert_close(layer.weight.grad.double(), expected[2], atol=1e-5, rtol=1e-5)
    layer.requires_grad_(False)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        project(layer, x).backward(grad)
    torch.testing.assert_close(x.grad.double(), expected[1], atol=2e-2, rtol=1e-2)


def calls(layer, x, monkeypatch):
    seen = []
    former = projection._WideLinear.apply
    monkeypatch.setattr(projection._WideLinear, "apply", lambda *a: seen.append(1) or former(*a))
    project(layer, x)
    return len(seen)


def test_when_it_is_taken(case, monkeypatch):
    layer, x, _ = case
    assert calls(layer, x.float(), monkeypatch) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(layer, x, monkeypatch) == 1
        assert calls(layer, x.float(), monkeypatch) == 1
    with torch.autocast("cpu", torch.float16):
        assert calls(layer, x.float(), monkeypatch) == 0
    narrow = layer.bfloat16()
    assert calls(narrow, x, monkeypatch) == 1
    # a token that is decoded waits for its weights
    assert calls(narrow, x[:1, :1], monkeypatch) == 0
    layer.register_forward_hook(lambda *_: None)
    assert calls(layer, x, monkeypatch) == 0


def test_other_modules_are_called(monkeypatch):
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    layer, x = Adapted(4, 4).bfloat16(), torch.ones(100, 4).bfloat16()
    assert torch.equal(project(layer, x), layer(x))
    monkeypatch.setattr(projection, "NARROW_IS_SLOW", False)
    assert calls(nn.Linear(4, 4).bfloat16(), x, monkeypatch) == 0


@pytest.mark.parametrize(
    ("machine", "amx", "expected"),
    [
        ("x86_64", False, True),
        ("x86_64", True, False),
        ("AMD64", False, True),
        ("arm64", False, False),
    ],
)
def test_which_processors_are_slow(monkeypatch, machine, amx, expected):
    monkeypatch.setattr(projection.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert projection.narrow_is_slow() is expected


def test_float64_is_left_alone_under_autocast():
    layer, x = nn.Linear(4, 4).double(), torch.randn(100, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert project(layer, x).dtype == torch.float64


def test_one_row_without_leading_axes():
    layer = nn.Linear(4, 3, bias=False)
    x = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        project(layer, x).float().sum().backward()
    assert layer.weight.grad.shape == (3, 4)
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0), atol=1e-2, rtol=1e-2)
