"""Each check on a model made sick on purpose, and none on healthy ones."""

import dataclasses
import json
import math

import pytest
import torch

import resroute as rr
from resroute.config import to_dict
from resroute.residual.health import CHECKS
from resroute.residual.observe import observe
from resroute.testing import randomise, small_gpt

METHODS = {
    "pre_norm": rr.PreNorm(),
    "re_zero": rr.ReZero(),
    "layer_scale": rr.LayerScale(),
    "full": rr.FullAttnRes(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "block_gated": rr.BlockAttnRes(num_blocks=2, gated=True),
    "delta": rr.DeltaAttnRes(),
    "delta_gated": rr.DeltaAttnRes(num_blocks=2, gated=True),
    "wav": rr.WAV(num_blocks=2),
    "wav_fixed": rr.WAV(num_blocks=2, learn_detail_bias=False, learn_bases=True),
}
each_method = pytest.mark.parametrize("config", METHODS.values(), ids=METHODS)
TOKENS = torch.arange(16).remainder(11).view(2, 8)


@torch.no_grad()
def model_of(config):
    """As after some training: updates are of the embedding's size, parameters have moved."""
    model = small_gpt(residual=config).eval()
    randomise(model.policy, std=0.15)
    for layer in model.layers:
        layer.attention.output.weight.mul_(60)
        layer.mlp.output.weight.mul_(300)
    return model


@torch.no_grad()
def seen_in(model, *, closely=True):
    if not closely:
        return observe(model.policy, lambda: model(TOKENS))
    with rr.capture(model) as seen:
        model(TOKENS)
    return seen


def checks(model, history=(), *, closely=True):
    found = rr.health(seen_in(model, closely=closely), model, history)
    for finding in found:
        texts = dataclasses.astuple(finding)
        assert all(isinstance(text, str) and text for text in texts), finding
        assert json.loads(json.dumps(to_dict(finding))) == dataclasses.asdict(finding)
    return [(finding.check, finding.severity) for finding in found]


both = pytest.mark.parametrize("closely", [True, False], ids=["captured", "observed"])


@each_method
@both
def test_healthy_models_have_no_findings(config, closely):
    assert checks(model_of(config), closely=closely) == []


@pytest.mark.parametrize("name", ["full", "block", "delta", "wav", "wav_fixed"])
@both
@torch.no_grad()
def test_queries_that_stayed_at_zero(name, closely):
    model = model_of(METHODS[name])
    model.policy.query.mul_(1e-3)
    assert checks(model, closely=closely) == [("dead mixing", "warning")]
    history = [{"kind": "routing", "step": 99}]
    # not yet, while there was no time
    assert checks(model, history, closely=closely) == []
    assert checks(model, [{"kind": "train", "step": 500}, *history], closely=closely) == []
    history.append({"kind": "routing", "step": 100})
    (finding,) = rr.health(seen_in(model, closely=closely), model.policy, history)
    names = model.policy
    choices = sum(len(names.source_names(site)) > 1 for site in range(names.num_sites + 1))
    assert finding.where.startswith(f"{choices} of {choices} sites: 0 mlp, ")
    largest = (model.policy.query * model.policy.key_gain)[1:].norm(dim=1).max()
    assert f"{largest:.1e}" in finding.saw
    # one site in three is no finding of the model
    model = model_of(METHODS[name])
    model.policy.query[::3] = 0.0
    assert checks(model, closely=closely) == []


@torch.no_grad()
def test_a_key_gain_of_zero_is_as_dead_as_a_query():
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    model.policy.key_gain.zero_()
    assert checks(model) == [("dead mixing", "warning")]
    model = model_of(rr.BlockAttnRes(num_blocks=2, key_gain=False))
    assert checks(model) == []
    model.policy.query.zero_()
    assert checks(model) == [("dead mixing", "warning")]


@both
@torch.no_grad()
def test_queries_that_do_not_reach_the_weights(closely):
    config = rr.WAV(num_blocks=2, eps=1.0)
    model = small_gpt(residual=config).eval()
    randomise(model.policy, std=0.3)
    # biases as at the start, so that nothing but queries could move weights
    model.policy.detail_bias.fill_(-2.0)
    model.embedding.weight.mul_(1e-5)
    for layer in model.layers:
        layer.attention.output.weight.mul_(1e-4)
        layer.mlp.output.weight.mul_(1e-4)
    found = rr.health(seen_in(model, closely=closely), model)
    (dead,) = [finding for finding in found if finding.check == "dead mixing"]
    assert dead.saw == "depth weights within 0.001 of the initial ones, though queries moved"
    assert "eps" in dead.remedy
    # another bias moves them
    model.policy.detail_bias.fill_(-1.0)
    found = rr.health(seen_in(model, closely=closely), model)
    assert "dead mixing" not in [finding.check for finding in found]


@pytest.mark.parametrize("name", ["block_gated", "delta_gated"])
@torch.no_grad()
def test_gates_that_stayed_closed(name):
    model = model_of(METHODS[name])
    model.policy.gate.mul_(1e-3)
    # alone, although a closed gate keeps queries where they are
    model.policy.query.zero_()
    assert checks(model) == [("closed gates", "warning")]
    model.policy.gate[-1] = 0.1
    assert checks(model) == [("dead mixing", "warning")]


@torch.no_grad()
def test_coefficients_that_stayed_where_they_were():
    model = model_of(rr.ReZero())
    model.policy.alpha.zero_()
    # that all layers are idle says the same
    assert checks(model) == [("dead mixing", "warning")]
    model = model_of(rr.LayerScale(init=1e-4))
    model.policy.scale.fill_(1e-4)
    assert checks(model) == [("dead mixing", "warning")]
    assert checks(model, [{"kind": "routing", "step": 99}]) == []
    model = model_of(rr.LayerScale(init=1.0))
    model.policy.scale.fill_(1.0)
    assert checks(model) == [("dead mixing", "warning")]


@each_method
@both
@torch.no_grad()
def test_layers_that_add_nothing(config, closely):
    model = model_of(config)
    model.layers[1].mlp.output.weight.mul_(1e-5)
    assert checks(model, closely=closely) == [("idle layers", "note")]
    model.layers[1].attention.output.weight.mul_(1e-5)
    found = rr.health(seen_in(model, closely=closely), model)
    assert [(f.check, f.severity) for f in found] == [("idle layers", "warning")]
    assert found[0].where == "1 attention, 1 mlp"
    assert "1 whole layers" in found[0].saw
    assert ("that of what they read" in found[0].saw) == closely


@torch.no_grad()
def test_a_stack_that_adds_nothing():
    model = model_of(rr.PreNorm())
    model.embedding.weight.mul_(1e6)
    (finding,) = rr.health(seen_in(model), model)
    assert finding.where == "0 attention, 0 mlp, 1 attention and 5 more"
    assert "4 whole layers" in finding.saw
    # updates alone do not show it
    assert checks(model, closely=False) == []


@torch.no_grad()
def test_a_layer_that_its_coefficient_silences():
    model = model_of(rr.ReZero())
    model.policy.alpha[2] = 1e-6
    for closely in (True, False):
        (finding,) = rr.health(seen_in(model, closely=closely), model)
        assert (finding.check, finding.where) == ("idle layers", "2 attention, 2 mlp")


@both
@torch.no_grad()
def test_details_that_are_not_used(closely):
    model = model_of(rr.WAV(num_blocks=2))
    # not so far that the bias itself is a finding
    model.policy.query.mul_(0.1)
    model.policy.detail_bias.fill_(-2.0 - 1.9)
    assert checks(model, closely=closely) == []
    model.policy.detail_bias.fill_(-2.0 - 5.0)
    found = rr.health(seen_in(model, closely=closely), model)
    assert [(f.check, f.severity) for f in found] == [
        ("unused details", "warning"),
        ("detail bias drift", "note"),
    ]
    assert found[0].where == "all details"
    # at the start 0 in the first read, then e^-2 each beside one
    assert "at the start 0.1" in found[0].saw


@torch.no_grad()
def test_one_basis_that_is_not_used_is_named():
    model = model_of(rr.WAV(num_blocks=2))
    model.policy.detail_bias[:, 0] = -2.0 - 4.5
    model.policy.detail_bias[:, 1] = -1.0
    found = rr.health(seen_in(model), model)
    assert [(f.check, f.where) for f in found] == [
        ("unused details", "phase"),
        ("detail bias drift", "phase"),
    ]


@both
@torch.no_grad()
def test_details_that_dominate(closely):
    model = model_of(rr.WAV(num_blocks=1, learn_detail_bias=False))
    model.policy.detail_bias.fill_(6.0)
    assert checks(model, closely=closely) == [("dominating details", "note")]


@both
@torch.no_grad()
def test_weight_on_one_source_everywhere(closely):
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    model.policy.query.mul_(1e4)
    assert checks(model, closely=closely) == [("collapsed mixing", "warning")]
    assert checks(model_of(rr.BlockAttnRes(num_blocks=2)), closely=closely) == []
    # a few sites may have made up their mind
    model = model_of(rr.FullAttnRes())
    model.policy.query[::3].mul_(1e4)
    assert checks(model, closely=closely) == []


def test_a_mean_of_sources_leaves_out_reads_without_a_choice():
    policy = rr.BlockAttnRes(num_blocks=1).build(1, 4)
    with torch.no_grad():
        policy.query.fill_(1.0)
    seen = {
        "update_rms": [1.0, 1.0],
        "source_rms": {"embedding": 1.0, "state 0": 1.0},
        "entropy": 0.1,
        "detail_weight": 0.0,
        "embedding_weight": 0.9,
    }
    # of three reads one has a single source: (1 + 2 * 1.3) / 3
    assert rr.health({**seen, "effective_sources": 3.6 / 3}, policy) == []
    (finding,) = rr.health({**seen, "effective_sources": 3.2 / 3}, policy)
    assert (finding.check, finding.where) == ("collapsed mixing", "mean of all sites")
    assert finding.saw.startswith("1.10 effective sources")


@torch.no_grad()
def test_sources_that_explode_over_depth():
    model = model_of(rr.FullAttnRes())
    model.layers[2].mlp.output.weight.mul_(300)
    for closely in (True, False):
        (finding,) = rr.health(seen_in(model, closely=closely), model)
        assert (finding.check, finding.where) == ("growing sources", "update 5")
    model = model_of(rr.PreNorm())
    for factor, layer in zip((1, 100, 10_000, 10**6), model.layers, strict=True):
        layer.mlp.output.weight.mul_(factor)
    found = rr.health(seen_in(model), model)
    assert ("growing sources", "read 8") in [(f.check, f.where) for f in found]


def test_sources_that_explode_over_training():
    model = model_of(rr.WAV(num_blocks=2))
    now = {"embedding": 1.0, "state 0": 50.0}
    steps = [{"state 0": 0.5}, {"state 0": 1.0}, {"state 0": 2.0}, now]
    history = [
        {"kind": "routing", "step": 100 * i, "update_rms": [], "source_rms": sizes}
        for i, sizes in enumerate(steps, start=1)
    ]
    found = rr.health(seen_in(model), model, history)
    assert [(f.check, f.saw) for f in found] == [
        ("growing sources", "largest RMS 50, halfway through training 2")
    ]
    history[2]["source_rms"] = {"state 0": 3.0}
    assert checks(model, history) == []
    # lines that are not ours are no reason to fail
    odd = [{"step": "x", "source_rms": 3}, {"update_rms": ["big", None]}, {"kind": "routing"}]
    assert checks(model, [*history, *odd]) == []
    # methods without sources have their updates
    plain = model_of(rr.PreNorm())
    history = [{"step": i, "update_rms": [0.1, size]} for i, size in enumerate((1.0, 1.0, 30.0))]
    assert checks(plain, history) == [("growing sources", "warning")]


@torch.no_grad()
def test_sizes_that_are_not_finite():
    model = model_of(rr.PreNorm())
    model.layers[3].mlp.output.weight.fill_(math.inf)
    found = rr.health(seen_in(model), model)
    assert ("growing sources", "a size that is not a finite number") in [
        (f.check, f.saw) for f in found
    ]
    seen = {"update_rms": [1.0] * 8, "source_rms": {"embedding": 1.0, "state 0": None}}
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    (finding,) = rr.health(seen, model)
    assert (finding.check, finding.where) == ("growing sources", "state 0")


@torch.no_grad()
def test_biases_that_drift():
    model = model_of(rr.WAV(num_blocks=2))
    model.policy.detail_bias[:, 1] = -2.0 + 2.5
    (finding,) = rr.health(seen_in(model), model)
    assert (finding.check, finding.severity, finding.where) == (
        "detail bias drift", "note", "split",
    )  # fmt: skip
    assert "split +2.50; 0% changed by more than 6" in finding.saw
    # as far up as down, and most of them far
    model.policy.detail_bias[::2] = -2.0 - 7.0
    model.policy.detail_bias[1::2] = -2.0 + 7.0
    (finding,) = [f for f in rr.health(seen_in(model), model) if "bias" in f.check]
    assert (finding.severity, finding.where) == ("warning", "phase, split")
    assert "100% changed" in finding.saw
    # one that is not learned is where it was put
    model = model_of(rr.WAV(num_blocks=2, learn_detail_bias=False, detail_bias=1.0))
    assert "detail bias drift" not in [check for check, _ in checks(model)]


def test_findings_come_in_the_order_of_the_checks():
    assert [check.__name__ for check in CHECKS] == [
        "dead_mixing", "idle_layers", "details", "collapsed_mixing", "growing_sources",
        "detail_bias_drift",
    ]  # fmt: skip


def test_what_was_not_seen_of_this_model_is_refused():
    model = model_of(METHODS["wav"])
    seen = seen_in(model)
    takes = (
        "^health takes what rr.capture gave, itself, or a line of kind `routing` of metrics.jsonl"
    )
    for wrong, got in (
        ({}, "a dict without `update_rms`"),
        (seen.result(), "a dict without `update_rms`"),
        ([seen], "a list"),
        (None, "a NoneType"),
    ):
        with pytest.raises(rr.UserError, match=f"{takes}; got {got}$"):
            rr.health(wrong, model)
    other = small_gpt(num_layers=3, residual=METHODS["pre_norm"])
    words = (
        f"^what was seen has {model.policy.num_sites} sites and the model 6; pass the model that"
    )
    for closely in (True, False):
        with pytest.raises(rr.UserError, match=words):
            rr.health(seen_in(model, closely=closely), other)
