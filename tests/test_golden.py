"""The first losses of every method stay what they are."""

import json
from pathlib import Path

import pytest

from resroute.config import variants
from resroute.residual import ResidualConfig
from resroute.testing import GOLDEN, golden_losses

LOSSES = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_ten_steps(name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "golden"
    folder.mkdir(exist_ok=True)
    losses = golden_losses(GOLDEN[name], folder)
    assert len(losses) == 10
    # across processors and versions; to the bit only on one machine
    assert losses == pytest.approx(LOSSES[name], abs=1e-3)
    assert golden_losses(GOLDEN[name], folder) == losses


def test_every_method_has_golden_losses():
    assert set(LOSSES) == set(GOLDEN)
    assert {type(c) for c in GOLDEN.values()} == set(variants(ResidualConfig).values())
    # methods differ from each other by more than the tolerance
    last = sorted(losses[-1] for losses in LOSSES.values())
    assert last[-1] - last[0] > 0.1
