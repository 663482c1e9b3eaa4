"""A text token by token: weights against a stream that is run by hand, depths by hand."""

import math

import pytest
import torch

import resroute as rr
from resroute.config import UserError
from resroute.data import END_OF_TEXT, CharTokenizer
from resroute.experiments.inspect.prompt import shown_ids, source_depths, token_reads
from resroute.testing import randomise, small_gpt

from .conftest import Other

LETTERS = CharTokenizer((*"abcdefghij", END_OF_TEXT))
TEXT = "badge"
IDS = torch.tensor([1, 0, 3, 6, 4])


def model_of(residual):
    # learned positions, so that a sublayer needs nothing but what it reads
    model = small_gpt(residual=residual, position="learned").eval()
    randomise(model.policy)
    with torch.no_grad():
        model.head.weight.mul_(300)
        for layer in model.layers:
            layer.mlp.output.weight.mul_(300)
    return model


@torch.no_grad()
def weights_by_hand(model):
    """By site, names of sources and weights of each token."""
    policy, found = model.policy, []
    stream = policy.start(model.embedding(IDS) + model.positions.weight[: len(IDS)])
    for site in range(policy.num_sites):
        found.append(policy.weights(stream, site))
        layer, read = model.layers[site // 2], policy.read(stream, site)
        if site % 2:
            update = layer.mlp(layer.mlp.norm(read))
        else:
            update = layer.attention(layer.attention.norm(read)[None], None, None, 0)[0]
        stream = policy.write(stream, site, update)
    return [*found, policy.weights(stream, policy.num_sites)]


METHODS = (
    rr.WAV(num_blocks=2), rr.FullAttnRes(), rr.DeltaAttnRes(num_blocks=2),
    rr.BlockAttnRes(num_blocks=2, gated=True),
)  # fmt: skip


@pytest.mark.parametrize("residual", METHODS, ids=str)
def test_weights_are_those_of_a_stream_run_by_hand(residual):
    model = model_of(residual)
    found = token_reads(model, LETTERS, IDS.tolist())
    assert found.tokens == tuple(TEXT)
    names = [f"{site // 2} {('attention', 'mlp')[site % 2]}" for site in range(8)] + ["readout"]
    expected = weights_by_hand(model)
    # where Delta reads its plain sum nothing is mixed
    mixing = [site for site in range(9) if expected[site][0]]
    assert len(mixing) == (7 if isinstance(residual, rr.DeltaAttnRes) else 9)
    assert [site.name for site in found.sites] == [names[site] for site in mixing]
    for place, site in zip(mixing, found.sites, strict=True):
        sources, weights = expected[place]
        assert site.sources == tuple(sources)
        assert site.depths == tuple(source_depths(model.policy, place).values())
        assert len(site.weights) == 5
        for row, one in zip(site.weights, weights.tolist(), strict=True):
            assert row == pytest.approx(one, abs=1e-5)
            assert sum(row) == pytest.approx(1.0, abs=1e-5)
    # each token has weights of its own
    assert len(set(found.sites[4].weights)) == 5


def test_losses_are_those_of_each_token_given_those_before():
    model = model_of(rr.WAV(num_blocks=2))
    found = token_reads(model, LETTERS, IDS.tolist())
    assert found.losses[0] is None
    for t in range(1, 5):
        with torch.no_grad():
            chances = model(IDS[None, :t])[0][0, -1].softmax(-1)
        assert found.losses[t] == pytest.approx(-math.log(chances[IDS[t]].item()), abs=1e-4)
    assert found.losses[2] != pytest.approx(found.losses[3], abs=0.01)


def test_an_end_of_text_is_a_token_as_any_other():
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    found = token_reads(model, LETTERS, [1, 0, 10, 3])
    assert found.tokens == ("b", "a", END_OF_TEXT, "d")
    assert len(found.losses) == len(found.sites[3].weights) == 4
    with torch.no_grad():
        chances = model(torch.tensor([[1, 0, 10]]))[0][0].log_softmax(-1)
    assert found.losses[2] == pytest.approx(-chances[1, 10].item(), abs=1e-4)
    assert found.losses[3] == pytest.approx(-chances[2, 3].item(), abs=1e-4)


def test_an_empty_text_is_the_start_of_a_document():
    model = model_of(rr.BlockAttnRes(num_blocks=2))
    found = token_reads(model, LETTERS, shown_ids(LETTERS, ""))
    assert (found.tokens, found.losses) == ((END_OF_TEXT,), (None,))
    assert found.sites[1].weights[0] != (0.5, 0.5)


def test_texts_that_cannot_be_read():
    assert shown_ids(LETTERS, TEXT) == IDS.tolist()
    with pytest.raises(UserError, match=r"outside the vocabulary: 'Q', '!'; .* line 1, column 4"):
        shown_ids(LETTERS, "badQ!")
    forgiving = CharTokenizer(tuple("abcdefghij"), unknown="skip")
    assert shown_ids(forgiving, "Q-bad!") == [1, 0, 3]
    with pytest.raises(UserError, match="has none of the prompt's characters"):
        shown_ids(forgiving, "Q!")
    assert shown_ids(forgiving, "") == [0]


def depths(residual, site, num_layers=4, kinds=("attention", "mlp")):
    return source_depths(residual.build(num_layers, 6, kinds), site)


def test_depths_of_blocks_and_their_details():
    wav = rr.WAV(num_blocks=2)
    assert depths(wav, 0) == {"embedding": 0.0}
    # one update, of site 0, ends at half a layer
    assert set(depths(wav, 1).values()) == {0.0, 0.5}
    # updates of sites 0 to 2 end at 0.5, 1 and 1.5
    assert depths(wav, 3) == {
        "embedding": 0.0, "running state": 1.0, "running phase": 1.0, "running split": 1.0,
    }  # fmt: skip
    # a block of 0.5, 1, 1.5 and 2, then the second one's first update
    whole = {"embedding": 0.0, "state 0": 1.25, "phase 0": 1.25, "split 0": 1.25}
    assert depths(wav, 4) == whole
    later = dict.fromkeys(("running state", "running phase", "running split"), 2.5)
    assert depths(wav, 5) == whole | later
    assert depths(wav, 8) == {"embedding": 0.0, "state 0": 1.25, "state 1": 3.25}


def test_depths_of_single_updates():
    expected = {"embedding": 0.0, "update 0": 0.5, "update 1": 1.0, "update 2": 1.5}
    assert depths(rr.FullAttnRes(), 3) == expected
    assert depths(rr.DeltaAttnRes(), 3) == expected
    del expected["embedding"]
    assert depths(rr.DeltaAttnRes(embedding_source=False), 3) == expected
    assert depths(rr.FullAttnRes(), 8)["update 7"] == 4.0
    # the plain sum is no source of the mix
    assert depths(rr.DeltaAttnRes(), 0) == depths(rr.DeltaAttnRes(), 8) == {}
    assert depths(rr.DeltaAttnRes(num_blocks=2), 5) == {
        "embedding": 0.0, "state 0": 1.25, "running state": 2.5,
    }  # fmt: skip
    assert depths(rr.PreNorm(), 5) == {"stream": 0.0}


def test_depths_of_layers_with_one_and_three_sublayers():
    wav = rr.WAV(num_blocks=2, bases=("split",))
    assert depths(wav, 3, kinds=("mix",)) == {
        "embedding": 0.0, "state 0": 1.5, "split 0": 1.5, "running state": 3.0,
        "running split": 3.0,
    }  # fmt: skip
    # six updates, that of site s at (s + 1) / 3, then sites 6 and 7
    found = depths(wav, 8, kinds=("a", "b", "c"))
    assert found == pytest.approx(
        {
            "embedding": 0.0, "state 0": 3.5 / 3, "split 0": 3.5 / 3, "running state": 2.5,
            "running split": 2.5,
        }
    )  # fmt: skip


def test_a_model_of_three_sublayers_a_layer():
    model = Other(rr.BlockAttnRes(num_blocks=2), ("a", "b", "c")).eval()
    found = token_reads(model, LETTERS, IDS.tolist())
    assert [site.name for site in found.sites] == [
        "0 a", "0 b", "0 c", "1 a", "1 b", "1 c", "readout",
    ]  # fmt: skip
    with torch.no_grad():
        stream = model.policy.start(model.embed(IDS))
        for site in range(2):
            update = model.parts[site](model.policy.read(stream, site))
            stream = model.policy.write(stream, site, update)
        names, weights = model.policy.weights(stream, 2)
    assert found.sites[2].sources == tuple(names) == ("embedding", "running state")
    assert found.sites[2].weights[3] == pytest.approx(weights[3].tolist(), abs=1e-6)
    # of updates that end at 1/3 and 2/3 of a layer
    assert found.sites[2].depths == (0.0, 0.5)
