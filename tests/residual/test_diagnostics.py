import pytest
import torch

import resroute as rr
from resroute.residual.diagnostics import capture, depth_map
from resroute.testing import random_stack, randomise


def test_capture_sees_what_the_reads_use_and_leaves_the_policy_as_it_was():
    policy = rr.WAV(num_blocks=2).build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    plain = stack.run(policy)
    with capture(policy) as seen:
        captured = stack.run(policy)
    assert torch.equal(captured[1], plain[1])
    assert sorted(seen) == list(range(9))
    assert "read" not in vars(policy)
    assert "finish" not in vars(policy)

    stream = policy.start(stack.embedding)
    for site in range(8):
        names, weights = policy.weights(stream, site)
        assert seen[site][0] == names
        torch.testing.assert_close(seen[site][1], weights.mean(0))
        normalised = captured[0][site]
        scale = torch.rsqrt(normalised.square().mean(-1, keepdim=True) + 1e-6)
        stream = policy.write(stream, site, torch.tanh(normalised * scale @ stack.weights[site]))
    torch.testing.assert_close(seen[8][1], policy.weights(stream, 8)[1].mean(0))


def test_capture_ends_when_the_model_fails():
    policy = rr.BlockAttnRes(num_blocks=2).build(4, 5)
    with pytest.raises(RuntimeError, match="boom"), capture(policy):
        raise RuntimeError("boom")
    assert "read" not in vars(policy)


def test_depth_map_is_a_table_with_gaps():
    policy = rr.WAV(num_blocks=2, bases=("split",)).build(2, 3).double()
    table = depth_map(policy, lambda: random_stack(4, 3).run(policy))
    assert table["sites"] == ["0 attention", "0 mlp", "1 attention", "1 mlp", "readout"]
    assert table["sources"] == [
        "embedding", "state 0", "split 0", "state 1", "running state", "running split",
    ]  # fmt: skip
    rows = table["weights"]
    assert rows[0] == [1.0] + [None] * 5
    low = torch.e**-2
    assert rows[1] == pytest.approx(
        [1 / (2 + low), None, None, None, 1 / (2 + low), low / (2 + low)]
    )
    assert rows[4] == pytest.approx([1 / 3, 1 / 3, None, 1 / 3, None, None])


def test_methods_without_routing_have_no_map():
    policy = rr.PreNorm().build(2, 3)
    assert depth_map(policy, lambda: random_stack(4, 3, dtype=torch.float32).run(policy)) is None


def test_captures_may_be_nested():
    policy = rr.BlockAttnRes(num_blocks=2).build(4, 5).double()
    stack = random_stack(8, 5)
    with capture(policy) as outer:
        with capture(policy) as inner:
            stack.run(policy)
        assert sorted(inner) == sorted(outer) == list(range(9))
        outer.clear()
        stack.run(policy)
        assert sorted(outer) == list(range(9))
    assert "read" not in vars(policy)
