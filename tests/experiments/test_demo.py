import json
from dataclasses import replace
from pathlib import Path

import pytest

import resroute as rr
from resroute.config import differences
from resroute.experiments import demo, demo_configs


def test_configurations_differ_in_the_method_alone(cheap_corpus, tmp_path):
    plain, block, wav = demo_configs(cheap_corpus, tmp_path)
    assert plain.model.residual == rr.PreNorm()
    assert block.model.residual == rr.BlockAttnRes(num_blocks=4)
    assert wav.model.residual == rr.WAV(num_blocks=4)
    assert plain.model.num_layers == 24
    for other in (block, wav):
        named = differences(plain, other)
        assert named
        assert all(name == "out" or name.startswith("model.residual") for name in named)


@pytest.fixture(scope="module")
def result(cheap_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    configs = [
        # samples and evaluations are as long as the context
        replace(config, model=replace(config.model, context=48), evaluation_windows=8)
        for config in demo_configs(cheap_corpus, out, num_layers=8, steps=2)
    ]
    runs, files = demo(cheap_corpus, out, configs)
    return out, configs, runs, files


def test_the_demo_leaves_runs_samples_and_a_report(result):
    out, configs, runs, files = result
    assert [run.label for run in runs] == ["PreNorm", "Block AttnRes", "WAV"]
    names = [path.relative_to(out).as_posix() for path in files]
    assert names[0] == "report.html"
    assert {"figures/curves.png", "figures/depth_weights.svg", "runs.csv"} <= set(names)
    for run, config in zip(runs, configs, strict=True):
        assert run.path == Path(config.out)
        assert run.path.parent == out
        assert (run.path / "sample.txt").read_text().rstrip("\n") == run.sample.rstrip("\n")
        assert "<|endoftext|>" not in run.sample
    page = files[0].read_text()
    assert all(f">{run.label}<" in page for run in runs)
    # equal data, equal weights: near-uniform predictions of equal loss before the first step
    first = [run.losses("validation")[1][0] for run in runs]
    assert first == pytest.approx([first[0]] * 3, abs=2e-3)


def test_a_second_demo_reuses_all(result, cheap_corpus):
    out, configs, runs, _ = result
    stamps = [(run.path / name).stat().st_mtime_ns
              for run in runs for name in ("summary.json", "sample.txt")]  # fmt: skip
    again, _ = demo(cheap_corpus, out, configs)
    assert stamps == [(run.path / name).stat().st_mtime_ns
                      for run in again for name in ("summary.json", "sample.txt")]  # fmt: skip


def test_an_interrupted_demo_goes_on(cheap_corpus, tmp_path):
    (config, *_) = demo_configs(cheap_corpus, tmp_path, num_layers=4, steps=3)
    config = replace(config, model=replace(config.model, context=48))
    rr.train(config, stop_at=1)
    runs, _ = demo(cheap_corpus, tmp_path, [config])
    assert len(runs) == 1
    sessions = json.loads((runs[0].path / "env.json").read_text())["sessions"]
    assert [session["after_step"] for session in sessions] == [0, 1]


def test_short_texts_shorten_the_context(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    corpus = rr.prepare_text(text, tmp_path / "short")
    config = demo_configs(corpus, tmp_path)[0]
    assert config.model.context == corpus.split("val").tokens - 1 < 256
