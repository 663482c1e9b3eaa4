"""Numbers of a running model, by hand and against brute force."""

import gc
import math

import pytest
import torch
from torch import nn

import resroute as rr
from resroute.config import UserError
from resroute.residual.base import site_name
from resroute.testing import random_stack, randomise, small_gpt

from .conftest import E, U, approx, each_method, run

HALF = 1 / math.sqrt(2)


def seen_of(config, *, layers=1, updates=U):
    policy = config.build(layers, 2).double()
    with rr.capture(policy) as seen:
        run(policy, updates=updates)
    return seen.result()


def test_block_at_its_start_by_hand():
    found = seen_of(rr.BlockAttnRes(num_blocks=1))
    assert (found["passes"], found["tokens"], found["blocks"]) == (1, 2, [[0, 2]])
    assert (found["num_layers"], found["layer_kinds"]) == (1, ["attention", "mlp"])
    first, second, readout = found["sites"]
    assert (first["name"], first["layer"], first["kind"]) == ("0 attention", 0, "attention")
    assert (second["name"], second["layer"], second["kind"]) == ("0 mlp", 0, "mlp")
    assert (readout["name"], readout["layer"], readout["kind"]) == ("readout", None, None)
    assert first["weights"] == {"embedding": 1.0}
    assert (first["entropy"], first["effective_sources"]) == (0.0, 1.0)
    # sizes over tokens and width together
    assert first["read_rms"] == pytest.approx(math.sqrt(5 / 4), rel=1e-12)
    assert first["update_rms"] == pytest.approx(2.5, rel=1e-12)
    # the first token's update is at a right angle to its embedding, the second's along it
    assert first["cosine"] == approx({"embedding": 0.5})
    assert second["weights"] == approx({"embedding": 0.5, "running state": 0.5})
    assert second["kinds"] == second["weights"]
    assert second["entropy"] == pytest.approx(math.log(2), rel=1e-12)
    assert second["effective_sources"] == pytest.approx(2.0, rel=1e-12)
    # (E + U[0]) / 2 has the rows (1/2, 2) and (0, 5/2)
    assert second["read_rms"] == pytest.approx(math.sqrt((0.25 + 4 + 6.25) / 4), rel=1e-12)
    assert second["cosine"] == approx(
        {"embedding": (1 + HALF) / 2, "running state": (0 + HALF) / 2}
    )
    assert readout["weights"] == approx({"embedding": 0.5, "state 0": 0.5})
    assert readout["kinds"] == approx({"embedding": 0.5, "state": 0.5})
    assert (readout["update_rms"], readout["cosine"], readout["coefficient"]) == (None, {}, None)
    sizes = {
        "embedding": (HALF + 2 * HALF) / 2,
        "state 0": (math.sqrt(25 / 2) + math.sqrt(17 / 2)) / 2,
    }
    assert found["source_rms"] == approx(sizes)
    assert found["details"] == []


def test_methods_with_one_sum_have_sizes_and_angles_alone():
    found = seen_of(rr.PreNorm())
    first, second, readout = found["sites"]
    for site in (first, second, readout):
        assert (site["weights"], site["kinds"], site["entropy"]) == ({}, {}, None)
        assert (site["gate"], site["coefficient"], site["classes"]) == (None, None, {})
    # E + U[0] has the rows (1, 4) and (0, 5)
    assert second["cosine"] == approx({"stream": (3 / (3 * math.sqrt(17)) + HALF) / 2})
    assert second["read_rms"] == pytest.approx(math.sqrt(42 / 4), rel=1e-12)
    assert (found["source_rms"], found["blocks"]) == ({}, [])


def test_coefficients_and_gates():
    policy = rr.ReZero().build(2, 2).double()
    with torch.no_grad():
        policy.alpha.copy_(torch.tensor([-0.5, 0.25]))
    with rr.capture(policy) as seen:
        run(policy, updates=[*U, *U])
    sites = seen.result()["sites"]
    assert [site["coefficient"] for site in sites] == [0.5, 0.5, 0.25, 0.25, None]
    # before the coefficient
    assert sites[2]["update_rms"] == pytest.approx(2.5, rel=1e-12)

    policy = rr.LayerScale().build(1, 2).double()
    with torch.no_grad():
        policy.scale.copy_(torch.tensor([[1.0, -2.0], [0.0, 0.5]]))
    with rr.capture(policy) as seen:
        run(policy)
    sites = seen.result()["sites"]
    assert [site["coefficient"] for site in sites] == [1.5, 0.25, None]

    policy = rr.DeltaAttnRes(gated=True).build(1, 2).double()
    with torch.no_grad():
        policy.gate.copy_(torch.tensor([0.5, 0.25]))
    with rr.capture(policy) as seen:
        run(policy)
    # the first site and the readout mix nothing
    assert [site["gate"] for site in seen.result()["sites"]] == [None, 0.25, None]
    assert seen.result()["sites"][0]["cosine"] == approx({"stream": 0.5})


