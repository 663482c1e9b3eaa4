"""A run folder, its checkpoints, its log, and texts to look at."""

import json
import shutil

import pytest
import torch

import resroute as rr
from resroute.config import UserError
from resroute.data import END_OF_TEXT, evaluation_windows, prepare_text
from resroute.experiments.inspect import inspect_run, run
from resroute.experiments.inspect.run import LEAST_WINDOWS, USUAL_TOKENS
from resroute.training.checkpoint import note_evaluation

from .conftest import CONTEXT


def seen(path, **options):
    return inspect_run(path, windows=2, by=(), **options)


def table_of(path, corpus, *, windows=2, **options):
    """Depth weights of a checkpoint on as many windows as `seen` takes."""
    model, _, _ = rr.load(path, **options)
    found = evaluation_windows(corpus, "val", context=CONTEXT, max_windows=windows)
    with rr.capture(model) as captured, torch.no_grad():
        model(found.inputs)
    return captured.table()


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the WAV run that may be changed."""
    return shutil.copytree(trained / "wav", tmp_path / "a run")


def test_a_run_is_its_newest_checkpoint(trained, cheap_corpus, looked):
    found = looked["wav"]
    assert (found.name, found.label, found.corpus) == ("wav", "WAV", "tales")
    assert (found.step, found.seed, found.num_layers, found.dim) == (12, 0, 4, 32)
    newest = trained / "wav/checkpoints/step_000012"
    assert found.tables["all tokens"] == table_of(newest, cheap_corpus, windows=4)
    one = seen(newest)
    assert (one.name, one.step, list(one.past)) == ("wav", 12, [4, 8])
    assert one.records == looked["wav"].records


def test_windows_unless_told(trained, cheap_corpus):
    found = inspect_run(trained / "pre", by=())
    count = min(USUAL_TOKENS // CONTEXT, (cheap_corpus.split("val").tokens - 1) // CONTEXT)
    assert found.windows == count > LEAST_WINDOWS
    assert found.tokens == count * CONTEXT


def test_earlier_checkpoints_are_seen_too(trained, cheap_corpus):
    folder = trained / "wav/checkpoints"
    found = seen(trained / "wav")
    # at most four windows, those of the newest
    assert found.past == {
        step: table_of(folder / f"step_{step:06}", cheap_corpus) for step in (4, 8)
    }
    assert found.past[4] != found.past[8] != found.tables["all tokens"]
    middle = seen(folder / "step_000008")
    assert (middle.step, list(middle.past)) == (8, [4])
    assert middle.tables["all tokens"] == found.past[8]
    first = seen(folder / "step_000004")
    assert (first.step, first.past) == (4, {})


def test_a_checkpoint_named_from_where_one_stands(trained, cheap_corpus, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(trained / "wav/checkpoints/step_000008")
    linked = seen(tmp_path / "link")
    assert (linked.name, linked.step, list(linked.past)) == ("wav", 8, [4])
    for place, name in (
        ("", "."),
        ("checkpoints", "step_000012"),
        ("checkpoints/step_000008", "."),
    ):
        monkeypatch.chdir(trained / "wav" / place)
        found = seen(name)
        assert found.name == "wav"
        assert list(found.past) == ([4] if place.endswith("8") else [4, 8])
        assert found.records != ()
    # a copy somewhere else stands alone
    alone = shutil.copytree(trained / "wav/checkpoints/step_000008", tmp_path / "alone")
    found = seen(alone)
    assert (found.name, found.step, found.past, found.records) == ("alone", 8, {}, ())


def test_the_best_and_the_average(copied, cheap_corpus):
    state = copied / "checkpoints/step_000004/state.json"
    loss = json.loads(state.read_text())["validation_loss"]
    assert loss > seen(copied).loss
    note_evaluation(state.parent, 0.5, 0.5)
    best = seen(copied, best=True)
    assert (best.step, best.past) == (4, {})
    assert best.tables["all tokens"] == table_of(state.parent, cheap_corpus)
    averaged = seen(copied, ema=True)
    assert averaged.tables["all tokens"] == table_of(copied, cheap_corpus, ema=True)
    assert averaged.past[8] == table_of(copied / "checkpoints/step_000008", cheap_corpus, ema=True)
    assert averaged.tables != seen(copied).tables


def test_damaged_earlier_checkpoints_are_left_out(copied):
    with (copied / "checkpoints/step_000004/model.safetensors").open("ab") as file:
        file.write(b"x")
    assert list(seen(copied).past) == [8]
    with pytest.raises(UserError, match=r"step_000004/model\.safetensors: damaged"):
        seen(copied / "checkpoints/step_000004")


def test_records_up_to_the_checkpoint_each_once(copied):
    lines = copied / "metrics.jsonl"
    with lines.open("a") as file:
        for step, loss in ((6, 7.5), (14, 9.0)):
            file.write(json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n")
        # as a kill leaves it
        file.write('{"kind": "tra')
    whole = seen(copied).records
    assert max(record["step"] for record in whole) == 12
    assert [r["loss"] for r in whole if (r["kind"], r["step"]) == ("train", 6)] == [7.5]
    assert sum(r["kind"] == "routing" for r in whole) == 3
    early = seen(copied / "checkpoints/step_000008").records
    assert {record["step"] for record in early} == {0, 2, 4, 6, 8}
    assert [r["step"] for r in early if r["kind"] == "routing"] == [4, 8]
    lines.unlink()
    assert seen(copied).records == ()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind": "train"}', "names no kind or step"),
        ('{"kind": ["train"], "step": 3}', "names no kind or step"),
        ('{"kind": "train", "step": 3.5}', "names no kind or step"),
        ("{oops", "metrics.jsonl line 3"),
        ('{"kind": "train", "step": 3, "loss": NaN}', "metrics.jsonl line 3"),
    ],
)
def test_a_damaged_line_is_named(copied, line, says):
    path = copied / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(UserError, match=says) as refused:
        seen(copied)
    assert "metrics.jsonl line 3" in str(refused.value)
    assert "inspect a copy without it" in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


def test_a_text_is_read_with_the_models_vocabulary(trained, tmp_path):
    text = "Mia saw Tom. " * 20
    (tmp_path / "a text.txt").write_text(text)
    found = inspect_run(
        trained / "wav", data=str(tmp_path / "a text.txt"), windows=3, by=("block",)
    )
    model, tokenizer, _ = rr.load(trained / "wav")
    ids = torch.tensor(tokenizer.encode(text).tolist())
    inputs, targets = ids[: 3 * CONTEXT].view(3, -1), ids[1 : 3 * CONTEXT + 1].view(3, -1)
    with torch.no_grad():
        loss = model(inputs, targets)[1].item()
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert (found.corpus, found.windows, found.tokens) == ("a text", 3, 96)
    assert "".join(found.prompt.tokens) == text[:CONTEXT]
    # a short text gives what windows there are in it
    (tmp_path / "a text.txt").write_text(text[: 2 * CONTEXT + 1])
    assert seen(trained / "wav", data=str(tmp_path / "a text.txt")).windows == 2
    (tmp_path / "a text.txt").write_text(text[: 2 * CONTEXT])
    assert seen(trained / "wav", data=str(tmp_path / "a text.txt")).windows == 1
    (tmp_path / "a text.txt").write_text(text[:CONTEXT])
    with pytest.raises(UserError, match="32 tokens, too few for a window of context 32") as refused:
        seen(trained / "wav", data=str(tmp_path / "a text.txt"))
    assert "\nname a longer text" in str(refused.value)


def test_the_line_break_that_ends_a_text_may_be_unknown(trained, tmp_path):
    text = "Mia saw Tom. " * 5
    place = tmp_path / "text.txt"
    _, tokenizer, _ = rr.load(trained / "wav")
    assert "\n" not in tokenizer.symbols
    for end in ("", "\n", "\r\n"):
        place.write_text(text[: CONTEXT + 1] + end, newline="")
        found = seen(trained / "wav", data=str(place))
        assert (found.windows, found.tokens) == (1, CONTEXT)
        assert "".join(found.prompt.tokens) == text[:CONTEXT]
    # one that is not the last is named as any other character
    for odd in (f"{text}\n{text}", f"{text}\n\n"):
        place.write_text(odd)
        with pytest.raises(UserError, match=r"outside the vocabulary: '\\n'"):
            seen(trained / "wav", data=str(place))


def test_a_checkpoint_that_is_dropped_while_it_is_read(copied, monkeypatch):
    folder = copied / "checkpoints"
    newest = folder / "step_000012"
    aside = newest.rename(copied / "aside")
    read, calls = run._loaded, []

    def pruned(path, **options):
        calls.append(path.name)
        if len(calls) == 1:
            # as a run in training does it: a newer one, then the oldest goes
            aside.rename(newest)
            shutil.rmtree(path)
        return read(path, **options)

    monkeypatch.setattr(run, "_loaded", pruned)
    found = seen(copied)
    assert calls[:2] == ["step_000008", "step_000012"]
    assert (found.step, list(found.past)) == (12, [4])
    # without a newer one it is said
    with (newest / "model.safetensors").open("ab") as file:
        file.write(b"x")
    calls.append("not the first")
    with pytest.raises(UserError, match="damaged"):
        seen(copied)


def test_a_run_of_delta_whose_readout_mixes_nothing(cheap_corpus, tmp_path):
    model = rr.GPTConfig(
        vocab_size=cheap_corpus.tokenizer.vocab_size, context=CONTEXT, num_layers=2, num_heads=2,
        dim=16, residual=rr.DeltaAttnRes(),
    )  # fmt: skip
    rr.train(
        rr.TrainConfig(
            model=model, data=str(cheap_corpus.path), out=str(tmp_path / "delta"), steps=2,
            batch_size=2, warmup_steps=1, precision="float32", device="cpu", peak_flops=1e11,
        )
    )  # fmt: skip
    found = inspect_run(tmp_path / "delta", windows=2)
    assert [one.by for one in found.importance] == ["layer", "source"]
    counts = [table["tokens"] for name, table in found.tables.items() if name != "all tokens"]
    assert len(counts) >= 4
    assert sum(counts) == found.tokens == 2 * CONTEXT
    assert set(found.tables["space"]["weights"][-1]) == {None}
    assert found.prompt.sites[-1].name == "1 mlp"


@pytest.mark.parametrize("kept", range(1, len(END_OF_TEXT) + 1))
def test_a_long_text_is_not_cut_within_an_end_of_text(trained, tmp_path, kept):
    # of two windows that many characters are read, which end after `kept` of the literal
    read = 8 * (2 * CONTEXT + 1)
    text = ("Mia saw Tom. " * 90)[: read - kept] + END_OF_TEXT + "Tom ran. " * 20
    (tmp_path / "text.txt").write_text(text)
    assert seen(trained / "pre", data=str(tmp_path / "text.txt")).windows == 2


def test_texts_that_do_not_fit(trained, cheap_corpus, tmp_path):
    def refusal(source):
        with pytest.raises(UserError) as refused:
            seen(trained / "wav", data=str(source))
        assert len(str(refused.value).splitlines()) <= 2
        return str(refused.value)

    (tmp_path / "odd.txt").write_text("Tom % Mia " * 40)
    assert refusal(tmp_path / "odd.txt").startswith(
        f"{tmp_path / 'odd.txt'}: characters outside the vocabulary: '%'; the first is at line 1"
    )
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin1") * 40)
    assert "cannot be read as text (not UTF-8)" in refusal(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "0 tokens, too few" in refusal(tmp_path / "empty.txt")
    assert "name a corpus or text with --data" in refusal(tmp_path / "nope.txt")
    assert "name a corpus or text with --data" in refusal(tmp_path)
    (tmp_path / "other.txt").write_text("abc % def. " * 200)
    other = prepare_text(tmp_path / "other.txt", tmp_path / "other")
    said = refusal(other.path)
    assert "not the model's vocabulary: only there ' '" not in said
    assert "only there '!'" in said
    assert "only here '%'" in said
    assert said.endswith("or a text file, which is read with the model's own")
    same = shutil.copytree(cheap_corpus.path, tmp_path / "same")
    assert seen(trained / "wav", data=str(same)).loss == seen(trained / "wav").loss


def test_a_corpus_that_is_gone(copied, sign_checkpoint):
    folder = copied / "checkpoints/step_000012"
    state = json.loads((folder / "state.json").read_text())
    former, state["config"]["data"] = state["config"]["data"], "data/gone"
    (folder / "state.json").write_text(json.dumps(state))
    sign_checkpoint(folder)
    with pytest.raises(UserError, match=r"data/gone: .*\nname a corpus or text with --data"):
        seen(copied)
    assert seen(copied, data=former).windows == 2


def test_a_prompt_is_looked_at_before_any_work(trained):
    told = []
    with pytest.raises(UserError, match="characters outside the vocabulary: '5', '%'"):
        seen(trained / "wav", prompt="5%", progress=lambda *parts: told.append(parts))
    assert told == []
    found = seen(trained / "wav", prompt="Tom", progress=lambda *parts: told.append(parts))
    assert found.prompt.tokens == ("T", "o", "m")
    assert told[:2] == [("earlier checkpoints", 0, 2), ("earlier checkpoints", 1, 2)]


def test_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="nope does not exist; name a run folder"):
        seen(tmp_path / "nope")
    with pytest.raises(UserError, match="has no complete checkpoint; name a run folder"):
        seen(tmp_path)
