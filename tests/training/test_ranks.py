"""Several processes against one: equal weights and losses, shared data, few messages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import resroute as rr
from resroute.config import to_dict
from resroute.data import evaluation_windows, training_batch
from resroute.model import GPT

FOUR = pytest.mark.slow
WORLDS = [
    pytest.param("ddp", 2),
    pytest.param("fsdp", 2),
    pytest.param("ddp", 4, marks=FOUR),
    pytest.param("fsdp", 4, marks=FOUR),
]
worlds = pytest.mark.parametrize(("parallel", "size"), WORLDS)

# of 12 rows 4 processes take 3 each; of 46 symbols, 10 rows or 5 sites not all take as many, and of
# 2 sites or a head's 2 gains not all take one
CASES = {
    "prenorm": {"residual": rr.PreNorm()},
    "rezero": {"residual": rr.ReZero()},
    "layerscale": {"residual": rr.LayerScale()},
    "full": {"residual": rr.FullAttnRes()},
    "block": {"residual": rr.BlockAttnRes(num_blocks=2)},
    "delta": {"residual": rr.DeltaAttnRes(gated=True)},
    "wav": {"residual": rr.WAV(num_blocks=1)},
    "wav-learned": {"residual": rr.WAV(num_blocks=1, learn_bases=True, details_in_readout=True)},
    "wav-fixed-bias": {"residual": rr.WAV(num_blocks=1, learn_detail_bias=False)},
    "tied": {"model": {"tie_embeddings": True}},
    "positions": {"model": {"position": "learned", "mlp": "gelu"}},
    "qk-norm": {"model": {"qk_norm": True, "num_heads": 6, "num_kv_heads": 3}},
    "recomputed": {"activation_checkpointing": True},
    "averaged": {"ema_decay": 0.7},
    "accumulated": {"accumulation": 2},
    "odd": {"model": {"dim": 10, "num_heads": 5, "qk_norm": True, "mlp_ratio": 1.3}},
    "one-layer": {"residual": rr.ReZero(), "model": {"num_layers": 1}},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.fixture(scope="module")
def configure(cheap_corpus):
    def make(residual=None, *, model=None, **options):
        shape = {"num_layers": 2, "dim": 12, "num_heads": 2, "context": 48, **(model or {})}
        residual = residual or rr.WAV(num_blocks=1)
        vocabulary = cheap_corpus.tokenizer.vocab_size
        settings = {"batch_size": 8, "learning_rate": 3e-3, "precision": "float32", **options}
        return rr.TrainConfig(
            model=rr.GPTConfig(vocab_size=vocabulary, residual=residual, **shape),
            data=str(cheap_corpus.path),
            device="cpu",
            **settings,
        )

    return make


@pytest.fixture(scope="module")
def learn(workers, configure, tmp_path_factory):
    """Runs `learn` of rank_actions.py on some processes, for several cases by name.

    Returns where their weights are and what each process found, by name.
    """

    def run(size, cases, parallel="ddp", **options):
        folder = tmp_path_factory.mktemp("learned")
        jobs = []
        for name, case in cases.items():
            config = to_dict(configure(**{"parallel": parallel, **case}))
            jobs.append(("learn", {"config": config, "out": str(folder / name), **options}))
        answers = workers.values("several", size, jobs=jobs)
        found = {name: [of_rank[place] for of_rank in answers] for place, name in enumerate(cases)}
        return folder, found

    return run


@pytest.fixture(scope="module")
def learned(learn):
    """What a world learns from all cases; worked out once a world."""
    known = {}

    def ask(parallel, size):
        if (parallel, size) not in known:
            known[parallel, size] = learn(size, CASES, parallel, windows=[1, 5])
        return known[parallel, size]

    return ask


def close(a, b, rtol, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=rtol, atol=atol, msg=name)


@worlds
@pytest.mark.parametrize("case", CASES)
def test_weights_and_losses_are_those_of_one_process(learned, parallel, size, case):
    (one_folder, ones), (folder, several) = learned("ddp", 1), learned(parallel, size)
    (one,), found = ones[case], several[case]
    # processes add the same terms in another order: float32 rounds each sum anew, 1e-7 of it, and
    # AdamW hands a small gradient's relative error to its weight; bfloat16 rounds products to 4e-3
    is_narrow = case == "bfloat16"
    rel = 2e-3 if is_narrow else 1e-6
    for what in ("steps", "evaluations", "averaged"):
        assert all(of_rank[what] == found[0][what] for of_rank in found), what
        values = torch.tensor(found[0][what]).flatten().tolist()
        expected = torch.tensor(one[what]).flatten().tolist()
        assert values == pytest.approx(expected, rel=10 * rel if what == "steps" else rel), what
    assert one["steps"][5][0] < one["steps"][0][0] - 0.01
    assert len(one["averaged"]) == (2 if case == "averaged" else 0)
    groups = ("model", "ema") if case == "averaged" else ("model",)
    for file in (f"{case}/final/{group}.safetensors" for group in groups):
        rtol, atol = (0.1, 5e-3) if is_narrow else (1e-4, 1e-6)
        close(load_file(one_folder / file), load_file(folder / file), rtol, atol)


@worlds
@pytest.mark.parametrize("case", CASES)
def test_initial_weights_are_the_models_own_to_the_bit(learned, configure, parallel, size, case):
    config = configure(**CASES[case])
    torch.manual_seed(config.seed)
    expected = GPT(config.model).state_dict()
    folder, _ = learned(parallel, size)
    saved = load_file(folder / case / "initial" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name


@worlds
def test_processes_share_the_batch_of_one(learned, configure, cheap_corpus, parallel, size):
    config = configure()
    _, found = learned(parallel, size)
    for case in ("wav", "accumulated"):
        for step in range(6):
            inputs, _ = training_batch(
                cheap_corpus, context=48, batch_size=8, seed=config.seed, step=step
            )
            shares = [of_rank["rows"][step] for of_rank in found[case]]
            assert [len(share) for share in shares] == [8 // size] * size
            assert [row for share in shares for row in share] == inputs.tolist()


ACCUMULATED = {
    str(parts): {"accumulation": parts, "batch_size": 16, "residual": rr.WAV(learn_bases=True)}
    for parts in (1, 4)
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_accumulation_exchanges_gradients_once_a_step(learn, parallel):
    options = {"steps": 2, "counting": True, "gradients": True}
    folder, found = learn(2, ACCUMULATED, parallel, **options)
    counts = {parts: of_rank["counts"] for parts, (of_rank, _) in found.items()}
    # 2 layers and the embedding are units, and all else is one
    exchange = {"ddp": ("allreduce_", 3), "fsdp": ("_reduce_scatter_base_", 4)}[parallel]
    for parts in ("1", "4"):
        for step in counts[parts]:
            assert step[exchange[0]] == exchange[1], counts
    one, four = (load_file(folder / parts / "gradients/model.safetensors") for parts in "14")
    assert len(one) == 23
    assert all(value.abs().max() > 0 for value in one.values())
    close(one, four, 1e-4, 1e-7)
    assert found["4"][0]["steps"][0] == pytest.approx(found["1"][0]["steps"][0], rel=1e-6)


@pytest.mark.parametrize(
    "case", ["wav", "recomputed", "accumulated", "bfloat16", "tied", "positions"]
)
def test_what_is_small_is_gathered_once_a_step_in_float32(learned, configure, case):
    _, found = learned("fsdp", 2)
    with torch.device("meta"):
        model = GPT(configure(**CASES[case]).model)
    matrices = {
        index: sorted(
            f"layers.{index}.{name}.weight"
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear)
        )
        for index, layer in enumerate(model.layers)
    }
    apart = {name for names in matrices.values() for name in names}
    if case != "tied":
        apart.add("embedding.weight")
    small = sorted(name for name, _ in model.named_parameters() if name not in apart)
    assert "policy.query" in small
    assert "norm.weight" in small
    narrow = ["torch.bfloat16" if case == "bfloat16" else "torch.float32"]
    for of_rank in found[case]:
        for units in of_rank["units"]:
            assert [dtypes for names, dtypes in units if names == small] == [["torch.float32"]]
            assert not [names for names, _ in units if names != small and set(names) & set(small)]
            for names in matrices.values():
                dtypes = {str(dtypes) for of_unit, dtypes in units if of_unit == names}
                assert dtypes == {str(narrow)}
        for units in of_rank["units_of_evaluations"]:
            assert [names for names, _ in units].count(small) == 1


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=FOUR)])
def test_evaluation_is_a_sum_over_processes(learn, cheap_corpus, size):
    # whole documents in each window, and the rest of it is not counted
    windows = [1, 3, 5, 7]
    targets = evaluation_windows(cheap_corpus, context=256, max_windows=7).targets
    assert len({int((row >= 0).sum()) for row in targets}) > 3
    case = {"model": {"context": 256}, "batch_size": 4, "ema_decay": 0.5, "learning_rate": 0.1}
    cases = {kind: {**case, "parallel": kind} for kind in ("ddp", "fsdp")}
    (one,) = learn(1, {"ddp": cases["ddp"]}, steps=2, windows=windows)[1]["ddp"]
    assert len({round(loss, 3) for loss in one["evaluations"] + one["averaged"]}) == 8
    for of_ranks in learn(size, cases, steps=2, windows=windows)[1].values():
        for found in of_ranks:
            for what in ("evaluations", "averaged"):
                assert found[what] == of_ranks[0][what]
                assert found[what] == pytest.approx(one[what], rel=1e-6)


def names(run):
    return {str(path.relative_to(run)) for path in Path(run).rglob("*")}


def numbers(line):
    """What a line of metrics says of the model."""
    names = ("loss", "ema_loss", "grad_norm", "entropy", "detail_weight", "embedding_weight")
    return {name: line[name] for name in ("step", *names) if name in line}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_writes_and_is_heard(workers, make_config, parallel, runs):
    options = {"ema_decay": 0.5, "observe_every": 3, "peak_flops": 1e10}
    one = make_config(out="one", **options)
    several = make_config(out="several", parallel=parallel, **options)
    (alone,) = workers.values("train_watched", config=one)
    main, other = workers.values("train_watched", 2, config=several)
    assert main["heard"][1:] == alone["heard"][1:]
    assert f"2 processes ({parallel})" in main["heard"][0]
    assert "metrics.jsonl" in main["changed"]
    assert (other["heard"], other["changed"]) == ([], [])
    assert {**other["summary"], "seconds": 0} == {**main["summary"], "seconds": 0}
    assert names(several.out) == names(one.out)
    ours, theirs = runs.lines(several.out), runs.lines(one.out)
    assert [line["kind"] for line in ours] == [line["kind"] for line in theirs]
    assert len(ours) == 12
    for a, b in zip(ours, theirs, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-5)
    ours, theirs = (
        json.loads(Path(config.out, "depth_weights.json").read_text()) for config in (several, one)
    )
    for a, b in zip(ours.pop("weights"), theirs.pop("weights"), strict=True):
        # no number where there is no source yet
        assert [w or -1.0 for w in a] == pytest.approx([w or -1.0 for w in b], rel=1e-5)
    assert ours == theirs


def errors(answers):
    return [answer["error"] for answer in answers]


MISTAKES = {
    "batch": ({"batch_size": 3}, "batch_size 3 must be divisible by 2 processes times"),
    "compile": ({"compile": True, "parallel": "fsdp"}, "compile does not go with parallel=fsdp"),
    "device": ({"device": "cuda"}, "device 'cuda:0' was asked for, but torch finds none here"),
    "folder": ({"steps": 5}, "belongs to another configuration, which differs in steps (6 there"),
}


@pytest.mark.parametrize(("options", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_stops_all_and_one_says_it(workers, make_config, options, said):
    if "device" in options and torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    if "steps" in options:
        rr.train(make_config(), stop_at=0)
    found = errors(workers.run("train", 2, timeout=60, config=make_config(**options)))
    assert [kind for kind, _ in found] == ["UserError", "OtherRankError"]
    assert said in found[0][1]
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize(
    ("mistaken", "said"), [([1], "process 1: the fault of 1"), ([0, 2], "the fault of 0")]
)
def test_the_main_process_says_what_another_is_mistaken_in(workers, mistaken, said):
    found = errors(workers.run("prepare_together", 3, timeout=60, mistaken=mistaken))
    assert found == [["UserError", said], ["OtherRankError", said], ["OtherRankError", said]]
    assert workers.values("prepare_together", 3, mistaken=[]) == [0, 1, 2]


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_checkpoint_that_cannot_be_written_stops_all(workers, make_config, layout):
    config = make_config(checkpoint_layout=layout, parallel="fsdp", peak_flops=1e10)
    workers.values("train", 2, config=config, stop_at=0)
    checkpoints = Path(config.out, "checkpoints")
    checkpoints.rename(checkpoints.with_name("aside"))
    checkpoints.write_text("")
    found = errors(workers.run("train", 2, timeout=60, config=config, resume=True))
    assert [kind for kind, _ in found] == ["UserError", "OtherRankError"]
    assert "step_000002: cannot be written (File exists)" in found[0][1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_no_process_waits_for_one_that_fails_alone(workers, make_config, parallel):
    config = make_config(parallel=parallel, batch_size=6, peak_flops=1e10)
    answers = workers.run("train_watched", 3, timeout=60, config=config, fails_at=3)
    main, *others = errors(answers)
    assert main == ["UserError", "the ear hurts"]
    # what gloo says of a connection that was closed
    assert [kind for kind, _ in others] == ["RuntimeError"] * 2


def test_processes_meet_where_those_before_them_have_met(workers):
    # torchrun keeps its store over a restart; what the killed have left there is not to be found
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(3):
        found = workers.values("meet", 3, timeout=60, port=store.port, late=0.3)
        assert found == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("name", ["read_gathered", "shard_sizes", "open_checkpoint"])
def test_a_checkpoint_that_one_process_cannot_read_is_read_by_none(workers, make_config, name):
    layout = "gathered" if name == "read_gathered" else "sharded"
    module = "tensors" if name == "shard_sizes" else "checkpoint"
    config = make_config(checkpoint_layout=layout, parallel="fsdp")
    jobs = [("train", {"config": to_dict(config), "stop_at": 2})]
    failing = {"rank": 1, "module": f"resroute.training.{module}", "name": name, "resume": True}
    jobs.append(("train_failing", {"config": to_dict(config), **failing}))
    found = errors(workers.run("several", 2, timeout=60, jobs=jobs))
    said = f"{config.out}: none of its 1 checkpoints can be used\nprocess 1: {name} fails here"
    assert found == [["UserError", said], ["OtherRankError", said]]


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_state_that_cannot_be_written_stops_all(workers, make_config, runs, layout):
    config = make_config(checkpoint_layout=layout, parallel="fsdp")
    failing = {"rank": 0, "module": "resroute.training.checkpoint", "name": "write_json"}
    found = errors(workers.run("train_failing", 2, timeout=60, config=config, **failing))
    assert found == [
        ["UserError", "write_json fails here"], ["OtherRankError", "write_json fails here"],
    ]  # fmt: skip
    assert runs.leftovers(config.out) == []


def test_a_folder_that_cannot_be_made_stops_all(workers, make_config, tmp_path):
    (tmp_path / "file").write_text("")
    config = make_config(out="file/run")
    found = errors(workers.run("train", 2, timeout=60, config=config))
    said = f"{config.out}: cannot be written (Not a directory); check the folder"
    assert found == [["UserError", said], ["OtherRankError", said]]


def test_processes_that_were_given_different_runs_do_not_begin(workers, make_config, tmp_path):
    config = to_dict(make_config())
    other = rr.prepare_storyworld(tmp_path / "tales", characters=30_000, seed=5)
    differences = {
        "learning_rate, seed": ({"seed": 1, "learning_rate": 0.5}, {}),
        "evaluate_every": ({"evaluate_every": 3}, {}),
        "corpus": ({"data": str(other.path)}, {}),
        "resume, stop_at": ({}, {"resume": True, "stop_at": 3}),
    }
    for named, (fields, options) in differences.items():
        found = errors(
            workers.run(
                "train_each", 2, timeout=60, configs=[config, {**config, **fields}],
                options=[{}, options],
            )
        )  # fmt: skip
        assert found[0][1] == (
            f"process 1 was given another run than process 0, which differs in {named}; give all "
            "the same command and corpus"
        )
        assert [kind for kind, _ in found] == ["UserError", "OtherRankError"]
    assert not Path(config["out"]).exists()


def test_each_process_may_name_its_own_place_of_the_corpus(workers, make_config, tmp_path):
    config = to_dict(make_config(steps=1))
    (tmp_path / "mounted").symlink_to(config["data"])
    configs = [config, {**config, "data": str(tmp_path / "mounted"), "peak_flops": 1e10}]
    main, other = workers.values("train_each", 2, configs=configs, options=[{}, {}])
    assert main["validation_loss"] == other["validation_loss"]


def test_processes_meet_again_at_the_same_address(workers):
    assert workers.values("meet_again", 2, timeout=90, times=12) == [[2.0] * 12] * 2
