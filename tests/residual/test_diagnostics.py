"""Standing between a policy and its model."""

import pytest
import torch

import resroute as rr
from resroute.residual.diagnostics import listening_to, replaced
from resroute.testing import random_stack


def test_what_was_there_comes_back():
    policy = rr.PreNorm().build(1, 2)

    def fail():
        with replaced(policy, read=3):
            assert policy.read == 3
            raise RuntimeError("boom")

    with replaced(policy, read=1, other=2):
        with pytest.raises(RuntimeError, match="boom"):
            fail()
        assert (policy.read, policy.other) == (1, 2)
    assert not {"read", "other"} & vars(policy).keys()


def test_events_come_in_order_and_without_gradients():
    policy = rr.BlockAttnRes(num_blocks=1).build(1, 3).double()
    stack, events = random_stack(2, 3), []

    def note(kind):
        return lambda *found: events.append(
            (kind, found[1] if len(found) > 1 else None, torch.is_grad_enabled())
        )

    with listening_to(
        policy,
        note("read"),
        note("write"),
        on_start=note("start"),
        on_given=note("given"),
    ):
        stack.run(policy)
    assert events == [
        ("start", None, False),
        ("read", 0, False), ("given", 0, True), ("write", 0, False),
        ("read", 1, False), ("given", 1, True), ("write", 1, False),
        ("read", 2, False),
    ]  # fmt: skip
