"""What leaving items out does to the loss, against loops written by hand."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F

import resroute as rr
from resroute.config import UserError
from resroute.data import parts_of
from resroute.experiments.importance import Ablation, importance
from resroute.testing import randomise, small_gpt

INPUTS = torch.arange(40).remainder(11).view(5, 8)
TARGETS = INPUTS.roll(-1, 1).clone()
TARGETS[1, 3:] = -100


def model_of(config):
    model = small_gpt(residual=config, dropout=0.5).train()
    randomise(model.policy, std=0.3)
    with torch.no_grad():
        model.head.weight.mul_(300)
        for layer in model.layers:
            layer.attention.output.weight.mul_(60)
            layer.mlp.output.weight.mul_(300)
    return model


@torch.no_grad()
def losses_by_hand(model):
    """Of each window, one by one."""
    was_training = model.training
    model.eval()
    found = []
    for row, target in zip(INPUTS, TARGETS, strict=True):
        log_p = model(row[None])[0][0].log_softmax(-1)
        chosen = [-log_p[t, target[t]].item() for t in range(8) if target[t] >= 0]
        found.append(statistics.fmean(chosen))
    model.train(was_training)
    return found


@pytest.mark.parametrize(
    "config",
    [rr.PreNorm(), rr.FullAttnRes(), rr.DeltaAttnRes(num_blocks=2), rr.WAV(num_blocks=2)],
    ids=str,
)
@pytest.mark.parametrize("by", ["layer", "block", "site"])
def test_changes_are_those_of_silenced_sublayers(config, by):
    model = model_of(config)
    found = importance(model, (INPUTS, TARGETS), by, num_blocks=2, batch=2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = losses_by_hand(model)
    assert found.loss == pytest.approx(statistics.fmean(plain), rel=1e-5)
    assert (found.by, found.windows, found.tokens) == (by, 5, 35)
    groups = {
        "layer": {f"layer {i}": (2 * i, 2 * i + 1) for i in range(4)},
        "block": {"block 0": (0, 1, 2, 3), "block 1": (4, 5, 6, 7)},
        "site": {f"{i // 2} {('attention', 'mlp')[i % 2]}": (i,) for i in range(8)},
    }[by]
    assert {item.name: item.sites for item in found.items} == groups
    for item in found.items[::2]:
        silenced = model_of(config)
        with torch.no_grad():
            for site in item.sites:
                layer = silenced.layers[site // 2]
                (layer.mlp if site % 2 else layer.attention).output.weight.zero_()
        changes = [b - a for a, b in zip(plain, losses_by_hand(silenced), strict=True)]
        assert item.change == pytest.approx(statistics.fmean(changes), abs=2e-5)
        error = statistics.stdev(changes) / math.sqrt(5)
        assert item.error == pytest.approx(error, abs=2e-5)
        assert abs(item.change) > 1e-3


def masses_by_hand(model):
    with rr.capture(model) as seen, torch.no_grad():
        model.eval()
        # the second window ends with its last target
        for row in (0, 2, 3, 4):
            model(INPUTS[row : row + 1])
        model(INPUTS[1:2, :3])
    model.train()
    rows = [site["weights"] for site in seen.result()["sites"] if site["weights"]]
    return lambda name: sum(row.get(name, 0.0) for row in rows) / len(rows)


def test_sources_by_hand():
    model = model_of(rr.WAV(num_blocks=2))
    found = importance(model, (INPUTS, TARGETS), "source")
    mass = masses_by_hand(model)
    plain = losses_by_hand(model)
    names = [item.name for item in found.items]
    assert names == [
        "embedding", "running state", "running phase", "running split", "state 0", "phase 0",
        "split 0", "state 1",
    ]  # fmt: skip
    for item in found.items:
        with rr.without_sources(model, [item.name]):
            changed = losses_by_hand(model)
        change = statistics.fmean(changed) - statistics.fmean(plain)
        assert item.change == pytest.approx(change, abs=2e-5)
        assert item.mass == pytest.approx(mass(item.name), rel=1e-5)
    assert sum(item.mass for item in found.items) == pytest.approx(1.0)
    assert found.items[-1].sites == (8,)
    assert found.items[4].sites == (4, 5, 6, 7, 8)


def test_masses_of_blocks_layers_and_sites():
    windows = (INPUTS, TARGETS)

    def masses(config, by):
        model = model_of(config)
        return model, [item.mass for item in importance(model, windows, by).items]

    model, found = masses(rr.WAV(num_blocks=2), "block")
    mass = masses_by_hand(model)
    first = mass("state 0") + mass("phase 0") + mass("split 0")
    assert found == pytest.approx([first, mass("state 1")], rel=1e-5)
    # a block's sum does not tell its layers apart
    assert masses(rr.WAV(num_blocks=2), "layer")[1] == [None] * 4
    assert masses(rr.PreNorm(), "block")[1] == [None] * 4
    model, found = masses(rr.FullAttnRes(), "layer")
    mass = masses_by_hand(model)
    pairs = [mass(f"update {2 * i}") + mass(f"update {2 * i + 1}") for i in range(4)]
    assert found == pytest.approx(pairs, rel=1e-5)
    assert masses(rr.FullAttnRes(), "site")[1][2] == pytest.approx(mass("update 2"), rel=1e-5)


class Other(torch.nn.Module):
    """A model that is not ours, with logits by name."""

    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.policy = rr.BlockAttnRes(num_blocks=1).build(1, 6)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.shape = shape

    def forward(self, tokens):
        stream = self.policy.start(self.embed(tokens))
        for site, part in enumerate(self.parts):
            stream = self.policy.write(stream, site, part(self.policy.read(stream, site)))
        return self.shape(F.linear(self.policy.finish(stream), self.embed.weight))


class Output:
    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize("shape", [Output, lambda x: x, lambda x: (x, None)])
def test_any_model_with_a_policy(shape):
    found = importance(Other(shape), (INPUTS[:1], TARGETS[:1]))
    (layer,) = found.items
    assert layer.error is None
    plain = importance(Other(lambda x: (x, None)), (INPUTS[:1], TARGETS[:1]))
    assert found == plain
    assert layer.change != 0.0
    assert isinstance(layer, Ablation)


def test_windows_without_a_target_do_not_count():
    model = model_of(rr.PreNorm())
    targets = TARGETS.clone()
    targets[4] = -100
    found = importance(model, (INPUTS, targets), "block")
    without = importance(model, (INPUTS[:4], TARGETS[:4]), "block")
    assert found == without
    assert found.windows == 4


def test_parts_without_what_fills_windows_up():
    targets = TARGETS.clone()
    # nothing to predict at the start, or between, fills nothing up
    targets[0, :4] = targets[2, 3:6] = -100
    targets[4] = -100
    parts = list(parts_of(INPUTS, targets, 2))
    assert [part.shape for part, _ in parts] == [(1, 8), (1, 3), (1, 8), (1, 8)]
    for (part, wanted), row in zip(parts, range(4), strict=True):
        assert torch.equal(part[0], INPUTS[row, : part.shape[1]])
        assert torch.equal(wanted[0], targets[row, : part.shape[1]])
    # where every window is full they come as they are
    rows = [0, 2, 3]
    whole = list(parts_of(INPUTS[rows], targets[rows], 2))
    assert [part.tolist() for part, _ in whole] == [INPUTS[[0, 2]].tolist(), [INPUTS[3].tolist()]]
    assert torch.equal(torch.cat([wanted for _, wanted in whole]), targets[rows])


def test_what_fills_windows_up_is_not_read():
    model = model_of(rr.WAV(num_blocks=2))
    other = INPUTS.clone()
    other[1, 3:] = 9
    for by in ("layer", "source"):
        plain = importance(model, (INPUTS, TARGETS), by)
        assert importance(model, (other, TARGETS), by) == plain
        assert importance(model, (INPUTS, TARGETS), by, batch=1) == plain


def test_mistakes_are_named():
    model = model_of(rr.PreNorm())
    with pytest.raises(UserError, match="SumPolicy reads one sum and has no sources"):
        importance(model, (INPUTS, TARGETS), "source")
    assert model.training
    with pytest.raises(UserError, match=r"one shape \(N, T\).* got \(5, 8\) and \(5, 7\)"):
        importance(model, (INPUTS, TARGETS[:, 1:]))
    with pytest.raises(UserError, match="a target that counts"):
        importance(model, (INPUTS, torch.full_like(TARGETS, -100)))
    with pytest.raises(UserError, match="by must be one of layer, block, site, source, got 'head'"):
        importance(model, (INPUTS, TARGETS), "head")
    with pytest.raises(UserError, match="batch must be a whole number of at least 1"):
        importance(model, (INPUTS, TARGETS), batch=0)


def test_a_loss_that_is_not_finite_is_told_as_such():
    model = model_of(rr.WAV(num_blocks=2))
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    found = importance(model, (INPUTS, TARGETS))
    assert math.isnan(found.loss)
    assert all(math.isnan(item.change) and math.isnan(item.error) for item in found.items)
