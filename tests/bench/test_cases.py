import json

import pytest
import torch

from resroute.bench import run
from resroute.bench.observe import bytes_moved
from resroute.bench.scaling import _axes
from resroute.bench.settings import Settings, blocks_made, served, with_blocks
from resroute.bench.table import amount, footer, lines, table
from resroute.bench.timing import Comparison, Listener
from resroute.bench.workload import GPTStep
from resroute.config import UserError
from resroute.residual import HAARES, WAV, BlockAttnRes, FullAttnRes, PreNorm
from resroute.training.device import has_cpp_compiler


def keys(rows):
    return [(row.name, row.backend, row.against, row.group) for row in rows]


def test_step(tiny):
    rows, result = run("step", tiny(backends=("lean", "reference"), methods=(WAV(),)))
    assert keys(rows) == [
        ("PreNorm", "lean", "plain torch", ""),
        ("WAV", "lean", "PreNorm", ""),
        ("WAV", "reference", "PreNorm", ""),
    ]
    assert all(len(row.pairs) == 2 and min(map(min, row.pairs)) > 0 for row in rows)
    assert max(max(row.details["deviation"].values()) for row in rows) < 1e-4
    assert result == json.loads(json.dumps(result, allow_nan=False))
    assert [Comparison.from_json(row) for row in result["rows"]] == rows
    assert result["settings"]["methods"][0]["type"] == "wav"
    assert result["machine"]["precision"] == "float32"


def test_step_in_bfloat16(tiny):
    rows, _ = run("step", tiny(precision="bfloat16", methods=(BlockAttnRes(),)))
    assert 1e-4 < rows[1].details["deviation"]["step"] < 0.2
    assert rows[1].details["deviation"]["formula"] < 1e-4


def test_memory(tiny):
    rows, _ = run("memory", tiny(methods=(FullAttnRes(),), backends=("reference", "lean")))
    assert [row.group for row in rows] == ["activations", "all"] * 2
    direct, _, lean, whole = rows
    # plain autograd keeps products of every source at every site
    assert direct.ratio > lean.ratio > 1
    # parameters and two moments, and the count of steps of each tensor
    steps = GPTStep(tiny(), FullAttnRes(), "lean", compiled=False)
    fixed = 4 * (3 * steps.parameters + len(list(steps.model.parameters())))
    assert whole.measured - lean.measured == fixed


def test_decode(tiny):
    rows, _ = run("decode", tiny(batch=None, methods=(WAV(),)))
    assert [(row.group, row.unit) for row in rows] == [
        ("batch 1", "tokens/s"),
        ("batch 32", "tokens/s"),
    ]
    assert rows[1].measured > rows[0].measured


def test_observe(tiny):
    rows, _ = run("observe", tiny(methods=(PreNorm(), WAV()), pairs=6))
    assert [(row.name, row.group, row.unit) for row in rows] == [
        ("PreNorm", "bytes", "bytes"),
        ("PreNorm", "time", "s"),
        ("WAV", "bytes", "bytes"),
        ("WAV", "time", "s"),
    ]
    for row in rows:
        for (taken, together), look in zip(row.pairs, row.details["look_over_step"], strict=True):
            assert together == pytest.approx(taken * (1 + look / 50))
    # at a usual size: one window of eight, forward alone
    settings = tiny(methods=(WAV(),), layers=4, dim=32, batch=8, context=256, pairs=1)
    counted, _ = run("observe", settings)[0]
    assert 1 < counted.ratio < 1.01


def test_capture(tiny):
    rows, _ = run("capture", tiny(methods=(PreNorm(), WAV()), pairs=6))
    assert [(row.name, row.against, row.group, row.unit) for row in rows] == [
        (name, "no capture", group, "s")
        for name in ("PreNorm", "WAV")
        for group in ("forward", "step")
    ]
    # sums in float64 are not free
    assert all(row.ratio > 1 for row in rows)
    assert max(row.details["deviation"]["step"] for row in rows) < 1e-5


