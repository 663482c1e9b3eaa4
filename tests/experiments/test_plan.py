import dataclasses
from pathlib import Path

import pytest

from resroute.config import UserError
from resroute.experiments.plan import Plan, grown
from resroute.experiments.study import Contrast

FOLDER = Path("swept")


def plan(runs, **fields):
    return Plan(**{"suite": "paper", "baseline": None, "primary": None, "runs": runs, **fields})


def test_a_plan_grows_by_cells_and_keeps_what_was_said_first():
    old = plan(("a", "b"), baseline="PreNorm", rates="By hand.", primary_seeds=(3,))
    found = grown(old, plan(("b", "c"), primary_seeds=(5,)), FOLDER)
    assert found == plan(
        ("a", "b", "c"), baseline="PreNorm", rates="By hand.", primary_seeds=(3, 5)
    )
    # fewer seeds than were planned are no new plan
    assert grown(found, plan(("c",), primary_seeds=(4,)), FOLDER).primary_seeds == (3, 5)
    # a first part without the baseline's method
    late = grown(plan(("a",)), plan(("b",), baseline="PreNorm"), FOLDER)
    assert late == plan(("a", "b"), baseline="PreNorm")


def test_what_was_declared_is_not_declared_anew():
    contrast = Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=48)
    old = plan(("a",), primary=contrast, baseline="PreNorm")
    told = "WAV minus Block AttnRes at 48 layers"
    for other in (
        plan(("a",), baseline="PreNorm"),
        plan(("a",), primary=dataclasses.replace(contrast, num_layers=24), baseline="PreNorm"),
        plan(("a",), primary=contrast, baseline="WAV"),
    ):
        with pytest.raises(UserError, match=f"swept was started with the primary contrast {told}"):
            grown(old, other, FOLDER)
    with pytest.raises(UserError, match="swept holds the suite 'paper', not 'width'"):
        grown(old, plan(("a",), suite="width"), FOLDER)