def brute_force(policy, stack):
    """Of one pass: weights, reads and updates by site, and the values that each could read."""
    found, stream = [], policy.start(stack.embedding)
    for site, weight in enumerate(stack.weights):
        read = policy.read(stream, site)
        normalised = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + 1e-6)
        update = torch.tanh(normalised @ weight)
        found.append((policy.weights(stream, site), read, update, policy.sources(stream, site)))
        stream = policy.write(stream, site, update)
    found.append((policy.weights(stream, policy.num_sites), policy.finish(stream), None, None))
    return found


@each_method
@torch.no_grad()
def test_means_over_passes_of_unequal_length_are_those_of_all_tokens(config):
    policy = config.build(4, 5).double()
    randomise(policy)
    stacks = [random_stack(8, 5, tokens=n, seed=n) for n in (1, 4, 2)]
    for stack in stacks:
        stack.weights.copy_(stacks[0].weights)
    with rr.capture(policy) as seen:
        for stack in stacks:
            stack.run(policy)
    passes = [brute_force(policy, stack) for stack in stacks]
    assert (seen.passes, seen.tokens) == (3, 7)
    for site, entry in enumerate(seen.result()["sites"]):
        parts = [one[site] for one in passes]
        reads = torch.cat([part[1] for part in parts])
        assert entry["read_rms"] == pytest.approx(reads.square().mean().sqrt().item(), rel=1e-12)
        names = parts[0][0][0]
        if names in ([], ["stream"]):
            assert entry["weights"] == {}
        else:
            weights = torch.cat([part[0][1] for part in parts])
            assert entry["weights"] == approx(
                dict(zip(names, weights.mean(0).tolist(), strict=True))
            )
            entropy = -(weights * weights.log()).sum(-1)
            assert entry["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-12)
            effective = entropy.exp().mean().item()
            assert entry["effective_sources"] == pytest.approx(effective, rel=1e-12)
        if parts[0][2] is None:
            continue
        updates = torch.cat([part[2] for part in parts])
        assert entry["update_rms"] == pytest.approx(
            updates.square().mean().sqrt().item(), rel=1e-12
        )
        assert list(entry["cosine"]) == list(parts[0][3])
        for name in entry["cosine"]:
            values = torch.cat([part[3][name] for part in parts])
            cosine = torch.cosine_similarity(updates, values, dim=-1, eps=0).mean().item()
            assert entry["cosine"][name] == pytest.approx(cosine, abs=1e-12)
    sizes = dict.fromkeys(seen.result()["source_rms"], 0.0)
    for stack in stacks:
        stream = policy.start(stack.embedding)
        for site, part in enumerate(brute_force(policy, stack)[:-1]):
            stream = policy.write(stream, site, part[2])
        for name, size in policy.source_rms(stream).items():
            sizes[name] += size * len(stack.embedding) / 7
    assert seen.result()["source_rms"] == approx(sizes)


def test_sources_of_a_stream_are_what_its_reads_mix():
    policy = rr.WAV(num_blocks=1, matching="off").build(2, 2).double()
    randomise(policy)
    stream = policy.start(E)
    for site, update in enumerate([*U, U[0]]):
        stream = policy.write(stream, site, update)
    sources = policy.sources(stream, 3)
    total = U[0] + U[1] + U[0]
    phase, split = U[0] - U[1] + U[0], U[0] + U[1] - U[0]
    expected = [E, total, phase, split]
    assert list(sources) == ["embedding", "running state", "running phase", "running split"]
    for value, reference in zip(sources.values(), expected, strict=True):
        torch.testing.assert_close(value, reference)
    names, weights = policy.weights(stream, 3)
    mixed = sum(weights[:, i, None] * sources[name] for i, name in enumerate(names))
    torch.testing.assert_close(policy.read(stream, 3), mixed)
    with pytest.raises(UserError, match="the stream is at site 3, not at 2"):
        policy.sources(stream, 2)
    gated = rr.BlockAttnRes(num_blocks=1, gated=True).build(1, 2).double()
    assert list(gated.sources(gated.start(E), 0)) == ["embedding", "stream"]


def test_classes_have_weights_of_their_own():
    policy = rr.BlockAttnRes(num_blocks=2).build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5, tokens=6)
    with rr.capture(policy, class_names=("vowel",)) as seen:
        # the last token is in none
        seen.classes = torch.tensor([0, 2, 0, 0, 2, -1])
        stack.run(policy)
        # a class that was not there before, and one that is empty now
        seen.classes = torch.tensor([3, 0, 0, 0, 0, 0])
        stack.run(policy)
    by_site = [part[0] for part in brute_force(policy, stack)]
    for (names, weights), site in zip(by_site, seen.result()["sites"], strict=True):
        classes = site["classes"]

        def named(row, names=names):
            return dict(zip(names, row, strict=True))

        assert list(classes) == ["vowel", "1", "2", "3"]
        vowels = torch.cat((weights[[0, 2, 3]], weights[1:])).mean(0).tolist()
        assert classes["vowel"] == {"tokens": 8, "weights": approx(named(vowels))}
        assert classes["1"] == {"tokens": 0, "weights": {}}
        twos = weights[[1, 4]].mean(0).tolist()
        assert classes["2"] == {"tokens": 2, "weights": approx(named(twos))}
        first = weights[0].tolist()
        assert classes["3"] == {"tokens": 1, "weights": approx(named(first))}
    table = seen.table("2")
    assert table["sources"] == seen.table()["sources"]
    assert table["weights"][-1][0] == pytest.approx(by_site[-1][1][[1, 4], 0].mean().item())
    with pytest.raises(UserError, match="no class '4'; there are vowel, 1, 2, 3"):
        seen.table("4")