def test_bytes_moved_by_hand():
    a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    # two inputs and a result of 4 bytes a number; the transposed view moves nothing
    assert bytes_moved(lambda: a @ b) == 4 * (15 + 35 + 21)
    assert bytes_moved(lambda: a.t()) == 0


def test_mixer_runs_without_other_packages(tiny, monkeypatch):
    monkeypatch.setattr("resroute.bench.peers.peer_version", lambda name: None)
    monkeypatch.setattr("resroute.bench.cases.peer_version", lambda name: None)
    rows, result = run("mixer", tiny())
    assert keys(rows) == [
        (name, "lean", "reference", group)
        for name in ("1 read of 9", "4 reads of 4", "a WAV site")
        for group in ("fwd", "fwd+bwd")
    ]
    assert max(row.details["deviation"]["lean"] for row in rows) < 1e-5
    assert result["peers"] == {}


def test_mixer_times_a_peer_that_is_right_and_refuses_one_that_is_wrong(tiny, monkeypatch):
    def stacked(values, keys, eps):
        sources = torch.stack(list(values))
        normal = sources / (sources.square().mean(-1, keepdim=True) + eps).sqrt()
        weights = (normal @ keys.T).softmax(0)
        return (weights.unsqueeze(-1) * sources.unsqueeze(-2)).sum(0).unbind(-2)

    monkeypatch.setattr("resroute.bench.mixer.read_peers", lambda: ({"other": stacked}, []))
    rows, _ = run("mixer", tiny(pairs=1))
    assert [row.against for row in rows[:4]] == ["reference", "reference", "other", "other"]
    monkeypatch.setattr(
        "resroute.bench.mixer.read_peers",
        lambda: ({"other": lambda values, keys, eps: stacked(values, 2 * keys, eps)}, []),
    )
    with pytest.raises(RuntimeError, match="1 read of 9: other: output 0 differs"):
        run("mixer", tiny(pairs=1))


class Said(Listener):
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


def test_scaling(tiny):
    said = Said()
    rows, _ = run("scaling", tiny(pairs=1), said)
    assert said.lines[0] == (
        "WAV: left out: 4 width (odd, or below 8); 1 layers (they do not make 2 blocks); "
        "6, 8, 12 blocks (4 layers do not make them)"
    )
    assert [(row.group, row.against) for row in rows] == [
        ("4 layers", "2 layers"),
        ("8 layers", "4 layers"),
        ("16 width", "8 width"),
        ("4 blocks", "2 blocks"),
    ]
    assert [row.details["num_blocks"] for row in rows] == [[2, 2], [2, 2], [2, 2], [2, 4]]
    depth = rows[1].details["parameters"]
    assert depth[1] - depth[0] == 4 * (4 * 16 * 16 + 3 * 4 * 16 * 16 + 2 * 16 + 4 * 16 + 4)


def test_scaling_keeps_to_sizes_that_make_the_blocks_that_they_name(tiny):
    def sizes(residual, **options):
        axes, left_out = _axes(tiny(dim=32, **options), residual)
        field = {"layers": "layers", "width": "dim", "blocks": "blocks"}
        return {name: [getattr(s, field[name]) for s in axes[name]] for name in axes}, left_out

    # four blocks of six layers are three of two; so are those of 12 where three are asked for
    found, left_out = sizes(WAV(), layers=6, blocks=4)
    assert found == {"layers": [3, 6, 12], "width": [8, 16, 32], "blocks": [2, 6]}
    assert left_out == [
        "1 layers (they do not make 3 blocks)",
        "4, 8, 12 blocks (6 layers do not make them)",
    ]
    assert sizes(WAV(), layers=48, blocks=None) == (
        {"layers": [12, 24, 48, 96], "width": [8, 16, 32], "blocks": [2, 4, 6, 8, 12]},
        [],
    )
    # a method without blocks, and one with its own number
    assert sizes(PreNorm(), layers=6) == ({"layers": [1, 3, 6, 12], "width": [8, 16, 32]}, [])
    found, left_out = sizes(HAARES(num_blocks=3), layers=6)
    assert found == {"layers": [3, 6, 12], "width": [8, 16, 32]}
    assert left_out == ["1 layers (they do not make 3 blocks)"]


