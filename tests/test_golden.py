"""The first losses of every method stay what they are."""

import functools
import itertools
import json
from pathlib import Path

import pytest

from resroute.config import variants
from resroute.residual import ResidualConfig
from resroute.testing import GOLDEN, golden_losses

LOSSES = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Losses by name, found once."""
    folder = tmp_path_factory.mktemp("golden")
    return functools.cache(lambda name, number=0: golden_losses(GOLDEN[name], folder))


@pytest.mark.parametrize("name", GOLDEN)
def test_ten_steps(name, losses):
    assert len(losses(name)) == 10
    # across processors and versions
    assert losses(name) == pytest.approx(LOSSES[name], abs=1e-3)


@pytest.mark.parametrize("name", ["full_attn_res", "delta_attn_res-blocks", "wav-learned"])
def test_a_second_run_is_equal_to_the_bit(name, losses):
    assert losses(name, number=1) == losses(name)


def test_every_method_has_golden_losses():
    assert set(LOSSES) == set(GOLDEN)
    assert {type(c) for c in GOLDEN.values()} == set(variants(ResidualConfig).values())
    # the tolerance tells methods apart
    names = [variant for variant in LOSSES if variant in variants(ResidualConfig)]
    for first, second in itertools.combinations(names, 2):
        pairs = zip(LOSSES[first], LOSSES[second], strict=True)
        assert max(abs(a - b) for a, b in pairs) > 3e-3, (first, second)
