import pytest

from resroute.config import UserError
from resroute.core import SIGN_RULES, block_sites, sign_rule, signs

LAYER = ("attention", "mlp")


def test_phase_is_attention_minus_mlp():
    assert signs("phase", LAYER * 2) == [1.0, -1.0, 1.0, -1.0]
    assert signs("phase", ("mlp", "conv", "attention")) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "kinds", [("attention",), ("attention", "attention", "mlp"), ("conv",) * 4]
)
def test_phase_refuses_blocks_in_which_it_is_not_zero_sum(kinds):
    with pytest.raises(UserError, match="phase basis needs as many attention as mlp"):
        signs("phase", kinds)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [0.0]),
        (2, [1.0, -1.0]),
        (3, [1.0, 0.0, -1.0]),
        (6, [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    ],
)
def test_split_is_first_half_minus_second(length, expected):
    assert signs("split", ("any",) * length) == expected


def test_controls():
    assert signs("duplicate", LAYER * 3) == [1.0] * 6
    drawn = [signs("random", LAYER * 6, seed) for seed in range(20)]
    assert all(sorted(row) == [-1.0] * 6 + [1.0] * 6 for row in drawn)
    assert len({tuple(row) for row in drawn}) > 15
    assert drawn[3] == signs("random", LAYER * 6, 3)
    assert sorted(signs("random", ("x",) * 3, 0)) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("layers", [3, 4, 12])
def test_random_controls_are_none_of_the_details_and_not_each_other(layers):
    kinds = LAYER * layers
    meant = [signs("phase", kinds), signs("split", kinds)]
    for seed in range(200):
        first, second = signs("random", kinds, seed), signs("random_2", kinds, seed)
        assert sum(first) == sum(second) == 0
        for drawn, others in ((first, meant), (second, [*meant, first])):
            for other in others:
                assert drawn != other
                assert drawn != [-sign for sign in other]


def test_short_blocks_have_no_other_direction():
    assert signs("random", LAYER, 0) in ([1.0, -1.0], [-1.0, 1.0])
    # phase, split and one more, up to sign
    edges = [1.0, -1.0, -1.0, 1.0]
    for seed in range(20):
        assert signs("random", LAYER * 2, seed) in (edges, [-sign for sign in edges])
        assert sum(signs("random_2", LAYER * 2, seed)) == 0


def test_unknown_basis_names_a_close_one():
    with pytest.raises(UserError, match=r"unknown basis 'fase' \(did you mean 'phase'\?\)"):
        signs("fase", LAYER)


def test_a_new_rule_joins_the_registry(monkeypatch):
    monkeypatch.setitem(SIGN_RULES, "old", SIGN_RULES["split"])
    try:

        @sign_rule("edges")
        def edges(kinds, seed):
            return [1.0] + [0.0] * (len(kinds) - 2) + [-1.0]

        assert signs("edges", LAYER * 2) == [1.0, 0.0, 0.0, -1.0]
        with pytest.raises(AssertionError, match="registered twice"):
            sign_rule("edges")(edges)
    finally:
        SIGN_RULES.pop("edges", None)


def test_block_sites():
    assert block_sites(7, 2, 3) == [range(0, 6), range(6, 12), range(12, 14)]
    assert block_sites(2, 3, 2) == [range(0, 6)]


def test_second_controls_add_a_source_of_the_same_kind():
    kinds = LAYER * 6

    assert signs("duplicate_2", kinds) == signs("duplicate", kinds) == [1.0] * 12
    again = [signs("random_2", kinds, seed) for seed in range(20)]
    assert all(sorted(values) == [-1.0] * 6 + [1.0] * 6 for values in again)
    # independent of the first draw: 924 patterns, so that few seeds may agree by chance
    assert sum(values == signs("random", kinds, seed) for seed, values in enumerate(again)) <= 1
    assert again[3] == signs("random_2", kinds, 3)
