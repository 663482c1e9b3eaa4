"""Coefficients that cannot be multiplied into the weights, since these are not one sublayer's."""

import copy

import pytest
import torch
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

import resroute as rr
from resroute import UserError
from resroute.hf.convert import convert, unconvert

OPTIONS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**OPTIONS, **{"intermediate_size": 48, **options})).eval()


def olmo2():
    torch.manual_seed(0)
    return Olmo2ForCausalLM(Olmo2Config(**OPTIONS, intermediate_size=48)).eval()


def with_shared_mlp():
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def with_shared_weight():
    model = llama()
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight
    return model


def with_shared_memory():
    model = llama()
    first = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(first.data)
    return model


def with_shared_bias():
    model = llama(mlp_bias=True)
    model.model.layers[1].mlp.down_proj.bias = model.model.layers[0].mlp.down_proj.bias
    return model


def with_a_weight_that_is_read_elsewhere():
    model = llama(intermediate_size=32)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.down_proj.weight
    return model


def with_shared_norm():
    model = olmo2()
    layers = model.model.layers
    layers[1].post_feedforward_layernorm = layers[0].post_feedforward_layernorm
    return model


def with_weight_norm():
    model = llama()
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(model.model.layers[2].mlp.down_proj)
    return model


def with_pruning():
    model = llama()
    prune.l1_unstructured(model.model.layers[3].self_attn.o_proj, "weight", 0.3)
    return model


def with_pruned_norm():
    model = olmo2()
    prune.l1_unstructured(model.model.layers[3].post_attention_layernorm, "weight", 0.3)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_shared_mlp, "weight of a Linear is shared in the model"),
        (with_shared_weight, "weight of a Linear is shared"),
        (with_shared_memory, "weight of a Linear is shared"),
        (with_shared_bias, "bias of a Linear is shared"),
        (with_a_weight_that_is_read_elsewhere, "weight of a Linear is shared"),
        (with_shared_norm, "weight of a Olmo2RMSNorm is shared"),
        (with_weight_norm, "weight of a Linear is no parameter, as with pruning or weight norm"),
        (with_pruning, "weight of a Linear is no parameter"),
        (with_pruned_norm, "weight of a Olmo2RMSNorm is no parameter"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@torch.no_grad()
def test_weights_that_are_not_one_sublayers_are_refused(make, says, ids):
    model = convert(make(), rr.LayerScale(init=1.0))
    torch.manual_seed(1)
    scale = model.model.residual_policy.scale
    scale.add_(0.3 * torch.randn_like(scale))
    expected = model(ids).logits
    with pytest.raises(UserError, match=says):
        unconvert(model)
    assert torch.equal(model(ids).logits, expected)
    # nothing is multiplied where gates are closed
    plain = make()
    expected = plain(ids).logits
    assert torch.equal(unconvert(convert(plain, rr.PreNorm()))(ids).logits, expected)


@torch.no_grad()
def test_what_the_messages_say_helps(ids):
    pruned, shared = with_pruning(), with_shared_weight()
    prune.remove(pruned.model.layers[3].self_attn.o_proj, "weight")
    down = shared.model.layers[1].mlp.down_proj
    down.weight = copy.deepcopy(down.weight)
    for model in (pruned, shared):
        convert(model, rr.LayerScale(init=1.0))
        torch.manual_seed(1)
        scale = model.model.residual_policy.scale
        scale.add_(0.3 * torch.randn_like(scale))
        expected = model(ids).logits
        torch.testing.assert_close(unconvert(model)(ids).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_in_float64(ids):
    model = convert(llama(mlp_bias=True), rr.LayerScale(init=1.0)).double()
    scale = model.model.residual_policy.scale
    scale.add_(0.3 * torch.randn_like(scale))
    expected = model(ids).logits
    assert expected.dtype == torch.float64
    torch.testing.assert_close(unconvert(model)(ids).logits, expected, rtol=1e-11, atol=1e-11)
