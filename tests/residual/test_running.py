"""Running sums in few streams: the combinations give what the signs say."""

import pytest
import torch

from resroute.core import signs
from resroute.residual.running import RunningPlan, S, X, Y, running_plan, separate_plan


def rows(names, length, kinds=("attention", "mlp"), seed=0):
    cycle = [kinds[i % len(kinds)] for i in range(length)]
    columns = [signs(name, cycle, seed) for name in names]
    return [tuple(row) for row in zip(*columns, strict=True)] if columns else [()] * length


def kept(plan: RunningPlan, updates, written):
    """The streams after some updates, kept as the plan says."""
    streams = {}
    for i, update in enumerate(updates[:written]):
        if plan.snapshot == i:
            streams[S] = streams.get(X, 0) + streams.get(Y, 0)
        target = plan.stream_of[i]
        streams[target] = streams.get(target, 0) + update
    return streams


@pytest.mark.parametrize("length", [2, 4, 6, 10, 24])
@pytest.mark.parametrize(
    "names",
    [(), ("phase",), ("split",), ("phase", "split"), ("split", "duplicate"), ("random",),
     ("split", "random"), ("duplicate",)],
    ids="+".join,
)  # fmt: skip
def test_every_basis_is_the_signed_sum(names, length):
    table = rows(names, length, seed=3)
    plan = running_plan(table)
    assert plan is not None
    updates = torch.randn(length, generator=torch.Generator().manual_seed(0)).double().tolist()
    for written in range(1, length + 1):
        streams, moment = kept(plan, updates, written), plan.moments[written]
        assert tuple(sorted(streams)) == moment.streams
        columns = [[1.0] * length, *(list(c) for c in zip(*table, strict=True))]
        for column, row in zip(columns, moment.coefficients, strict=True):
            expected = sum(s * u for s, u in zip(column, updates[:written], strict=False))
            found = sum(c * streams[name] for c, name in zip(row, moment.streams, strict=True))
            assert found == pytest.approx(expected, abs=1e-12)


def test_wav_keeps_three_streams_and_touches_one():
    plan = running_plan(rows(("phase", "split"), 8))
    assert plan.stream_of == (X, Y) * 4
    assert plan.snapshot == 4
    assert [moment.streams for moment in plan.moments] == [
        (), (X,), (X, Y), (X, Y), (X, Y), *[(X, Y, S)] * 4
    ]  # fmt: skip
    assert plan.moments[8].coefficients == ((1, 1, 0), (1, -1, 0), (-1, -1, 2))


@pytest.mark.parametrize(
    ("names", "length", "kinds"),
    [
        (("phase", "random"), 8, ("attention", "mlp")),
        # the middle site of an odd block is left out of split
        (("split",), 3, ("mixer",)),
        (("phase",), 6, ("attention", "mlp", "conv")),
    ],
)
def test_other_signs_have_no_such_form(names, length, kinds):
    assert running_plan(rows(names, length, kinds, seed=3)) is None


def test_separate_streams_are_the_bases():
    plan = separate_plan(4, 3)
    assert plan.moments[0].coefficients == ()
    assert plan.moments[4].coefficients == ((1, 0, 0), (0, 1, 0), (0, 0, 1))
