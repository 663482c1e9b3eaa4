import json
import os
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


def change_model(folder, **fields):
    """Let a checkpoint's state claim another model, as a deceiver would."""
    state = json.loads((folder / "state.json").read_text())
    state["config"]["model"].update(fields)
    write_state(folder, {**state, "sha256": checkpoint.signature(state)})


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 10_000}, r"has \d\d tensors, too few for 10000 layers; use another"),
        ({"num_layers": 3}, r"lacks (model:)?layers\.2\.[a-z.]+ and \d more; use another"),
        ({"dim": 2**20}, r"embedding\.weight has shape .*, the configuration needs \(\d+, 1048576"),
    ],
    ids=["deep", "deeper", "wide"],
)
def test_a_model_that_its_files_cannot_hold_takes_no_time_and_no_memory(
    make_config, monkeypatch, layout, fields, message
):
    run = Path(rr.train(make_config(steps=2, checkpoint_layout=layout))["path"])
    change_model(run / "checkpoints" / "step_000002", **fields)
    asked = []
    monkeypatch.setattr(rr.GPT, "to_empty", lambda _, device: asked.append(str(device)))
    with pytest.raises(rr.UserError, match=message) as error:
        rr.load(run)
    assert str(error.value).count("\n") == 0
    assert asked == ([] if fields == {"num_layers": 10_000} else ["meta"])


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_header_that_declares_a_huge_length_is_refused(make_config, sign_checkpoint, layout):
    run = Path(rr.train(make_config(steps=2, checkpoint_layout=layout))["path"])
    newest = run / "checkpoints" / "step_000002"
    for length in (2**63 - 1, 2**40, 99_000_000):
        for file in newest.glob("*.safetensors"):
            file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
        sign_checkpoint(newest)
        with pytest.raises(rr.UserError, match="damaged or truncated; use another checkpoint"):
            rr.load(run)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.timeout(60)
def test_only_regular_files_are_opened(run, newest, tmp_path, name, version):
    state = json.loads((newest / "state.json").read_text())
    state["files"]["model.safetensors"]["bytes"] = 0
    state["format_version"] = version
    if version == 1:
        del state["sha256"], state["files"]
    else:
        state["sha256"] = checkpoint.signature(state)
    write_state(newest, state)
    # a link to a file is as good as the file
    (newest / "state.json").rename(tmp_path / "state.json")
    (newest / "state.json").symlink_to(tmp_path / "state.json")
    (newest / name).unlink()
    os.mkfifo(newest / name)
    # whoever opens it then waits where a test's time limit reaches
    held = os.open(newest / name, os.O_RDWR)
    with pytest.raises(rr.UserError) as caught:
        rr.load(newest)
    assert str(caught.value) == (
        f"{newest / name}: cannot be read (no regular file); use another checkpoint"
    )
    os.close(held)
    if name == "state.json":
        (newest / name).unlink()
        (newest / name).symlink_to("/dev/zero")
        with pytest.raises(rr.UserError, match=r"cannot be read \(no regular file\)"):
            rr.load(newest)


def test_load_checks_what_it_reads_alone(make_config):
    config = make_config(steps=2, ema_decay=0.5)
    newest = Path(rr.train(config)["path"], "checkpoints/step_000002")
    for name in ("optimizer", "ema"):
        (newest / f"{name}.safetensors").write_bytes(b"")
    rr.load(newest)
    with pytest.raises(rr.UserError, match=r"ema\.safetensors: truncated"):
        rr.load(newest, ema=True)
    Path(config.out, "summary.json").unlink()
    with pytest.raises(rr.UserError, match="none of its 1 checkpoints can be used"):
        rr.train(config, resume=True)


def test_the_best_of_none_that_was_evaluated_is_refused(make_config):
    config = make_config(steps=6, evaluate_every=100, checkpoint_every=2)
    rr.train(config, stop_at=2)
    with pytest.raises(rr.UserError) as caught:
        rr.load(config.out, best=True)
    assert str(caught.value) == (
        f"{config.out}: none of its checkpoints was evaluated, so that none is the best\n"
        "leave out best, or train with checkpoint_every a multiple of evaluate_every"
    )
    assert rr.load(config.out)[2] == config


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_files_are_on_the_disk_before_they_have_their_names(make_config, monkeypatch, layout):
    done = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def noted_rename(path, target):
        done.append(f"{Path(target).name} has its name")
        return rename(path, target)

    config = make_config(checkpoint_layout=layout)
    rr.train(config, stop_at=0)
    monkeypatch.setattr("os.fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    rr.train(config, resume=True, stop_at=2)
    folder = Path(config.out, "checkpoints", "step_000002")
    files = {path.stat().st_ino for path in folder.iterdir()}
    assert len(files) == (3 if layout == "gathered" else 2)
    end = done.index("step_000002 has its name")
    assert files <= set(done[: end - 1])
    assert done[end - 1] == folder.stat().st_ino
    assert done[end + 1] == folder.parent.stat().st_ino
