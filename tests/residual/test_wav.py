"""WAV's sources, by hand, and its options."""

import pytest
import torch

import resroute as rr
from resroute.residual.routed import RoutedStream

E = torch.tensor([[1.0, 0.0]], dtype=torch.float64)


def written(policy, updates) -> RoutedStream:
    stream = policy.start(E)
    for site, update in enumerate(updates):
        stream = policy.write(stream, site, torch.tensor([update], dtype=torch.float64))
    return stream


def test_sources_of_a_block_by_hand():
    policy = rr.WAV(block_layers=2, eps=0.0, rho_max=None).build(4, 2).double()
    updates = [(1.0, 0.0), (0.0, 2.0), (3.0, 0.0), (0.0, 4.0)]
    _, state, phase, split = written(policy, updates).sources
    assert state.value.tolist() == [[4.0, 6.0]]
    # attention minus mlp, first half minus second
    assert phase.value.tolist() == [[4.0, -6.0]]
    assert split.value.tolist() == [[-2.0, -2.0]]
    assert state.scale is None
    assert phase.scale.item() == pytest.approx(1.0)
    # rms(C) / rms(Q) = sqrt(52 / 8)
    assert split.scale.item() == pytest.approx(6.5**0.5)
    assert split.inverse_rms.item() == pytest.approx(0.5)


def test_running_details_follow_the_papers_rule():
    policy = rr.WAV(block_layers=2).build(2, 2).double()
    stream = written(policy, [(1.0, 2.0)])
    # at a block's second site phase, split and sum are all its first update
    assert all(
        torch.equal(total, torch.tensor([[1.0, 2.0]], dtype=torch.float64))
        for total in policy._bases(stream)
    )
    stream = written(policy, [(1.0, 2.0), (0.5, 0.5)])
    state, phase, split = policy._bases(stream)
    # in the first half split is the sum
    assert torch.equal(split, state)
    assert phase.tolist() == [[0.5, 1.5]]


def test_a_shorter_last_block_halves_its_own_size():
    policy = rr.WAV(num_blocks=2, bases=("split",)).build(5, 2)
    assert [len(block) for block in policy.blocks] == [6, 4]
    signs = [row[0] for row in policy.signs]
    assert signs == [1.0] * 3 + [-1.0] * 3 + [1.0] * 2 + [-1.0] * 2


@pytest.mark.parametrize(
    ("rho_max", "expected"), [(2.0, 2.0), (None, 6.5**0.5), (0.0, 0.0), (3.0, 6.5**0.5)]
)
def test_rho_max_caps_the_factor(rho_max, expected):
    policy = rr.WAV(block_layers=2, rho_max=rho_max, eps=0.0).build(2, 2).double()
    stream = written(policy, [(1.0, 0.0), (0.0, 2.0), (3.0, 0.0), (0.0, 4.0)])
    assert stream.sources[3].scale.item() == pytest.approx(expected)


def test_matching_decides_where_gradients_go():
    grads = {}
    for matching in ("detached", "attached", "off"):
        policy = rr.WAV(block_layers=2, matching=matching, rho_max=None).build(2, 2).double()
        first = torch.tensor([[1.0, 0.5]], dtype=torch.float64, requires_grad=True)
        stream = policy.write(policy.start(E), 0, first)
        stream = policy.write(stream, 1, torch.tensor([[0.25, 2.0]], dtype=torch.float64))
        # the scaled value of the phase source
        _, source = policy._pool(stream)[0][2], policy._pool(stream)[1][2]
        scale = 1.0 if source.scale is None else source.scale
        (source.value * scale).sum().backward()
        grads[matching] = first.grad
    assert torch.equal(grads["off"], torch.ones(1, 2, dtype=torch.float64))
    assert grads["detached"][0, 0] == grads["detached"][0, 1] != 1.0
    assert grads["attached"][0, 0] != grads["attached"][0, 1]


