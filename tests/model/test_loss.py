from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from resroute.model import loss as loss_module
from resroute.model.loss import linear_cross_entropy
from resroute.testing import small_gpt

V = 13


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits are large, and four rows' are a part."""
    monkeypatch.setattr(loss_module, "_SMALL_BYTES", 0)
    monkeypatch.setattr(loss_module, "_PART_BYTES", 4 * 4 * V)


def draw(rows: int = 11, dim: int = 6, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, dim, generator=generator, dtype=torch.float64).to(dtype)
        for size in (rows, V)
    )
    targets = torch.randint(V, (rows,), generator=generator)
    targets[[1, 3]] = -100
    targets[7:8] = -100
    return [hidden, weight, targets]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def with_gradients(function: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, targets)
    # not one, so that the factor from outside matters
    (3 * loss).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("rows", [8, 9, 11])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_parts_give_the_plain_loss_and_its_gradients(
    rows: int, dtype: torch.dtype, atol: float
) -> None:
    tensors = draw(rows, dtype=dtype)
    expected = with_gradients(plain, *tensors)
    assert float(expected[0]) > 1
    found = with_gradients(linear_cross_entropy, *tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.usefixtures("in_parts")
def test_gradients_are_those_of_differences() -> None:
    hidden, weight, targets = draw(5, 3)
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), targets)
    assert torch.autograd.gradcheck(linear_cross_entropy, inputs)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_round_as_the_plain_loss_does(dtype: torch.dtype) -> None:
    tensors = draw(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        expected = with_gradients(plain, *tensors)
        found = with_gradients(linear_cross_entropy, *tensors)
    assert found[0].dtype == torch.float32
    assert [g.dtype for g in found[1:]] == [dtype, dtype]
    assert float(found[0]) == pytest.approx(float(expected[0]), abs=1e-6)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    exact = plain(*(t.double() if t.is_floating_point() else t for t in tensors))
    # it did compute in bfloat16
    assert 1e-6 < abs(float(found[0] - exact)) < 0.02


@pytest.mark.usefixtures("in_parts")
def test_autocast_leaves_float64_alone() -> None:
    tensors = draw()
    expected = with_gradients(plain, *tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(linear_cross_entropy, *tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("in_parts")
def test_on_the_meta_device_there_is_no_autocast() -> None:
    tensors = [tensor.to("meta") for tensor in draw()]
    assert linear_cross_entropy(*tensors).is_meta


@pytest.mark.usefixtures("in_parts")
def test_float16_is_left_to_autograd() -> None:
    hidden, weight, targets = draw(dtype=torch.float16)
    name = type(linear_cross_entropy(hidden.requires_grad_(), weight, targets).grad_fn).__name__
    assert name == "NllLossBackward0"


@pytest.mark.usefixtures("in_parts")
def test_without_targets_that_count_it_is_nan_with_zero_gradients() -> None:
    hidden, weight, targets = draw()
    loss, *gradients = with_gradients(linear_cross_entropy, hidden, weight, targets * 0 - 100)
    assert loss.isnan()
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    tensors = draw()
    expected = with_gradients(plain, *tensors)
    leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(tensors[:2])]
    linear_cross_entropy(*leaves, tensors[2]).backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(3 * leaves[1 - frozen].grad, expected[2 - frozen])
    leaves[1 - frozen].requires_grad_(False)
    assert not linear_cross_entropy(*leaves, tensors[2]).requires_grad


@pytest.mark.usefixtures("in_parts")
def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []
    forward = loss_module._forward

    def spy(*args: Any, **wants: bool) -> Any:
        wanted.extend(wants.values())
        return forward(*args, **wants)

    monkeypatch.setattr(loss_module, "_forward", spy)
    hidden, weight, targets = draw()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    assert wanted == [False, False]
    expected = plain(hidden.detach(), weight, targets)
    assert float(loss) == pytest.approx(float(expected), abs=1e-14)


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.usefixtures("in_parts")
def test_targets_beyond_the_vocabulary_are_an_error(bad: int) -> None:
    hidden, weight, targets = draw()
    targets[5] = bad
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(hidden.requires_grad_(), weight, targets)


def test_small_logits_are_kept_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = draw()
    hidden.requires_grad_()
    # what is kept with the large ones is the gradient by hidden
    for small, name in (
        (4 * 11 * V, "NllLossBackward0"),
        (4 * 11 * V - 1, "_LinearCrossEntropyBackward"),
    ):
        monkeypatch.setattr(loss_module, "_SMALL_BYTES", small)
        loss = linear_cross_entropy(hidden, weight, targets)
        assert type(loss.grad_fn).__name__ == name
        saved = loss.grad_fn.saved_tensors if "Linear" in name else []
        assert [tuple(tensor.shape) for tensor in saved if tensor is not None] == (
            [(11, 6)] if "Linear" in name else []
        )


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_trains_the_same_on_parts(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.arange(16).view(2, 8) % 11
    targets = (tokens * 3 + 1) % 11
    targets[0, :3] = -100
    models = [small_gpt(tie_embeddings=tied).double() for _ in range(2)]
    parts = models[0](tokens, targets)[1]
    monkeypatch.setattr(loss_module, "_SMALL_BYTES", 2**40)
    whole = models[1](tokens, targets)[1]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)
    parts.backward()
    whole.backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("in_parts")
def test_a_module_in_the_heads_place_is_called() -> None:
    model, tokens = small_gpt().double(), torch.arange(8).view(1, 8)
    head = model.head
    assert head is not None
    logits = model(tokens)[0]
    model.head = torch.nn.Sequential(head, torch.nn.Softsign())  # type: ignore[assignment]
    expected = F.cross_entropy(F.softsign(logits[0]), tokens[0])
    torch.testing.assert_close(model(tokens, tokens)[1], expected)


# dynamo makes an instance of the function, and torch warns of that
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("in_parts")
def test_it_can_be_traced_whole() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    tensors = draw()
    expected = with_gradients(plain, *tensors)
    torch.testing.assert_close(with_gradients(compiled, *tensors), expected, rtol=0, atol=1e-13)
    torch._dynamo.reset()
