import dataclasses

import pytest

import resroute as rr
from resroute.experiments.cell import FINISHED, Outcome
from resroute.experiments.suites import Design, make_suite
from resroute.training import train


@pytest.fixture
def make_design(make_config):
    """Designs of cells that take a fraction of a second."""

    def make(**options):
        base = dataclasses.replace(make_config(rr.PreNorm()), out=None)
        chosen = {
            "bases": (base,),
            "layers": (2, 4),
            "seeds": 2,
            "primary_seeds": 2,
            "blocks": 1,
            "methods": (rr.BlockAttnRes(num_blocks=1), rr.WAV(num_blocks=1)),
        }
        return Design(**{**chosen, **options})

    return make


@pytest.fixture
def make_paper(make_design):
    """The suite `paper` on such a design."""
    return lambda **options: make_suite("paper", make_design(**options))


class Here:
    """An engine that trains in this process, one cell after the other."""

    jobs = 1

    def __init__(self):
        self.trained = []
        self.is_closed = False

    def train(self, task):
        train(task.config, resume=True)
        return Outcome(name=task.name, code=FINISHED, message="")

    def run(self, tasks, logs):
        try:
            for task in tasks:
                yield None
                self.trained.append(task.name)
                yield self.train(task)
        finally:
            self.is_closed = True


@pytest.fixture
def here():
    return Here()