def test_blocks_are_said_as_they_are_built(tiny):
    said = Said()
    methods = (BlockAttnRes(), WAV(), FullAttnRes())
    rows, result = run("memory", tiny(blocks=3, methods=methods), said)
    notes = [line for line in said.lines if line.startswith("note")]
    assert notes == [
        "note: 3 blocks of 4 layers make 2 blocks of 2 layers (the last may be shorter)"
    ]
    assert [row.details["num_blocks"] for row in rows] == [2, 2, 2, 2, None, None]
    assert [m.get("num_blocks") for m in result["settings"]["methods"]] == [3, 3, None]
    # without a number it is four, or as many as there are layers
    assert [tiny(blocks=None, layers=n).num_blocks for n in (1, 3, 4, 48)] == [1, 3, 4, 4]
    _, result = run("step", tiny(blocks=None, layers=2, pairs=1))
    assert result["settings"]["blocks"] == 2
    assert [m["num_blocks"] for m in result["settings"]["methods"]] == [2, 2]
    assert blocks_made(10, 4) == 4
    assert blocks_made(10, 6) == 5
    assert blocks_made(3, 4) == 0


def test_what_is_done_is_saved_after_each_comparison(tiny, monkeypatch):
    monkeypatch.setattr("resroute.bench.mixer.read_peers", lambda: ({}, []))
    saved = []

    def save(result):
        saved.append(json.loads(json.dumps(result)))
        if len(saved) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("step", tiny(methods=(WAV(),)), save=save)
    assert [len(result["rows"]) for result in saved] == [1, 2]
    assert [row["name"] for row in saved[1]["rows"]] == ["PreNorm", "WAV"]
    assert not any(result["complete"] for result in saved)
    saved.clear()
    _, result = run("mixer", tiny(pairs=1), save=lambda result: saved.append(dict(result)))
    assert [r["complete"] for r in saved] == [False] * 6 + [True]
    assert saved[-1] == result
    assert saved[0].keys() == result.keys()


def test_cases_say_what_is_checked(tiny):
    for case, line in (
        ("step", "WAV on lean: checked, warming up"),
        ("memory", "WAV on lean: checked, measuring"),
        ("decode", "WAV on lean: checked, decoding"),
        ("observe", "WAV on lean: checked, warming up"),
        ("mixer", "a WAV site on lean: checked"),
    ):
        said = Said()
        run(case, tiny(pairs=1, methods=() if case == "mixer" else (WAV(),)), said)
        assert line in said.lines, case


def test_the_footer_says_what_the_ratio_is_and_the_setting(tiny):
    settings = tiny(threads=2)
    routed = {"details": {"num_blocks": 2}}
    setting = "4 layers, width 16, 2 blocks, 2 x 8 tokens, float32, not compiled, 2 threads"
    assert footer("step", settings, [row(**routed)]) == [
        "ratio: time over that of `against` (median of 6 pairs); less is better",
        setting,
    ]
    few = footer("step", settings, [row(pairs=((1.0, 2.0),) * 5)])
    assert few[1:] == ["fewer than 6 pairs: no interval", setting.replace(" 2 blocks,", "")]
    memory = row(unit="bytes", pairs=((1.0, 2.0),), **routed)
    assert footer("memory", settings, [memory])[0] == (
        "ratio: bytes over those of `against`; less is better"
    )
    assert len(footer("memory", settings, [memory])) == 2
    decode = row(unit="tokens/s", **routed)
    half = tiny(threads=1, precision="bfloat16", compile=None, batch=None)
    assert footer("decode", half, [decode]) == [
        "ratio: tokens/s over those of `against` (median of 6 pairs); more is better",
        "4 layers, width 16, 2 blocks, context 8, bfloat16, not compiled, 1 thread",
    ]
    usual = Settings(device="cpu", threads=1, precision="bfloat16")
    assert footer("mixer", usual, [row()])[1] == (
        "48 layers, width 256, 4 blocks, 2 x 256 tokens, float32, not compiled, 1 thread"
    )
    below = footer("scaling", usual, [row(**routed)])
    assert " ".join(below[1:]).startswith("where a row says nothing else: 48 layers, ")
    assert max(map(len, below)) <= 80


