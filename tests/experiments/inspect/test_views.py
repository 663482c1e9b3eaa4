"""What figures show, of inspections made by hand."""

import pytest

from resroute.experiments.importance import Ablation, Importance
from resroute.experiments.inspect.summary import summary
from resroute.experiments.inspect.views import (
    BlockBases,
    Held,
    bases_of,
    by_kind,
    by_site_kind,
    histories,
    measures,
)

from .conftest import SITES, bases_of_blocks, site, table_of


def approx(values):
    return [value if value is None else pytest.approx(value, abs=1e-12) for value in values]


def test_weight_by_kind_adds_up_blocks():
    found = by_kind(table_of(SITES))
    assert list(found) == ["embedding", "state", "running state"]
    assert found["embedding"] == [1.0, 0.25, 0.5, 0.1, 0.2]
    # a site without such a source has a gap, the readout two blocks
    assert found["state"] == approx([None, None, 0.5, 0.2, 0.8])
    assert found["running state"] == [None, 0.75, None, 0.7, None]


def test_mean_weight_by_kind_of_site(make_inspection):
    found = by_site_kind(make_inspection())
    assert list(found) == ["all", "attention", "mlp", "readout"]
    # those of finished blocks first
    assert list(found["all"]) == ["embedding", "state", "running state"]
    assert list(found["all"].values()) == approx([2.05 / 5, 1.5 / 5, 1.45 / 5])
    assert list(found["attention"].values()) == approx([0.75, 0.25, None])
    assert list(found["mlp"].values()) == approx([0.175, 0.1, 0.725])
    # no read of these has a running block
    assert list(found["readout"].values()) == approx([0.2, 0.8, None])


def test_sites_that_mix_nothing_do_not_count(make_inspection):
    sites = (
        site(0, "0 attention", {}), site(1, "0 mlp", {"embedding": 0.25, "state 0": 0.75}),
        site(2, "readout", {}),
    )  # fmt: skip
    found = by_site_kind(make_inspection(sites))
    assert found == {
        "all": {"embedding": 0.25, "state": 0.75}, "mlp": {"embedding": 0.25, "state": 0.75},
    }  # fmt: skip


def test_weights_that_are_not_known_are_gaps(make_inspection):
    lost = {
        **SITES[4],
        "weights": {"embedding": None, "state 0": None},
        "kinds": {"embedding": None},
    }
    sites = (*SITES[:4], lost)
    found = by_site_kind(make_inspection(sites))
    assert found["readout"] == {"embedding": None, "state": None, "running state": None}
    assert found["all"]["embedding"] == pytest.approx(1.85 / 4)
    assert by_kind(table_of(sites))["embedding"][4] is None


def test_measures_are_what_is_known(make_inspection):
    sites = list(SITES)
    sites[2] = {**sites[2], "coefficient": 0.5, "gate": 0.25, "update_gradient": 0.125}
    found = {one.name: one for one in measures(make_inspection(sites))}
    assert found.keys() == {
        "size of updates", "size of reads", "update beside read", "gate", "gradient at updates",
        "coefficient of updates", "cosine of update and running state",
    }  # fmt: skip
    assert found["size of updates"].values == (1.0, 3.0, None, 0.5, None)
    assert found["size of reads"].values == (2.0, 0.0, 4.0, None, 1.0)
    # nothing is compared with a read of zero, or one that is not known
    assert found["update beside read"].values == (0.5, None, None, None, None)
    assert found["update beside read"].unit == "ratio of RMS"
    assert found["cosine of update and running state"].values == (None, None, None, -0.5, None)
    assert found["gate"].values == (None, None, 0.25, None, None)
    assert found["coefficient of updates"].values == (None, None, 0.5, None, None)
    assert found["gradient at updates"].values == (None, None, 0.125, None, None)


def test_what_a_site_adds_is_its_update_times_the_coefficient(make_inspection):
    sites = [
        site(0, "0 attention", {}, update_rms=3.0, read_rms=2.0, coefficient=0.5),
        site(1, "0 mlp", {}, update_rms=3.0, read_rms=2.0, coefficient=0.0),
        site(2, "1 attention", {}, update_rms=3.0, read_rms=2.0),
        site(3, "1 mlp", {}, read_rms=2.0, coefficient=0.5), site(4, "readout", {}, read_rms=1.0),
    ]  # fmt: skip
    found = {one.name: one.values for one in measures(make_inspection(sites))}
    assert found["update beside read"] == (0.75, 0.0, 1.5, None, None)
    # which is before the coefficient
    assert found["size of updates"] == (3.0, 3.0, 3.0, None, None)


def routing(step, **fields):
    return {"kind": "routing", "step": step, **fields}