def test_bias_of_finished_and_running_details():
    options = {"block_layers": 1, "bases": ("phase",), "detail_bias": -3.0}
    for bias_running in (True, False):
        policy = rr.WAV(**options, bias_running=bias_running).build(2, 2).double()
        # three sources with equal keys: the logits are the biases
        stream = written(policy, [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)])
        names, weights = policy.weights(stream, 3)
        assert names == ["embedding", "state 0", "phase 0", "running state", "running phase"]
        odds = weights[0] / weights[0, 0]
        low = pytest.approx(torch.e**-3)
        assert odds[2].item() == low
        assert odds[4].item() == (low if bias_running else pytest.approx(1.0))


def test_parameters_by_name_and_shape():
    def shapes(**options):
        return {k: tuple(v.shape) for k, v in rr.WAV(**options).build(8, 5).state_dict().items()}

    base = {"query": (17, 5), "key_gain": (17, 5)}
    assert shapes() == {**base, "detail_bias": (16, 2)}
    assert shapes(details_in_readout=True) == {**base, "detail_bias": (17, 2)}
    assert shapes(bases=("split",), learn_bases=True) == {
        **base, "detail_bias": (16, 1), "basis": (16, 1),
    }  # fmt: skip
    assert shapes(gated=True, key_gain=False, bases=()) == {"query": (17, 5), "gate": (17,)}
    count = sum(v.numel() for v in rr.WAV(num_blocks=4).build(48, 512).parameters())
    assert 99_000 < count < 100_000


def test_a_fixed_bias_is_saved_but_not_trained():
    policy = rr.WAV(learn_detail_bias=False).build(8, 5)
    assert "detail_bias" in policy.state_dict()
    assert "detail_bias" not in dict(policy.named_parameters())
    assert torch.equal(policy.detail_bias, torch.full((16, 2), -2.0))


def test_learned_bases_stay_zero_sum():
    policy = rr.WAV(num_blocks=2, learn_bases=True).build(4, 5).double()
    assert policy.basis.tolist() == policy.signs
    torch.nn.init.normal_(policy.basis, generator=torch.Generator().manual_seed(0))
    for block in policy.blocks:
        columns = torch.stack([torch.stack(tuple(policy.coefficients(s))) for s in block])
        torch.testing.assert_close(columns.sum(0), torch.zeros(2, dtype=torch.float64))


def test_random_bases_depend_on_seed_and_block():
    signs = {
        seed: [row[0] for row in rr.WAV(bases=("random",), basis_seed=seed).build(24, 2).signs]
        for seed in range(3)
    }
    assert signs[0] != signs[1] != signs[2]
    assert signs[0][:12] != signs[0][12:24]
    again = [row[0] for row in rr.WAV(bases=("random",)).build(24, 2).signs]
    assert again == signs[0]


def test_haares_is_wav_with_the_split_basis():
    assert rr.HAARES(num_blocks=3, rho_max=1.0) == rr.WAV(
        num_blocks=3, rho_max=1.0, bases=("split",)
    )
    assert rr.HAARES().label == "HAARES"
    assert rr.WAV(bases=("phase",)).label == "WAV (phase)"
    assert rr.WAV().label == "WAV"
    assert rr.WAV(bases=()).label == "WAV (no basis)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bases": ("phase", "splt")}, r"unknown basis 'splt' \(did you mean 'split'\?\)"),
        ({"bases": ("split", "split")}, "bases must differ"),
        ({"matching": "on"}, "matching must be 'detached', 'attached' or 'off', got 'on'"),
        ({"rho_max": -1.0}, "rho_max must be at least 0 and at most 1e"),
        ({"rho_max": float("inf")}, "or None for no limit, got inf"),
        ({"detail_bias": float("nan")}, r"detail_bias must be within 1e\+06, got nan"),
        ({"eps": -1e-6}, "eps must be at least 0 and at most 1, got -1e-06"),
        ({"num_blocks": 4, "block_layers": 2}, "num_blocks or block_layers, not both"),
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1, got 0"),
        ({"block_layers": 0}, "block_layers must be a whole number of at least 1, got 0"),
    ],
)
def test_settings_out_of_range_name_rule_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        rr.WAV(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 13}, "num_blocks=13 is more than the stack's 12 layers"),
        ({"block_layers": 13}, "block_layers=13 is more than the stack's 12 layers"),
        ({"bases": ("duplicate",), "learn_bases": True}, "leaves nothing of the basis 'duplicate'"),
    ],
)
def test_settings_that_do_not_fit_the_stack(options, message):
    with pytest.raises(ValueError, match=message):
        rr.WAV(**options).build(12, 8)


