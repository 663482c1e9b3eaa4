"""A module that someone changed is called; only an untouched one is replaced by its parameters."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from resroute.residual.untouched import untouched
from resroute.testing import small_gpt


def wrap(module):
    module.forward = lambda x: 3 * nn.RMSNorm.forward(module, x)


CHANGES = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "wrapped forward": wrap,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules_are_seen(name):
    norm = nn.RMSNorm(4)
    assert untouched(norm, nn.RMSNorm)
    CHANGES[name](norm)
    assert not untouched(norm, nn.RMSNorm)


def test_hooks_on_all_modules_are_seen():
    handle = register_module_forward_hook(lambda *_: None)
    assert not untouched(nn.RMSNorm(4), nn.RMSNorm)
    handle.remove()
    assert untouched(nn.RMSNorm(4), nn.RMSNorm)
    assert not untouched(torch.tanh, nn.RMSNorm)


def test_hooks_in_a_model_run():
    model, seen = small_gpt(), []
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    model.layers[0].mlp.norm.register_full_backward_hook(lambda *_: seen.append("norm"))
    model.layers[1].attention.norm.register_forward_hook(lambda *_: seen.append("forward"))
    model.head.register_forward_hook(lambda *_: seen.append("head"))
    model(tokens, tokens)[1].backward()
    assert seen == ["forward", "head", "norm"]


def test_a_head_with_a_bias_keeps_it_in_the_loss():
    model = small_gpt()
    model.head = nn.Linear(16, 11)
    nn.init.normal_(model.head.bias)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    without_logits = model(tokens, tokens)[1]
    torch.testing.assert_close(without_logits, model(tokens, tokens, return_logits=True)[1])