def test_histories_by_step(make_inspection):
    records = (
        {"kind": "train", "step": 10, "loss": 3.0},
        # a run that went on from an earlier checkpoint
        routing(
            20, update_rms=[4.0, 1, 3.0], kinds={"embedding": 0.4, "phase": 0.1},
            effective_sources=1.5, detail_weight=0.1, embedding_weight=0.4,
            source_rms={"embedding": 1.0, "state 0": 2.0},
        ),
        routing(
            10, update_rms=[2.0, None, 1.0, 0.5], kinds={"embedding": 0.5}, effective_sources=1.25,
            detail_weight=0, embedding_weight=0.5, source_rms={"embedding": 1.0, "state 0": None},
        ),
        {"kind": "train", "step": 5, "loss": None},
        {"kind": "train", "step": 6, "loss": 4.0},
        {"kind": "validation", "step": 10, "loss": 3.5},
        {"kind": "validation", "step": 11, "loss": True},
        {"kind": "validation", "step": 12, "loss": 10**400},
        {"kind": "note", "step": 12, "loss": 1.0},
    )  # fmt: skip
    past = {10: table_of(SITES[:2]), 5: table_of(SITES[:1])}
    found = {one.name: one for one in histories(make_inspection(records=records, past=past))}

    def lines(name):
        return {line.name: (line.x, line.y) for line in found[name].lines}

    assert lines("weight by kind of source") == {
        "embedding": ((10, 20), (0.5, 0.4)), "phase": ((20,), (0.1,)),
    }  # fmt: skip
    assert lines("effective sources") == {"all reads": ((10, 20), (1.25, 1.5))}
    assert lines("weight on details") == {"all reads": ((10, 20), (0.0, 0.1))}
    assert lines("weight on the embedding") == {"all reads": ((10, 20), (0.5, 0.4))}
    assert lines("size of sources") == {
        "embedding": ((10, 20), (1.0, 1.0)), "state 0": ((20,), (2.0,)),
    }  # fmt: skip
    assert lines("size of updates") == {
        "largest": ((10, 20), (2.0, 4.0)), "middle": ((10, 20), (1.0, 3.0)),
        "smallest": ((10, 20), (0.5, 1.0)),
    }  # fmt: skip
    assert lines("loss") == {"train": ((6, 10), (4.0, 3.0)), "validation": ((10,), (3.5,))}
    assert found["loss"].unit == "nats a token"


def test_weight_by_kind_of_earlier_checkpoints_and_this(make_inspection):
    now, before = table_of(SITES[1:3]), table_of(SITES[1:3])
    # a site that mixes nothing does not count
    before["weights"] = [[0.5, None, 0.5], [None, None, None]]
    (found,) = histories(make_inspection(SITES[1:3], past={20: now, 10: before}))
    assert found.name == "weight by kind, of checkpoints"
    assert [line.name for line in found.lines] == ["embedding", "state", "running state"]
    assert {line.x for line in found.lines} == {(10, 20, 30)}
    assert list(found.lines[0].y) == approx([0.5, 0.375, 0.375])
    assert list(found.lines[1].y) == approx([0.0, 0.25, 0.25])
    assert list(found.lines[2].y) == approx([0.5, 0.375, 0.375])


def test_nothing_is_a_history_with_one_point(make_inspection):
    records = ({"kind": "train", "step": 10, "loss": 3.0}, routing(10, update_rms=[1.0]))
    assert histories(make_inspection(records=records)) == []
    # without a step the present has no place
    past = {10: table_of(SITES)}
    assert histories(make_inspection(past=past, step=None)) == []
    assert len(histories(make_inspection(past=past))) == 1


def test_a_checkpoint_of_which_nothing_is_known_is_left_out(make_inspection):
    lost = {**table_of(SITES), "weights": [[None] * 4] * 5}
    (found,) = histories(make_inspection(past={10: table_of(SITES), 20: lost}))
    assert found.lines[0].x == (10, 30)


def test_bases_of_blocks_and_their_mean(make_inspection):
    mean, first, second = bases_of(make_inspection())
    assert (mean.name, mean.size) == ("mean of the blocks", 4)
    assert list(mean.pca) == approx([0.5, 0.875, 0.94, 1.0])
    assert [(one.name, one.count) for one in mean.sets] == [("state", 1), ("state + phase", 2)]
    assert [one.share for one in mean.sets] == approx([0.4, 0.8])
    assert first == BlockBases(
        name="block 0", size=4, pca=(0.6, 0.8, 0.9, 1.0),
        sets=(
            Held(name="state", count=1, share=0.5),
            Held(name="state + phase", count=2, share=0.7),
        ),
    )  # fmt: skip
    assert second.sets[1].share == 0.9
    unequal = bases_of_blocks(({"state": 0.5}, (0.6, 1.0)), ({"state": 0.4}, (0.6, 0.9, 1.0)))
    found = bases_of(make_inspection(bases=unequal))
    assert [(one.name, one.size) for one in found] == [("block 0", 2), ("block 1", 3)]
    one = bases_of_blocks(({"state": 0.5}, (0.6, 1.0)))
    assert [block.name for block in bases_of(make_inspection(bases=one))] == ["block 0"]
    assert bases_of(make_inspection(bases={"blocks": []})) == []


