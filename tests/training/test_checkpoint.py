import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import resroute as rr
from resroute.training import checkpoint


@pytest.fixture
def run(make_config):
    return Path(rr.train(make_config(steps=2))["path"])


@pytest.fixture
def newest(run):
    return run / "checkpoints" / "step_000002"


def test_load_gives_back_model_tokenizer_and_config(make_config, run, cheap_corpus):
    model, tokenizer, config = rr.load(run)
    assert tokenizer == cheap_corpus.tokenizer
    assert config == make_config(steps=2)
    assert not model.training
    saved = load_file(run / "checkpoints" / "step_000002" / "model.safetensors")
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_load_takes_a_checkpoint_folder(make_config):
    run = Path(rr.train(make_config(steps=4))["path"])
    older, _, _ = rr.load(run / "checkpoints" / "step_000002")
    newest, _, _ = rr.load(str(run))
    assert not torch.equal(older.embedding.weight, newest.embedding.weight)


def test_tied_embeddings_are_saved_once(make_config):
    run = Path(rr.train(make_config(steps=1, model={"tie_embeddings": True}))["path"])
    saved = load_file(run / "checkpoints" / "step_000001" / "model.safetensors")
    assert "head.weight" not in saved
    model, _, _ = rr.load(run)
    assert torch.equal(model.embedding.weight, saved["embedding.weight"])


def edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def write_state(folder, state):
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"model\.safetensors lacks norm\.weight; use another"),
        (lambda t: (t.pop("norm.weight"), t.pop("head.weight")), r"lacks norm\.weight and 1 more"),
        (lambda t: t.update(x=torch.ones(1)), "has an unknown tensor x"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"shape \(3,\), the configuration"),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].half()}),
            r"is torch\.float16, the con",
        ),
        (lambda t: t["norm.weight"].fill_(torch.nan), r"norm\.weight has non-finite values"),
        (lambda t: t["policy.query"].fill_(torch.inf), r"policy\.query has non-finite values"),
    ],
)
def test_weights_that_do_not_fit_are_refused(run, newest, sign_checkpoint, change, message):
    edit(newest / "model.safetensors", change)
    sign_checkpoint(newest)
    with pytest.raises(ValueError, match=message) as error:
        rr.load(run)
    assert str(error.value).count("\n") == 0


