"""What a step asks of a device, and how its speed is told."""

import json
import types
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.training.distributed import World
from resroute.training.learner import Learner


class OnDevice(torch.Tensor):
    """As of a device without float64, which is waited for where its numbers are asked for."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        asked = [*arguments, *(options or {}).values()]
        if function is torch.Tensor.double or any(a is torch.float64 for a in asked):
            raise TypeError("no float64 here")
        numbers = (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist)
        if function in (*numbers, torch.Tensor.__float__):
            cls.waits += 1
        return super().__torch_function__(function, types, arguments, options or {})


def test_a_step_needs_no_float64_and_waits_once(make_config, cheap_corpus, monkeypatch):
    config = make_config(batch_size=8, accumulation=4)
    real, losses = Learner._loss, []

    def loss_of(learner, inputs, targets):
        loss = real(learner, inputs, targets)
        losses.append((loss.item(), int((targets >= 0).sum())))
        return loss.as_subclass(OnDevice)

    monkeypatch.setattr(Learner, "_loss", loss_of)
    monkeypatch.setattr(OnDevice, "waits", 0)
    learner = Learner(config, cheap_corpus, World(), torch.device("cpu"), torch.float32)
    found = learner.gradients(0).loss
    assert OnDevice.waits == 1
    counted = sum(count for _, count in losses)
    assert found == sum(loss * (count / counted) for loss, count in losses)


@pytest.mark.parametrize("first", [0, 1])
def test_speed_is_over_all_steps_since_the_last_line(make_config, monkeypatch, first):
    seconds, update = [100.0], Learner.update

    def slow(learner, rate):
        # the n-th step takes n seconds
        seconds.append(seconds[-1] + len(seconds))
        update(learner, rate)

    clock = types.SimpleNamespace(perf_counter=lambda: seconds[-1])
    monkeypatch.setattr("resroute.training.trainer.time", clock)
    monkeypatch.setattr(Learner, "update", slow)
    config = make_config(log_every=3)
    rr.train(config, stop_at=first)
    summary = rr.train(config, resume=True)
    records = map(json.loads, Path(config.out, "metrics.jsonl").read_text().splitlines())
    found = [(r["step"], r["tokens_per_second"]) for r in records if r["kind"] == "train"]
    # a session knows of its own steps alone
    early = 192 * 3 / 6 if first == 0 else 192 * 2 / 5
    assert found == [(3, early), (6, 192 * 3 / 15)]
    assert summary["tokens_per_second"] == (early + 192 * 3 / 15) / 2