@pytest.mark.parametrize(
    "config",
    [
        rr.DeltaAttnRes(), rr.DeltaAttnRes(num_blocks=2, gated=True), rr.FullAttnRes(),
        rr.BlockAttnRes(num_blocks=2, gated=True),
    ],
    ids=str,
)  # fmt: skip
def test_a_table_of_a_class_where_not_every_site_mixes(config):
    policy = config.build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5, tokens=4)
    with rr.capture(policy, class_names=("even", "odd")) as seen:
        seen.classes = torch.tensor([0, 1, 0, 1])
        stack.run(policy)
    table, whole = seen.table("odd"), seen.table()
    assert (table["sites"], table["sources"]) == (whole["sites"], whole["sources"])
    for (names, weights), row in zip(
        (part[0] for part in brute_force(policy, stack)), table["weights"], strict=True
    ):
        known = {n: w for n, w in zip(table["sources"], row, strict=True) if w is not None}
        means = [] if weights is None else weights[[1, 3]].mean(0).tolist()
        assert known == approx({} if not known else dict(zip(names, means, strict=True)))
        assert bool(known) == (names not in ([], ["stream"]))
    assert (table["weights"][-1][0] is None) == isinstance(config, rr.DeltaAttnRes)
    with pytest.raises(UserError, match="no class 'none'; there are even, odd"):
        seen.table("none")


def test_classes_may_come_from_the_token_ids():
    model = small_gpt(residual=rr.WAV(num_blocks=2), position="learned").eval()
    randomise(model.policy)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        with rr.capture(model, classes=lambda ids: ids % 2, class_names=("even", "odd")) as seen:
            model(tokens)
        with rr.capture(model) as same:
            same.classes = tokens % 2
            model(tokens)
    theirs = [site["classes"] for site in same.result()["sites"]]
    ours = [site["classes"] for site in seen.result()["sites"]]
    assert [list(one.values()) for one in ours] == [list(one.values()) for one in theirs]
    assert ours[3]["odd"]["tokens"] == 4
    assert not model.embedding._forward_pre_hooks


def test_cached_decoding_adds_its_passes():
    model = small_gpt(residual=rr.WAV(num_blocks=2)).eval()
    randomise(model.policy)
    prompt = torch.tensor([[1, 2, 3]])
    with rr.capture(model, classes=lambda ids: ids % 2, keep_tokens=True) as seen:
        whole = rr.generate(model, prompt, 4, temperature=0)
    # three tokens at once, then one by one; the last is not read any more
    assert (seen.passes, seen.tokens) == (4, 6)
    assert seen.latest[3].shape == (1, len(model.policy.source_names(3)))
    with (
        torch.no_grad(),
        rr.capture(model, classes=lambda ids: ids % 2, keep_tokens=True) as uncached,
    ):
        model(whole[:, :6])
    assert uncached.latest[3].shape[0] == 6
    torch.testing.assert_close(seen.latest[8], uncached.latest[8][-1:])
    for ours, theirs in zip(seen.result()["sites"], uncached.result()["sites"], strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-5)
        for name, of_class in theirs["classes"].items():
            assert ours["classes"][name]["tokens"] == of_class["tokens"]
            assert ours["classes"][name]["weights"] == pytest.approx(of_class["weights"], abs=1e-5)