def test_settings_are_refused_in_words(tiny):
    for wrong, says in (
        ({"dim": 15}, "dim must be even, got 15"),
        ({"backends": ("leen",)}, r"unknown backend 'leen' \(did you mean 'lean'\?\)"),
        ({"backends": ("triton",)}, "backend 'triton' was asked for, but it runs on CUDA"),
        ({"layers": 1}, "blocks=2 is more than the stack's 1 layers; use at most 1"),
    ):
        with pytest.raises(UserError, match=says):
            run("decode", tiny(**wrong))
    with pytest.raises(UserError, match=r"unknown case 'stp' \(did you mean 'step'\?\)"):
        run("stp", tiny())


def test_threads_are_set_for_the_case_alone(tiny, monkeypatch):
    seen = []
    former = torch.get_num_threads()
    monkeypatch.setitem(
        __import__("resroute.bench.cases", fromlist=["CASES"]).CASES,
        "step",
        lambda settings, listener: iter(seen.append(torch.get_num_threads()) or ()),
    )
    run("step", tiny(threads=former + 1))
    assert seen == [former + 1]
    assert torch.get_num_threads() == former


def test_shapes_of_models():
    heads = {256: 4, 128: 4, 512: 8, 24: 4, 6: 3, 2: 1}
    assert {dim: Settings(dim=dim).num_heads for dim in heads} == heads
    assert with_blocks(WAV(), 3).num_blocks == 3
    assert with_blocks(WAV(block_layers=2), 3).num_blocks is None
    assert with_blocks(HAARES(num_blocks=5), 3).num_blocks == 5
    assert with_blocks(PreNorm(), 3) == PreNorm()
    assert served("auto", Settings(device="cpu")) == "lean"


def row(**options):
    values = {"name": "Block AttnRes", "against": "PreNorm", "unit": "s", "backend": "reference"}
    return Comparison(**{**values, "pairs": ((1.0, 1.5),) * 6, **options})


def test_the_table_fits_80_columns():
    shown = lines([row(group="batch 32", unit="tokens/s", pairs=((20_000.0, 12_345.0),) * 6)])
    headings = ["what", "measured", "backend", "against", "ratio", "95", "%", "interval", "median"]
    assert shown[0].split() == headings
    assert shown[1].split()[-4:] == ["0.617", "0.617-0.617", "12,345", "tok/s"]
    assert max(map(len, shown)) <= 80
    scaling = lines([row(group="96 layers", against="48 layers")])
    assert scaling[1].split()[2:] == [
        "96", "layers", "reference", "48", "layers", "1.500", "1.500-1.500", "1.5", "s",
    ]  # fmt: skip
    assert max(map(len, scaling)) <= 80
    memory = [row(unit="bytes", pairs=((1e9, 1.25e9),), backend="")]
    assert lines(memory)[1].split() == ["Block", "AttnRes", "PreNorm", "1.250", "1,250", "MB"]
    assert "backend" not in lines(memory)[0]
    assert table([row()]).row_count == 1


def test_amounts():
    assert [amount(x, "s") for x in (12.34, 0.01234, 1.2e-5)] == ["12.3 s", "12.3 ms", "0.012 ms"]
    assert [amount(x, "bytes") for x in (25e6, 2_500)] == ["25 MB", "2 kB"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
def test_compiled_steps_are_checked_and_measured_too(tiny):
    compiled = tiny(compile=True, methods=(WAV(),))
    rows, _ = run("step", compiled)
    assert max(max(row.details["deviation"].values()) for row in rows) < 1e-4
    eager = tiny(methods=(WAV(),))
    peaks = [run("memory", settings)[0][0].measured for settings in (compiled, eager)]
    # compiled sublayers keep less
    assert 0.3 < peaks[0] / peaks[1] < 1