def test_damaged_files_are_refused(run, newest, sign_checkpoint):
    whole = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated; use another"):
        rr.load(run)
    # one bit of one weight, which stays finite
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    (newest / "model.safetensors").write_bytes(flipped)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged; use another"):
        rr.load(run)
    (newest / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: missing; use another"):
        rr.load(run)
    # with checksums that fit, the reader has to notice
    (newest / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    sign_checkpoint(newest)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged or truncated"):
        rr.load(run)
    (newest / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json: damaged JSON"):
        rr.load(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format_version=3), "format version 3 is not 2"),
        (lambda s: s.pop("step"), "incomplete"),
        (lambda s: s["config"].update(stepz=1), r"unknown field 'stepz' \(did you mean 'steps'"),
        (lambda s: s["config"]["model"].update(dim=13), "dim must be divisible by num_heads"),
        (lambda s: s["tokenizer"].update(type="bytes"), "tokenizer"),
        (lambda s: s["tokenizer"]["symbols"].pop(), r"a vocabulary of \d+ for a model of \d+"),
        (lambda s: s.update(best_validation_loss="low"), "incomplete"),
        (lambda s: s.update(numerics=5), "incomplete"),
        (lambda s: s.update(layout="scattered"), "incomplete"),
        (lambda s: s.update(files=[]), "incomplete"),
        (lambda s: s["files"].update({"model.safetensors": 3}), "incomplete"),
        (lambda s: s["files"].update({"../../x.safetensors": {}}), r"unknown file '\.\./\.\./x"),
        (lambda s: s["files"].update({"/etc/passwd": {}}), "unknown file '/etc/passwd'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(run, newest, change, message):
    state = json.loads((newest / "state.json").read_text())
    change(state)
    write_state(newest, {**state, "sha256": checkpoint.signature(state)})
    with pytest.raises(ValueError, match=message) as error:
        rr.load(run)
    assert str(error.value).count("\n") == 0


def test_a_state_that_was_changed_is_refused(run, newest):
    text = (newest / "state.json").read_text()
    (newest / "state.json").write_text(text.replace('"step": 2', '"step": 3'))
    with pytest.raises(ValueError, match=r"state\.json: was changed after it was written"):
        rr.load(run)
    (newest / "state.json").write_text(text.replace('"seconds": ', '"seconds": NaN, "x": '))
    with pytest.raises(ValueError, match=r"damaged JSON \(NaN is no number of JSON\)"):
        rr.load(run)
    with (newest / "state.json").open("w") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(ValueError, match="longer than any that was written"):
        rr.load(run)


def test_another_vocabulary_of_equal_size_is_refused(make_config, sign_checkpoint):
    config = make_config()
    rr.train(config, stop_at=2)
    newest = Path(config.out, "checkpoints/step_000002")
    state = json.loads((newest / "state.json").read_text())
    state["tokenizer"]["symbols"][:2] = reversed(state["tokenizer"]["symbols"][:2])
    write_state(newest, state)
    for read in (rr.load, lambda path: rr.train(config, resume=True)):
        with pytest.raises(rr.UserError, match=r"state\.json: was changed after it was written"):
            read(config.out)
    # with a checksum that fits, the corpus tells
    sign_checkpoint(newest)
    with pytest.raises(rr.UserError, match=rf"{newest} has another vocabulary than {config.data}"):
        rr.train(config, resume=True)


def test_a_link_out_of_the_folder_is_not_followed(run, newest, tmp_path):
    (newest / "model.safetensors").rename(tmp_path / "elsewhere")
    (newest / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="names an unknown file"):
        rr.load(run)


def test_an_older_state_without_new_fields_still_loads(run, newest):
    state = json.loads((newest / "state.json").read_text())
    del state["config"]["model"]["residual"]["basis_seed"]
    del state["config"]["compile"]
    write_state(newest, {**state, "sha256": checkpoint.signature(state)})
    assert rr.load(run)[2].compile is False


def test_a_checkpoint_of_the_first_format_goes_on(make_config):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="old")
    rr.train(config, stop_at=2)
    folder = Path(config.out, "checkpoints/step_000002")
    state = json.loads((folder / "state.json").read_text())
    new = ("files", "sha256", "layout", "numerics", "validation_loss")
    old = {key: value for key, value in state.items() if key not in new}
    for field in ("keep", "ema_decay", "parallel", "deterministic", "observe_every"):
        del old["config"][field]
    (folder / "state.json").write_text(json.dumps({**old, "format_version": 1}))
    tensors = load_file(folder / "optimizer.safetensors")
    save_file({**tensors, "random_state": torch.get_rng_state()}, folder / "optimizer.safetensors")
    resumed = rr.train(config, resume=True)
    assert resumed["validation_loss"] == whole["validation_loss"]


def test_half_written_checkpoints_are_passed_over(run, newest):
    half = newest.with_name("step_000099")
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"")
    assert checkpoint.candidates(run / "checkpoints")[0] == newest
    (newest / "state.json").unlink()
    # the earlier one is gone too: two are kept, and the run had one
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        rr.load(run)


def test_nothing_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist; name a run folder"):
        rr.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        rr.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight|exp_avg"), r"lacks norm\.weight\|exp_avg"),
        (lambda t: t.update({"norm.weight|exp_avg": torch.ones(2)}), r"exp_avg has shape \(2,\)"),
        (lambda t: t.update({"x|step": torch.ones(())}), r"unknown tensor x\|step"),
        (lambda t: t["norm.weight|exp_avg"].fill_(torch.nan), "has non-finite values"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(make_config, sign_checkpoint, change, message):
    config = make_config()
    rr.train(config, stop_at=2)
    folder = Path(config.out, "checkpoints/step_000002")
    edit(folder / "optimizer.safetensors", change)
    sign_checkpoint(folder)
    with pytest.raises(ValueError, match=message):
        rr.train(config, resume=True)
