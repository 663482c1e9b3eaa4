"""Health checks at the end of a training, on models that were trained."""

import dataclasses
import json
from pathlib import Path

import pytest

import resroute as rr
from resroute.training.learner import Learner


class Ear(rr.Listener):
    def __init__(self):
        self.heard = []

    def health(self, findings):
        self.heard.append(findings)

    def end(self, summary):
        self.heard.append("end")


def health_of(run):
    return json.loads(Path(run, "health.json").read_text())


LONG = {
    "steps": 120,
    "evaluate_every": 120,
    "checkpoint_every": 120,
    "log_every": 40,
    "model": {"context": 16},
}
METHODS = {
    "pre_norm": rr.PreNorm(),
    "re_zero": rr.ReZero(),
    "full_gated": rr.FullAttnRes(gated=True),
    "wav": rr.WAV(num_blocks=1, learn_bases=True),
}


@pytest.mark.parametrize("residual", METHODS.values(), ids=METHODS)
def test_models_that_train_are_healthy(make_config, residual):
    config, ear = make_config(residual, **LONG), Ear()
    rr.train(config, listener=ear)
    assert health_of(config.out) == {"format_version": 1, "step": 120, "findings": []}
    assert ear.heard == [[], "end"]


def test_a_router_that_does_not_learn_is_found(make_config, monkeypatch):
    def without_policy(learner, rate):
        for parameter in learner.model.policy.parameters():
            parameter.grad = None
        update(learner, rate)

    update = Learner.update
    monkeypatch.setattr(Learner, "update", without_policy)
    config, ear = make_config(rr.BlockAttnRes(num_blocks=2), **LONG), Ear()
    rr.train(config, listener=ear)
    (finding,) = ear.heard[0]
    assert (finding.check, finding.severity) == ("dead mixing", "warning")
    assert "queries of norm 0.0e+00 or less" in finding.saw
    assert health_of(config.out)["findings"] == [dataclasses.asdict(finding)]
    # a finished run is read, not trained and looked at again
    before = Path(config.out, "health.json").read_bytes()
    rr.train(config, listener=ear)
    assert len(ear.heard) == 2
    assert Path(config.out, "health.json").read_bytes() == before


CHECKS = {"dead mixing": rr.ReZero(), "closed gates": rr.FullAttnRes(gated=True, key_gain=False)}


@pytest.mark.parametrize(("check", "residual"), CHECKS.items(), ids=CHECKS)
def test_shared_out_parameters_are_checked_whole(workers, make_config, check, residual):
    options = {**LONG, "steps": 100, "learning_rate": 1e-7, "peak_flops": 1e10, "batch_size": 2}
    config = make_config(residual, parallel="fsdp", **options)
    workers.values("train_watched", 2, config=config)
    first = health_of(config.out)["findings"][0]
    assert (first["check"], first["severity"]) == (check, "warning")
    # the largest of all, not of a process's share
    *_, parameter = rr.load(config.out)[0].policy.parameters()
    largest = parameter.abs().max().item()
    assert largest > 0
    assert f"{largest:.1e}" in first["saw"]
