"""To the bit, or refused; and what splitting a batch otherwise changes."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

import resroute as rr


def test_deterministic_is_real(make_config):
    config = make_config(deterministic=True)

    class Asker(rr.Listener):
        def advance(self, step):
            assert torch.are_deterministic_algorithms_enabled()

    rr.train(config, stop_at=3, listener=Asker())
    assert not torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(rr.UserError) as caught:
            rr.train(config, resume=True)
        assert str(caught.value) == (
            f"{config.out}/checkpoints/step_000003: a deterministic run cannot go on to the bit, "
            f"since it differs in threads ({threads} there, {threads + 1} here)\n"
            "leave out --deterministic to go on all the same"
        )
        rr.train(dataclasses.replace(config, deterministic=False), resume=True, stop_at=4)
    finally:
        torch.set_num_threads(threads)


def test_deterministic_is_refused_where_it_cannot_be_had(monkeypatch):
    from resroute.training.device import deterministic_algorithms

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for device, message in (("mps", "not to be had on mps"), ("cuda", "needs CUBLAS_WORKSPACE")):
        with (
            pytest.raises(rr.UserError, match=message),
            deterministic_algorithms(torch.device(device)),
        ):
            pass


def refused(config):
    """Why a deterministic run does not go on."""
    with pytest.raises(rr.UserError) as caught:
        rr.train(dataclasses.replace(config, deterministic=True), resume=True)
    said, remedy = str(caught.value).splitlines()
    assert remedy == "leave out --deterministic to go on all the same"
    return said.partition("since it differs in ")[2]


def test_one_session_that_was_not_deterministic_is_enough(make_config, sign_checkpoint):
    config = make_config(deterministic=True)
    rr.train(config, stop_at=2)
    other = dataclasses.replace(config, deterministic=False, accumulation=4)
    rr.train(other, resume=True, stop_at=4)
    assert refused(other) == "deterministic (False there, True here)"
    # checkpoints of before that was written tell nothing
    folder = Path(config.out, "checkpoints/step_000004")
    state = json.loads((folder / "state.json").read_text())
    del state["numerics"]
    (folder / "state.json").write_text(json.dumps(state))
    sign_checkpoint(folder)
    assert refused(other).startswith("deterministic (unknown there, True here), device (unknown")
    assert rr.train(other, resume=True)["validation_loss"] > 0


def test_with_dropout_a_batch_that_is_split_otherwise_meets_other_masks(make_config, workers):
    options = {"model": {"dropout": 0.2}}
    whole = rr.train(make_config(out="whole", **options))
    config = make_config(out="parts", **options)
    rr.train(config, stop_at=3)

    def end(name, **change):
        out = Path(config.out).with_name(name)
        shutil.copytree(config.out, out)
        return dataclasses.replace(config, out=str(out), **change)

    (two, _) = workers.values("train", 2, config=end("two"), resume=True)
    split, again = (rr.train(end(name, accumulation=2), resume=True) for name in "ab")
    for found in (two, split):
        # more than rounding, and no more than what masks do
        assert 1e-5 < abs(found["validation_loss"] - whole["validation_loss"]) < 0.1
    # split in the same way it is the same run
    assert again["validation_loss"] == split["validation_loss"]
