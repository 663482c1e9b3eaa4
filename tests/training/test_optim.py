import pytest
import torch

import resroute as rr
from resroute.training.optim import learning_rate, make_optimizer, parameter_groups


def groups_of(config, **options):
    model = rr.GPT(rr.GPTConfig(vocab_size=7, num_layers=2, num_heads=2, dim=8, context=8,
                                residual=config, **options))  # fmt: skip
    return model, {group["name"]: group for group in parameter_groups(model, 0.1)}


def test_only_matrices_decay():
    model, groups = groups_of(rr.WAV(num_blocks=1, gated=True), qk_norm=True, position="learned")
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrices": 0.1, "policy": 0.0, "norms": 0.0, "embeddings": 0.0,
    }  # fmt: skip
    assert groups["policy"]["names"] == [
        "policy.query", "policy.key_gain", "policy.gate", "policy.detail_bias",
    ]  # fmt: skip
    assert groups["embeddings"]["names"] == ["embedding.weight", "positions.weight"]
    assert "layers.1.attention.query_norm.weight" in groups["norms"]["names"]
    assert "norm.weight" in groups["norms"]["names"]
    assert set(groups["matrices"]["names"]) == {
        "head.weight",
        *(f"layers.{i}.attention.{m}.weight" for i in range(2)
          for m in ("query", "key", "value", "output")),
        *(f"layers.{i}.mlp.{m}.weight" for i in range(2) for m in ("up", "output")),
    }  # fmt: skip
    listed = [p for group in groups.values() for p in group["params"]]
    assert len(listed) == len(set(map(id, listed))) == len(list(model.parameters()))


def test_a_tied_embedding_does_not_decay():
    _, groups = groups_of(rr.PreNorm(), tie_embeddings=True)
    assert groups["embeddings"]["names"] == ["embedding.weight"]
    assert "policy" not in groups


def test_a_parameter_without_a_group_is_noticed():
    model, _ = groups_of(rr.PreNorm())
    model.extra = torch.nn.Conv1d(1, 1, 1)
    with pytest.raises(AssertionError, match=r"no parameter group takes extra\.weight"):
        parameter_groups(model, 0.1)


def test_adamw_takes_its_settings(make_config):
    config = make_config(beta1=0.8, beta2=0.9, weight_decay=0.3)
    optimizer = make_optimizer(rr.GPT(config.model), config)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert optimizer.param_groups[0]["fused"] is True


def rates(make_config, **options):
    config = make_config(learning_rate=1.0, final_learning_rate=0.1, **options)
    return [learning_rate(config, step) for step in range(config.steps)]


def test_schedule_by_value(make_config):
    assert rates(make_config, steps=6, warmup_steps=2) == pytest.approx(
        [0.5, 1.0, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1]
    )


def test_schedule_at_its_edges(make_config):
    assert rates(make_config, steps=4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(make_config, steps=2, warmup_steps=8) == [0.125, 0.25]
    assert rates(make_config, steps=2, warmup_steps=0) == pytest.approx([0.55, 0.1])
    assert rates(make_config, steps=1, warmup_steps=0) == pytest.approx([0.1])
    assert rates(make_config, steps=0, warmup_steps=0) == []