def test_tokens_are_kept_where_asked():
    policy = rr.WAV(num_blocks=2).build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    with rr.capture(policy) as without:
        stack.run(policy)
    assert without.latest == {}
    with rr.capture(policy, keep_tokens=True) as seen:
        random_stack(8, 5, tokens=3).run(policy)
        stack.run(policy)
    for site, (_, weights) in enumerate(part[0] for part in brute_force(policy, stack)):
        torch.testing.assert_close(seen.latest[site], weights.detach().float())
    # a pass that ends early leaves nothing of the one before
    with rr.capture(policy, keep_tokens=True) as seen:
        stack.run(policy)
        policy.read(policy.start(stack.embedding), 0)
    assert list(seen.latest) == [0]


def bytes_of_tensors():
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if isinstance(t, torch.Tensor))


@torch.no_grad()
def test_memory_does_not_grow_with_tokens_or_passes():
    policy = rr.WAV(num_blocks=2).build(4, 8)
    stacks = [random_stack(8, 8, tokens=n, dtype=torch.float32) for n in (2, 500)]
    with rr.capture(policy, class_names=("a", "b")) as seen:
        sizes = []
        for stack in [stacks[0], *[stacks[1]] * 5]:
            seen.classes = torch.zeros(len(stack.embedding), dtype=torch.long)
            stack.run(policy)
            seen.classes = None
            # a pass's columns of classes go with the next pass
            stacks[0].run(policy)
            sizes.append(bytes_of_tensors())
    assert seen.tokens == 2 + 2500 + 12
    assert len(set(sizes)) == 1


def test_table_of_depth_weights_has_gaps():
    policy = rr.WAV(num_blocks=2, bases=("split",)).build(2, 3).double()
    with rr.capture(policy) as seen:
        random_stack(4, 3).run(policy)
    table = seen.table()
    assert table["sites"] == ["0 attention", "0 mlp", "1 attention", "1 mlp", "readout"]
    assert table["sources"] == [
        "embedding", "state 0", "split 0", "state 1", "running state", "running split",
    ]  # fmt: skip
    rows = table["weights"]
    assert rows[0] == [1.0] + [None] * 5
    low = torch.e**-2
    assert rows[1] == pytest.approx(
        [1 / (2 + low), None, None, None, 1 / (2 + low), low / (2 + low)]
    )
    assert rows[4] == pytest.approx([1 / 3, 1 / 3, None, 1 / 3, None, None])
    with rr.capture(rr.PreNorm().build(2, 3)) as unrouted:
        random_stack(4, 3, dtype=torch.float32).run(unrouted.policy)
    assert unrouted.table() is None


def test_a_number_that_is_none_is_null():
    updates = [torch.full_like(E, torch.inf), torch.zeros_like(E)]
    found = seen_of(rr.PreNorm(), updates=updates)
    assert found["sites"][0]["update_rms"] is None
    # without an update there is no angle
    assert found["sites"][1]["update_rms"] == 0.0
    zeros = seen_of(rr.PreNorm(), updates=[torch.zeros_like(E)] * 2)
    assert zeros["sites"][0]["cosine"] == {"stream": 0.0}
    assert rr.PreNorm().build(1, 2).source_names() == ("stream",)


class Two(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.parts = nn.ModuleList(rr.PreNorm().build(1, 2) for _ in range(count))


@pytest.mark.parametrize("count", [0, 2])
def test_a_model_needs_one_policy(count):
    holds = pytest.raises(UserError, match=f"Two holds {count} residual policies")
    with holds, rr.capture(Two(count)):
        pass
    with pytest.raises(UserError, match="needs a policy or a model"), rr.capture("model"):
        pass


def test_a_model_that_someone_built_is_found():
    model = Two(1)
    with rr.capture(model) as seen:
        run(model.parts[0])
    assert seen.tokens == 2
    assert site_name(seen.policy, 1) == "0 mlp"


def test_classes_that_do_not_fit_are_named():
    policy = rr.PreNorm().build(1, 2).double()
    refused = pytest.raises(UserError, match="a policy sees no token ids")
    with refused, rr.capture(policy, classes=lambda ids: ids):
        pass
    with rr.capture(policy) as seen:
        seen.classes = torch.zeros(3, dtype=torch.long)
        with pytest.raises(UserError, match=r"of shape \(2,\), one a token, got torch.int64"):
            run(policy)
        seen.classes = torch.zeros(2)
        with pytest.raises(UserError, match=r"got torch\.float32"):
            run(policy)
    refused = pytest.raises(UserError, match=r"no token ids came by an nn\.Embedding")
    with refused, rr.capture(Two(1), classes=lambda ids: ids) as seen:
        run(seen.policy)
