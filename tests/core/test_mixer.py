import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resroute.core import Source, depth_mix, depth_weights, inverse_rms

EPS = 1e-6


def sources_of(values, eps=EPS):
    return [Source(value, inverse_rms(value, eps)) for value in values]


def random_problem(num_sources, dim, seed, tokens=3):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [draw(tokens, dim) for _ in range(num_sources)], draw(dim), 1 + 0.5 * draw(dim)


problems = st.builds(
    random_problem,
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(0, 2**31),
)


def test_weights_and_mix_by_hand():
    # rms of (3, 4) is sqrt(12.5), of (1, -1) one; the query sees the first channel alone
    values = [torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -1.0]])]
    query, gain, bias = torch.tensor([2.0, 0.0]), torch.tensor([0.5, 9.0]), torch.tensor(-2.0)
    weights = depth_weights(sources_of(values, 0.0), query, gain, [None, bias])
    odds = math.exp((1.0 - 2.0) - 3.0 / math.sqrt(12.5))
    assert weights[:, 0].tolist() == pytest.approx([1 / (1 + odds), odds / (1 + odds)])
    mix = depth_mix(sources_of(values), weights)
    share = 1 / (1 + odds)
    assert mix[0].tolist() == pytest.approx([3 * share + 1 - share, 4 * share - (1 - share)])


def test_scale_multiplies_the_value_and_not_the_key():
    values, query, gain = random_problem(2, 4, 0)
    plain = sources_of(values)
    scaled = [plain[0], plain[1]._replace(scale=torch.full((3,), 2.0, dtype=torch.float64))]
    weights = depth_weights(plain, query, gain, [None, None])
    assert torch.equal(depth_weights(scaled, query, gain, [None, None]), weights)
    expected = weights[0, :, None] * values[0] + 2 * weights[1, :, None] * values[1]
    torch.testing.assert_close(depth_mix(scaled, weights), expected)


@given(problems)
@settings(max_examples=60, deadline=None)
def test_weights_are_a_softmax_and_the_mix_lies_in_the_hull(problem):
    values, query, gain = problem
    sources = sources_of(values)
    weights = depth_weights(sources, query, gain, [None] * len(values))
    torch.testing.assert_close(weights.sum(0), torch.ones(3, dtype=torch.float64))
    assert (weights > 0).all()
    mix, stacked = depth_mix(sources, weights), torch.stack(values)
    assert (mix <= stacked.amax(0) + 1e-12).all()
    assert (mix >= stacked.amin(0) - 1e-12).all()


@given(problems)
@settings(max_examples=40, deadline=None)
def test_a_zero_query_is_the_plain_mean(problem):
    values, query, gain = problem
    sources = sources_of(values)
    weights = depth_weights(sources, torch.zeros_like(query), gain, [None] * len(values))
    torch.testing.assert_close(depth_mix(sources, weights), torch.stack(values).mean(0))


@given(problems, st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_weights_do_not_see_the_scale_of_keys(problem, factor):
    values, query, gain = problem
    # without eps the invariance is exact
    before = depth_weights(sources_of(values, 0.0), query, gain, [None] * len(values))
    values = [values[0] * factor, *values[1:]]
    after = depth_weights(sources_of(values, 0.0), query, gain, [None] * len(values))
    torch.testing.assert_close(after, before)


@given(problems, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_sources_does_not_matter(problem, random):
    values, query, gain = problem
    order = list(range(len(values)))
    random.shuffle(order)
    sources = sources_of(values)
    weights = depth_weights(sources, query, gain, [None] * len(values))
    shuffled = [sources[i] for i in order]
    moved = depth_weights(shuffled, query, gain, [None] * len(values))
    torch.testing.assert_close(moved, weights[order])
    torch.testing.assert_close(depth_mix(shuffled, moved), depth_mix(sources, weights))


def test_gradients():
    values, query, gain = random_problem(3, 4, 1)
    inputs = [t.requires_grad_() for t in (*values, query, gain)]
    bias = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def read(*tensors):
        sources = sources_of(tensors[:3])
        weights = depth_weights(sources, tensors[3], tensors[4], [None, tensors[5], None])
        return depth_mix(sources, weights)

    assert torch.autograd.gradcheck(read, (*inputs, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sources_are_mixed_in_float32(dtype):
    values, query, gain = random_problem(4, 16, 2)
    halves = [value.to(dtype) for value in values]
    weights = depth_weights(sources_of(halves), query.float(), gain.float(), [None] * 4)
    mix = depth_mix(sources_of(halves), weights)
    assert mix.dtype == torch.float32
    wide = [half.double() for half in halves]
    expected = depth_mix(sources_of(wide), depth_weights(sources_of(wide), query, gain, [None] * 4))
    torch.testing.assert_close(mix.double(), expected, atol=1e-5, rtol=1e-5)


def test_autocast_changes_no_bit():
    values, query, gain = random_problem(4, 16, 3)
    values, query, gain = [v.float() for v in values], query.float(), gain.float()
    plain = depth_weights(sources_of(values), query, gain, [None] * 4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = depth_weights(sources_of(values), query, gain, [None] * 4)
        mix = depth_mix(sources_of(values), cast)
    assert torch.equal(cast, plain)
    assert torch.equal(mix, depth_mix(sources_of(values), plain))


def test_the_meta_device_gives_shapes():
    values = [torch.empty(2, 3, 4, device="meta") for _ in range(3)]
    weights = depth_weights(sources_of(values), values[0][0, 0], None, [None] * 3)
    assert weights.shape == (3, 2, 3)
    assert depth_mix(sources_of(values), weights).is_meta
