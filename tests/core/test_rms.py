import math

import pytest
import torch

from resroute.core import accumulate, compute_dtype, inverse_rms, matching_factor


def test_inverse_rms_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert inverse_rms(x, 0.0)[0].item() == pytest.approx(1 / math.sqrt(12.5))
    assert inverse_rms(x, 1e-6)[1].item() == pytest.approx(1e3)


def test_inverse_rms_widens_half_precision():
    x = torch.full((2, 4), 300.0, dtype=torch.float16)
    # 300^2 overflows float16
    assert inverse_rms(x, 0.0).tolist() == pytest.approx([1 / 300] * 2)
    assert inverse_rms(x, 0.0).dtype == torch.float32
    assert compute_dtype(torch.bfloat16) == torch.float32
    assert inverse_rms(x.double(), 0.0).dtype == torch.float64


def test_matching_factor_is_a_capped_ratio_of_rms():
    state, detail = torch.tensor([1 / 6.0, 1 / 6.0]), torch.tensor([1 / 4.0, 1 / 2.0])
    assert matching_factor(state, detail, None).tolist() == pytest.approx([1.5, 3.0])
    assert matching_factor(state, detail, 2.0).tolist() == pytest.approx([1.5, 2.0])


def test_accumulate_rounds_once():
    total = torch.tensor([1.0], dtype=torch.bfloat16)
    # half a unit in the last place of bfloat16 at one, and a little more
    update = torch.tensor([2.0**-8 + 2.0**-17])
    assert accumulate(total, update, dtype=torch.bfloat16).item() == 1.0 + 2.0**-7
    # rounding the update first would lose the little more, and then tie to even
    assert (total + update.to(torch.bfloat16)).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_accumulate_without_coefficient_is_the_plain_sum_to_the_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    total, update = (torch.randn(64, 8, generator=generator).to(dtype) for _ in range(2))
    assert torch.equal(accumulate(total, update, dtype=dtype), total + update)
    ones = torch.ones(8)
    assert torch.equal(accumulate(total, update, ones, dtype=dtype), total + update)


def test_accumulate_with_coefficients():
    total, update = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert accumulate(None, update, -1.0, dtype=torch.float32).tolist() == [-10.0, -20.0]
    assert accumulate(total, update, 0.0, dtype=torch.float32).tolist() == [1.0, 2.0]
    gains = torch.tensor([0.5, -0.5])
    assert accumulate(total, update, gains, dtype=torch.float32).tolist() == [6.0, -8.0]
