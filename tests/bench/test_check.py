import pytest
import torch

from resroute.bench import CASES, WrongResultError, run
from resroute.bench.check import deviations, require_close
from resroute.bench.step import _require_equal, plain_of
from resroute.bench.workload import make_model
from resroute.ops.dispatch import _LOADED
from resroute.residual import WAV, PreNorm

EXPECTED = {"loss": torch.tensor(2.0), "a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}


def test_deviations_by_hand():
    found = {
        "loss": torch.tensor(2.5),
        "a": torch.tensor([3.0, 4.1]),
        # against a thousandth of the norm of all gradients, 0.005
        "b": torch.tensor([0.001]),
    }
    assert deviations(found, EXPECTED) == pytest.approx({"loss": 0.25, "a": 0.02, "b": 0.2})
    zero = {"a": torch.zeros(2)}
    assert deviations(zero, zero) == {"a": 0.0}


def test_what_rounding_does_not_explain_is_refused():
    found = {**EXPECTED, "a": torch.tensor([3.0, 4.1])}
    with pytest.raises(WrongResultError, match=r"WAV on x: a differs .* by 0\.02 of its norm"):
        require_close("WAV on x", found, EXPECTED)
    assert require_close("x", found, EXPECTED, rounding={"a": 0.03}) == pytest.approx(0.02)
    with pytest.raises(WrongResultError, match="by nan of its norm"):
        require_close("x", {**EXPECTED, "b": torch.tensor([torch.nan])}, EXPECTED)
    with pytest.raises(WrongResultError, match="only one side has b, c"):
        deviations({"a": found["a"], "c": found["a"]}, {"a": found["a"], "b": found["b"]})


def broken(monkeypatch, name, index):
    right = _LOADED["lean"]

    def wrong(*arguments):
        out = getattr(right, name)(*arguments)
        out[index] = out[index] * 1.01
        return out

    monkeypatch.setitem(_LOADED, "lean", right._replace(**{name: wrong}))


@pytest.mark.parametrize("case", CASES)
def test_no_case_times_a_wrong_operation(tiny, monkeypatch, case):
    # the normalised read of a site is one per cent too large
    broken(monkeypatch, "site_forward", 0)
    monkeypatch.setattr("resroute.bench.timing.seconds", None)
    monkeypatch.setattr("resroute.bench.memory.peak_bytes", None)
    with pytest.raises(WrongResultError, match=r"on lean: .* differs from the reference by 0\.0"):
        run(case, tiny(methods=() if case == "mixer" else (WAV(),)))


@pytest.mark.parametrize("case", ["step", "memory", "mixer", "scaling"])
def test_wrong_gradients_are_refused(tiny, monkeypatch, case):
    # of the update
    broken(monkeypatch, "site_backward", 0)
    with pytest.raises(WrongResultError, match=r"on lean: .* differs from the reference"):
        run(case, tiny(methods=() if case == "mixer" else (WAV(),)))


def test_a_wrong_block_read_is_refused(tiny, monkeypatch):
    broken(monkeypatch, "block_read_backward", 0)
    with pytest.raises(WrongResultError, match=r"1 read of 9 on lean: keys differs .* by 0\.01 "):
        run("mixer", tiny())


def test_the_plain_model_is_ours(tiny):
    settings = tiny()
    plain = plain_of(make_model(settings, PreNorm()))
    assert _require_equal(settings, plain) < 1e-5
    with torch.no_grad():
        plain.layers[1].mlp.norm.weight[3] += 0.5
    with pytest.raises(WrongResultError, match="plain torch: logits differs"):
        _require_equal(settings, plain)