@pytest.mark.parametrize(
    ("blocks", "word"),
    [([], "part"), ([[0, 1], [1, 2], [2, 3], [3, 4]], "part"), ([[0, 1], [1, 4]], "block")],
)
def test_depth_is_parted_where_a_method_has_no_blocks(make_inspection, blocks, word):
    seen = {**make_inspection().seen, "blocks": blocks}
    found = make_inspection(seen=seen)
    names = [f"mean of the {word}s", f"{word} 0", f"{word} 1"]
    assert [one.name for one in bases_of(found)] == names
    assert (
        f"Share of the energy of updates (mean of the {word}s) that lies in" in shown(found)[0][1]
    )


def shown(inspection):
    """A summary as lines, and its tables as columns of cells."""
    parts = list(summary(inspection))
    texts = [part for part in parts if isinstance(part, str)]
    tables = [[list(c.cells) for c in part.columns] for part in parts if not isinstance(part, str)]
    return texts, tables


def test_a_summary_by_value(make_inspection):
    items = [
        Ablation(name=f"layer {i}", sites=(i,), change=change, error=error, mass=None)
        for i, (change, error) in enumerate(
            [(0.5, None), (-0.25, 0.00119), (0.125, None), (0.75, 0.0625)]
        )
    ]
    needs = Importance(by="layer", loss=2.5, windows=1, tokens=32, items=tuple(items))
    texts, (kinds, depth) = shown(make_inspection(importance=(needs,)))
    assert texts == [
        "Health: no findings",
        "Growth of the loss without each layer: layer 3 +0.7500 \u00b1 0.0625, layer 0 +0.5000, "
        "layer 2 +0.1250, layer 1 -0.2500 \u00b1 0.0012",
        "Share of the energy of updates (mean of the blocks) that lies in state 40.0 % (the best 1 "
        "of 4: 50.0 %), state + phase 80.0 % (the best 2 of 4: 87.5 %)",
        "One more vector than in use would add at most 3.0 %",
    ]
    assert kinds == [
        ["embedding", "state", "running state"], ["0.410", "0.300", "0.290"],
        ["0.750", "0.250", "-"], ["0.175", "0.100", "0.725"], ["0.200", "0.800", "-"],
    ]  # fmt: skip
    assert depth == [["0", "1"], ["-", "-"], ["2", "0.5"], ["1", "4"], ["-", "-"]]


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (
            8,
            "layer 7 +0.8750, layer 6 +0.7500, layer 5 +0.6250, layer 4 +0.5000, layer 3 +0.3750, "
            "layer 2 +0.2500, layer 1 +0.1250, layer 0 +0.0000",
        ),
        (
            9,
            "layer 8 +1.0000, layer 7 +0.8750, layer 6 +0.7500, .., layer 2 +0.2500, "
            "layer 1 +0.1250, layer 0 +0.0000",
        ),
    ],
)
def test_a_summary_of_many_items_and_of_no_sources(make_inspection, count, told):
    items = [
        Ablation(name=f"layer {i}", sites=(i,), change=i / 8, error=None, mass=None)
        for i in range(count)
    ]
    needs = Importance(by="layer", loss=2.5, windows=1, tokens=32, items=tuple(items))
    sites = [site(i, f"{i} mlp", {}, update_rms=1.0 + i) for i in range(7)]
    texts, (depth,) = shown(
        make_inspection(
            [*sites, site(7, "readout", {})], importance=(needs,), num_layers=7,
            bases={"blocks": []},
        )
    )  # fmt: skip
    assert texts[1:] == [f"Growth of the loss without each layer: {told}"]
    # six parts at most, of two layers each; methods without sources have no number of them
    assert depth[:2] == [["0 to 1", "2 to 3", "4 to 5", "6"], ["1.5", "3.5", "5.5", "7"]]


def heads(inspection):
    """Names of the columns of a summary's tables."""
    return [
        [str(column.header) for column in part.columns]
        for part in summary(inspection)
        if not isinstance(part, str)
    ]


def test_a_summary_tells_gates_and_coefficients_where_there_are_some(make_inspection):
    assert heads(make_inspection()) == [
        ["mean weight on", "all", "attention", "mlp", "readout"],
        ["layers", "effective sources", "update RMS", "read RMS", "update gradient (L2)"],
    ]
    gated = [{**SITES[0], "effective_sources": 1.0}, {**SITES[1], "gate": 0.25}, *SITES[2:]]
    gated[3] = {**gated[3], "gate": 0.5}
    kinds, depth = heads(make_inspection(gated))
    assert kinds[0] == "mean weight, behind the gates, on"
    assert depth[1:4] == ["effective sources", "gate", "update RMS"]
    # the mean of those that have one
    assert shown(make_inspection(gated))[1][1][1:3] == [["1", "-"], ["0.25", "0.5"]]
    scaled = [
        site(0, "0 attention", {}, coefficient=0.5, update_rms=2.0),
        site(1, "0 mlp", {}, coefficient=0.25), site(2, "1 attention", {}, coefficient=0.125),
        site(3, "1 mlp", {}), site(4, "readout", {}),
    ]  # fmt: skip
    (depth,) = heads(make_inspection(scaled))
    assert depth == ["layers", "coefficient", "update RMS", "read RMS", "update gradient (L2)"]
    assert shown(make_inspection(scaled))[1][0][1:3] == [["0.375", "0.125"], ["2", "-"]]
