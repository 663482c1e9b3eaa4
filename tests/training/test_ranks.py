"""Several processes against one: equal losses, and checkpoints that any number can go on from."""

import pytest

import resroute as rr


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_learn_what_one_does(workers, make_config, parallel, size):
    (one,) = workers.values("train", config=make_config(out="one", evaluation_windows=5))
    config = make_config(out="several", evaluation_windows=5, parallel=parallel)
    several = workers.values("train", size, config=config)
    assert all(a["validation_loss"] == several[0]["validation_loss"] for a in several)
    assert several[0]["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-6)
    assert several[0]["processes"] == size