def test_blocks():
    assert rr.BlockAttnRes().build(12, 4).num_blocks == 4
    assert rr.BlockAttnRes().build(3, 4).num_blocks == 3
    assert rr.BlockAttnRes(block_layers=5).build(12, 4).num_blocks == 3
    assert rr.DeltaAttnRes(num_blocks=2).build(4, 4).num_blocks == 2
    with pytest.warns(UserWarning, match="5 blocks of 12 layers make 4 blocks of 3 layers"):
        assert rr.BlockAttnRes(num_blocks=5).build(12, 4).num_blocks == 4
    with pytest.raises(ValueError, match="num_blocks=5 is more than the stack's 4 layers"):
        rr.DeltaAttnRes(num_blocks=5).build(4, 4)
    with pytest.raises(ValueError, match="num_blocks must be a whole number of at least 1, got 0"):
        rr.DeltaAttnRes(num_blocks=0)


def test_one_layer_a_block_warns_where_bases_coincide():
    with pytest.warns(UserWarning, match="phase and split bases coincide"):
        policy = rr.WAV(block_layers=1).build(2, 4)
    assert all(phase == split for phase, split in policy.signs)
    rr.WAV(block_layers=1, bases=("split",)).build(2, 4)


def test_blocks_of_one_site_warn_that_a_basis_is_zero():
    with pytest.warns(UserWarning, match="in a block of 1 the basis 'split' is zero"):
        policy = rr.WAV(block_layers=1, bases=("split",)).build(3, 4, kinds=("mixer",))
    assert policy.signs == [[0.0]] * 3


def test_other_kinds_of_sublayers():
    kinds = ("attention", "conv", "mlp")
    policy = rr.WAV(num_blocks=2).build(4, 4, kinds=kinds)
    assert policy.query.shape == (13, 4)
    assert [row[0] for row in policy.signs[:6]] == [1.0, 0.0, -1.0, 1.0, 0.0, -1.0]
    # nine sites: the middle one has no split sign
    odd = rr.WAV(block_layers=3, bases=("split",)).build(3, 4, kinds=kinds)
    assert [row[0] for row in odd.signs] == [1.0] * 4 + [0.0] + [-1.0] * 4
    with pytest.raises(ValueError, match="phase basis needs as many attention as mlp"):
        rr.WAV().build(4, 4, kinds=("attention", "attention", "mlp"))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_layer_scale_needs_a_finite_init(value):
    if value == 0.0:
        assert rr.LayerScale(init=value).build(2, 2).scale.abs().max() == 0
        return
    with pytest.raises(ValueError, match="LayerScale needs an init within 1e6"):
        rr.LayerScale(init=value)


def test_defaults_never_warn_of_a_number_that_nobody_asked_for(recwarn):
    assert rr.WAV().build(6, 4).num_blocks == 3
    assert rr.BlockAttnRes().build(9, 4).num_blocks == 3
    assert not recwarn


def test_warnings_point_to_the_caller():
    with pytest.warns(UserWarning, match="make 4 blocks") as caught:
        rr.BlockAttnRes(num_blocks=5).build(12, 4)
    assert caught[0].filename == __file__


def test_coinciding_bases_are_told_by_their_signs():
    kinds = ("attention", "attention", "mlp", "mlp")
    with pytest.warns(UserWarning, match="phase and split bases coincide"):
        rr.WAV(block_layers=1).build(2, 4, kinds=kinds)
    with pytest.warns(
        UserWarning, match="with one layer a block the random and random_2 bases coincide"
    ):
        rr.WAV(block_layers=1, bases=("random", "random_2")).build(2, 4)
    rr.WAV(block_layers=1, bases=("duplicate", "duplicate_2")).build(2, 4)
    # here phase is split's negative: another direction
    rr.WAV(block_layers=1).build(2, 4, kinds=("mlp", "attention"))
