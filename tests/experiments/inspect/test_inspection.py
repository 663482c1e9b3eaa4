"""What is seen of a model, against captures and loops of its own; models that are not ours."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import resroute as rr
from resroute.config import UserError
from resroute.data import END_OF_TEXT, CharTokenizer, evaluation_windows
from resroute.experiments.importance import importance
from resroute.experiments.inspect import inspect_model, save_inspection, summary
from resroute.experiments.inspect import write as writing
from resroute.experiments.inspect.classes import CLASSES, token_classes
from resroute.experiments.inspect.figures import images
from resroute.experiments.inspect.views import by_site_kind
from resroute.testing import randomise, small_gpt

from .conftest import CONTEXT, Other

INPUTS = torch.arange(40).remainder(11).view(5, 8)
TARGETS = INPUTS.roll(-1, 1).clone()
TARGETS[1, 3:] = -100
WINDOWS = (INPUTS, TARGETS)
LETTERS = CharTokenizer((*"ab cd,e1f2", END_OF_TEXT))


def model_of(residual, **options):
    model = small_gpt(residual=residual, **options)
    randomise(model.policy, std=0.3)
    with torch.no_grad():
        model.head.weight.mul_(300)
    return model


def test_loss_is_what_training_found_on_the_same_windows(looked, trained, runs):
    for name, found in looked.items():
        (last,) = [one for one in runs.lines(trained / name, "validation") if one["step"] == 12]
        assert found.loss == pytest.approx(last["loss"], rel=1e-6)
        assert (found.windows, found.tokens) == (4, 4 * CONTEXT)


@torch.no_grad()
def test_loss_by_hand_where_targets_do_not_count():
    model = model_of(rr.WAV(num_blocks=2)).eval()
    found = inspect_model(model, WINDOWS, by=())
    losses = [
        -model(INPUTS[row : row + 1])[0][0, t].log_softmax(-1)[TARGETS[row, t]].item()
        for row in range(5)
        for t in range(8)
        if TARGETS[row, t] >= 0
    ]
    assert len(losses) == 35
    assert found.loss == pytest.approx(math.fsum(losses) / 35, rel=1e-5)
    # the second window ends with its last target
    assert found.tokens == 35
    # of what is read before that, also where nothing is to be predicted
    targets = TARGETS.clone()
    targets[3, 2:5] = -100
    assert inspect_model(model, (INPUTS, targets), by=()).tokens == 35


def test_tables_are_those_of_a_capture(looked, trained, cheap_corpus):
    model, tokenizer, _ = rr.load(trained / "wav")
    windows = evaluation_windows(cheap_corpus, "val", context=CONTEXT, max_windows=4)
    with (
        torch.no_grad(),
        rr.capture(model, classes=token_classes(tokenizer), class_names=CLASSES) as seen,
    ):
        model(windows.inputs)
    found = looked["wav"].tables
    assert found["all tokens"] == seen.table()
    counts = {name: table["tokens"] for name, table in found.items() if name != "all tokens"}
    assert sum(counts.values()) == 4 * CONTEXT
    assert list(counts) == [
        "start of a word", "inside a word", "space", "punctuation", "end of text",
    ]  # fmt: skip
    classes = token_classes(tokenizer)(windows.inputs).flatten().bincount(minlength=8)
    for name, count in counts.items():
        assert count == classes[CLASSES.index(name)]
        assert found[name] == {**seen.table(name), "tokens": count}
    # the mean of the classes by their tokens is that of all
    for i, j in ((3, 0), (7, 2), (8, 1)):
        parts = [counts[name] * found[name]["weights"][i][j] for name in counts]
        whole = found["all tokens"]["weights"][i][j]
        assert math.fsum(parts) / 128 == pytest.approx(whole, rel=1e-9)
    sites = seen.result()["sites"]
    for ours, theirs in zip(looked["wav"].seen["sites"], sites, strict=True):
        known = [name for name in theirs if not name.endswith("_gradient")]
        assert {name: ours[name] for name in known} == {name: theirs[name] for name in known}


def test_gradients_are_those_of_the_first_four_windows():
    model = model_of(rr.BlockAttnRes(num_blocks=2)).eval()
    found = inspect_model(model, WINDOWS, by=())
    with rr.capture(model) as seen:
        logits = model(INPUTS[:4])[0]
        F.cross_entropy(logits.flatten(0, 1), TARGETS[:4].flatten(), ignore_index=-100).backward()
    for ours, theirs in zip(found.seen["sites"], seen.result()["sites"], strict=True):
        for name in ("update_gradient", "read_gradient"):
            expected = (
                theirs[name] if theirs[name] is None else pytest.approx(theirs[name], rel=1e-5)
            )
            assert ours[name] == expected
    assert found.seen["sites"][2]["update_gradient"] > 1e-6
    assert found.seen["sites"][-1]["update_gradient"] is None


@pytest.mark.parametrize("by", [(), ("layer", "source")])
def test_a_model_stays_as_it_is(by):
    model = model_of(rr.WAV(num_blocks=2), dropout=0.5).train()
    model.layers[1].eval()
    model.positions_of_mine = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model(INPUTS, TARGETS)[1].backward()
    model.head.weight.grad = None
    stepped = []
    hook = model.embedding.weight.register_post_accumulate_grad_hook(stepped.append)
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.clone() for n, g in gradients.items() if g is not None}
    generator = torch.get_rng_state()
    inspect_model(model, WINDOWS, by=by, tokenizer=LETTERS)
    hook.remove()
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert name not in values or torch.equal(parameter.grad, values[name])
    assert model.head.weight.grad is None
    # an optimizer that steps as gradients come would have changed the weights
    assert stepped == []
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_frozen_model_has_no_gradients():
    model = model_of(rr.WAV(num_blocks=2)).requires_grad_(False)
    found = inspect_model(model, WINDOWS, by=())
    assert {site["update_gradient"] for site in found.seen["sites"]} == {None}
    model.layers[3].requires_grad_(True)
    later = inspect_model(model, WINDOWS, by=())
    has = [site["update_gradient"] is not None for site in later.seen["sites"]]
    assert has == [False] * 6 + [True, True, False]


def test_importance_of_what_was_asked_for_alone(looked):
    assert [one.by for one in looked["wav"].importance] == ["layer", "block", "source"]
    assert [one.by for one in looked["pre"].importance] == ["layer"]
    model = model_of(rr.WAV(num_blocks=2)).eval()
    found = inspect_model(model, WINDOWS, by=("site", "block")).importance
    assert found == (importance(model, WINDOWS, "site"), importance(model, WINDOWS, "block"))
    assert inspect_model(model, WINDOWS, by=()).importance == ()
    with pytest.raises(UserError, match="by must be one of layer, block, site, source, got 'head'"):
        inspect_model(model, WINDOWS, by=("head",))


def test_what_a_method_without_sources_has(looked):
    found = looked["pre"]
    assert (found.tables, found.prompt, found.past) == ({}, None, {})
    assert found.seen["sites"][3]["update_rms"] > 0
    # two layers to a block, where a method has none
    assert [one["size"] for one in found.bases["blocks"]] == [2, 2, 2, 2]
    assert found.label == "PreNorm"


def test_progress_tells_what_is_done_of_how_much():
    told = []
    model = model_of(rr.WAV(num_blocks=2))
    # windows that are filled up come one by one
    inspect_model(
        model, WINDOWS, by=("block",), tokenizer=LETTERS, progress=lambda *parts: told.append(parts)
    )
    assert told == [
        *(("reads and updates", done, 5) for done in range(5)),
        ("gradients", 0, 1),
        ("the loss without each block", 0, 2),
        ("the loss without each block", 1, 2),
        ("tokens", 0, 1),
    ]


def test_the_prompt_is_the_start_of_the_first_window_unless_given():
    model = model_of(rr.BlockAttnRes(num_blocks=2), context=300)
    inputs = torch.arange(2 * 300).remainder(11).view(2, 300)
    found = inspect_model(model, (inputs, inputs.roll(-1, 1)), by=(), tokenizer=LETTERS)
    # 240 tokens as they are, of which every eleventh ends a text
    assert found.prompt.tokens == ((*"ab cd,e1f2", END_OF_TEXT) * 22)[:240]
    with torch.no_grad():
        chances = model(inputs[:1, :240])[0][0].log_softmax(-1)
    for t in (10, 11, 239):
        loss = -chances[t - 1, inputs[0, t]].item()
        assert found.prompt.losses[t] == pytest.approx(loss, abs=1e-4)
    given = inspect_model(
        model, (inputs, inputs.roll(-1, 1)), by=(), tokenizer=LETTERS, prompt="bad"
    )
    assert given.prompt.tokens == ("b", "a", "d")


def test_a_prompt_is_cut_at_the_length_of_a_window():
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    found = inspect_model(model, WINDOWS, by=(), tokenizer=LETTERS, prompt="bad face fed")
    assert found.prompt.tokens == tuple("bad face")
    assert len(found.prompt.losses) == len(found.prompt.sites[3].weights) == 8


def test_what_fills_windows_up_leaves_no_trace():
    model = model_of(rr.WAV(num_blocks=2))
    inputs, targets = INPUTS.clone(), TARGETS.clone()
    # the first ends after five tokens, the third has nothing at all
    targets[0, 5:] = -100
    targets[2] = -100
    plain = inspect_model(model, (inputs, targets), tokenizer=LETTERS)
    assert (plain.windows, plain.tokens) == (5, 5 + 3 + 8 + 8)
    assert plain.prompt.tokens == tuple("ab cd")
    counts = [table["tokens"] for name, table in plain.tables.items() if name != "all tokens"]
    assert sum(counts) == 24
    other = inputs.clone()
    other[targets < 0] = 9
    assert (other != inputs).sum() > 10
    found = inspect_model(model, (other, targets), tokenizer=LETTERS)
    for field in ("tokens", "loss", "tables", "bases", "importance", "prompt"):
        assert getattr(found, field) == getattr(plain, field)
    for ours, theirs in zip(found.seen["sites"], plain.seen["sites"], strict=True):
        for name in ("update_gradient", "read_gradient"):
            expected = theirs[name]
            assert ours[name] == (expected if expected is None else pytest.approx(expected))
        assert (ours["update_rms"], ours["cosine"]) == (theirs["update_rms"], theirs["cosine"])
    # numbers are those of a capture of the cut windows
    with torch.no_grad(), rr.capture(model.eval()) as seen:
        for row, length in ((0, 5), (1, 3), (3, 8), (4, 8)):
            model(inputs[row : row + 1, :length])
    assert plain.tables["all tokens"] == seen.table()


@pytest.mark.parametrize(
    "residual",
    [
        rr.DeltaAttnRes(), rr.DeltaAttnRes(num_blocks=2, gated=True), rr.FullAttnRes(),
        rr.BlockAttnRes(num_blocks=2, gated=True),
    ],
    ids=str,
)  # fmt: skip
def test_methods_of_which_not_every_site_mixes(residual):
    model = model_of(residual).eval()
    found = inspect_model(model, WINDOWS, by=(), tokenizer=LETTERS)
    counts = {name: one["tokens"] for name, one in found.tables.items() if name != "all tokens"}
    assert list(counts) == [
        "start of a word", "inside a word", "space", "digit", "punctuation", "end of text",
    ]  # fmt: skip
    assert sum(counts.values()) == found.tokens == 35
    whole = found.tables["all tokens"]
    is_delta = isinstance(residual, rr.DeltaAttnRes)
    assert (set(whole["weights"][-1]) == {None}) == is_delta
    assert found.prompt.sites[-1].name == ("3 mlp" if is_delta else "readout")
    for i in range(1, 8):
        for j, weight in enumerate(whole["weights"][i]):
            parts = [found.tables[name]["weights"][i][j] for name in counts]
            if weight is None:
                assert set(parts) == {None}
                continue
            mean = math.fsum(n * w for n, w in zip(counts.values(), parts, strict=True)) / 35
            assert mean == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize(
    ("residual", "usual"),
    [
        (rr.WAV(num_blocks=2), ["layer", "block", "source"]),
        (rr.FullAttnRes(), ["layer", "source"]),
        (rr.DeltaAttnRes(), ["layer", "source"]),
        (rr.DeltaAttnRes(num_blocks=2), ["layer", "block", "source"]),
        (rr.PreNorm(), ["layer"]),
    ],
    ids=str,
)
def test_what_is_left_out_unless_asked(residual, usual):
    model = model_of(residual)
    found = inspect_model(model, (INPUTS[:1], TARGETS[:1]))
    assert [one.by for one in found.importance] == usual


def test_mistakes_are_said_before_any_work(monkeypatch):
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    worked = []
    model.register_forward_pre_hook(lambda *_: worked.append(1))
    with pytest.raises(UserError, match="characters outside the vocabulary: 'Q'"):
        inspect_model(model, WINDOWS, tokenizer=LETTERS, prompt="Q")
    shapes = r"one shape \(N, T\), with a target that counts, got \(5, 8\) and \(5, 7\)"
    with pytest.raises(UserError, match=shapes):
        inspect_model(model, (INPUTS, TARGETS[:, 1:]))
    for windows in ((INPUTS, torch.full_like(INPUTS, -100)), (INPUTS[0], TARGETS[0])):
        with pytest.raises(UserError, match="windows must be inputs and targets"):
            inspect_model(model, windows)
    assert worked == []
    # without a tokenizer nobody reads it
    assert inspect_model(model, WINDOWS, by=(), prompt="Q").prompt is None


def test_a_model_of_someone_else():
    model = Other(rr.BlockAttnRes(num_blocks=2), ("attention", "mlp"))
    found = inspect_model(model, WINDOWS)
    assert (found.name, found.label, found.corpus) == ("model", "Block AttnRes", "text")
    assert (found.step, found.seed, found.prompt, found.records) == (None, None, None, ())
    assert list(found.tables) == ["all tokens"]
    with torch.no_grad(), rr.capture(model) as seen:
        for row, wanted in zip(INPUTS, TARGETS, strict=True):
            model(row[None, : int((wanted >= 0).sum())])
    assert found.tables["all tokens"] == seen.table()
    assert [one.by for one in found.importance] == ["layer", "block", "source"]


def test_a_model_of_three_sublayers_a_layer(rendered, data_of):
    model = Other(rr.WAV(num_blocks=2, bases=("split",)), ("mix", "gate", "mlp"))
    found = inspect_model(model, WINDOWS, tokenizer=LETTERS, by=("layer",))
    assert found.seen["layer_kinds"] == ["mix", "gate", "mlp"]
    assert [item.sites for item in found.importance[0].items] == [(0, 1, 2), (3, 4, 5)]
    assert found.tables["all tokens"]["sites"] == [
        "0 mix", "0 gate", "0 mlp", "1 mix", "1 gate", "1 mlp", "readout",
    ]  # fmt: skip
    (run,) = data_of(rendered([found]))["runs"]
    assert run["kinds"] == ["mix", "gate", "mlp"]
    assert [site["depth"] for site in run["sites"]] == pytest.approx(
        [0, 0.33333, 0.66667, 1, 1.3333, 1.6667, 2], rel=1e-4
    )
    # the phase of such sublayers is not known
    sets = [one["name"] for one in run["bases"][0]["sets"]]
    assert sets == ["state", "state + split"]
    assert list(dict(images([found], ["a"], "svg"))) == [
        "depth_weights", "kinds", "importance", "measures", "bases",
    ]  # fmt: skip


def broken(where):
    model = model_of(rr.WAV(num_blocks=2))
    with torch.no_grad():
        if where == "head":
            model.head.weight.fill_(math.nan)
        elif where == "embedding":
            model.embedding.weight[3] = math.nan
        elif where == "layer 2":
            model.layers[2].mlp.output.weight.fill_(math.nan)
        else:
            # finite, with updates whose squares are not
            model.layers[2].mlp.output.weight.fill_(1e30)
    return model


@pytest.mark.parametrize("where", ["head", "embedding", "layer 2", "overflow"])
def test_a_model_that_diverged_has_gaps(where, rendered, data_of, tmp_path, monkeypatch):
    found = inspect_model(broken(where), WINDOWS, tokenizer=LETTERS)
    assert not math.isfinite(found.loss)
    assert (found.importance, found.prompt) == ((), None)
    sizes = [site["update_rms"] for site in found.seen["sites"][:-1]]
    assert [size is not None for size in sizes] == {
        "head": [True] * 8,
        "embedding": [False] * 8,
        "layer 2": [True] * 5 + [False] * 3,
        "overflow": [True] * 5 + [False] * 3,
    }[where]
    rows = found.tables["all tokens"]["weights"]
    known = [any(weight is not None for weight in row) for row in rows]
    # what is read before the update that is no number
    assert known[:6] == [where != "embedding"] * 6
    assert (len(found.bases["blocks"]) == 2) == (where == "head")
    if where != "head":
        assert "growing sources" in [one.check for one in found.findings]
    monkeypatch.setattr(writing, "images", lambda *_: ())
    save_inspection([found], tmp_path)
    text = (tmp_path / "inspect.html").read_text()
    assert not {"NaN", "Infinity"} & set(text.split("<script>")[0].split())
    (run,) = data_of(text)["runs"]
    (saved,) = json.loads((tmp_path / "inspect.json").read_text())["runs"]
    assert (saved["loss"], run["prompt"]) == (None, None)
    assert run["measures"] != [] or where == "embedding"
    assert "loss nan" in text or "loss inf" in text
    weights = [weight for group in by_site_kind(found).values() for weight in group.values()]
    readout = by_site_kind(found)["readout"]
    own = [readout[kind] for kind in found.seen["sites"][-1]["kinds"]]
    assert (None in own) == (where != "head")
    # it has no running block, whatever is known
    assert readout["running state"] is None
    assert all(weight is None or 0 <= weight <= 1 for weight in weights)
    kinds = next(part for part in summary(found) if not isinstance(part, str))
    assert "nan" not in [cell for column in kinds.columns for cell in column.cells]


def test_figures_of_a_model_that_diverged():
    found = [inspect_model(broken(where), WINDOWS) for where in ("embedding", "layer 2")]
    assert list(dict(images(found, ["a", "b"], "svg"))) == ["depth_weights", "kinds", "measures"]
