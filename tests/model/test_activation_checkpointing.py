"""Computing activations again: the same gradients, less memory, with every method."""

import pytest
import torch

import resroute as rr
from resroute.bench.memory import peak_bytes

METHODS = [
    rr.PreNorm(),
    rr.ReZero(),
    rr.LayerScale(),
    rr.FullAttnRes(),
    rr.BlockAttnRes(num_blocks=2),
    rr.BlockAttnRes(num_blocks=2, gated=True),
    rr.DeltaAttnRes(),
    rr.DeltaAttnRes(num_blocks=3),
    rr.WAV(num_blocks=2),
    rr.WAV(num_blocks=2, learn_bases=True),
    rr.HAARES(num_blocks=2),
]


def make(residual, **shape):
    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "context": 96, "num_layers": 6, "num_heads": 2, "dim": 32, **shape}
    model = rr.GPT(rr.GPTConfig(residual=residual, **sizes))
    with torch.no_grad():
        # away from the initial weights, at which every read is a plain mean
        for parameter in model.policy.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def gradients(model, tokens):
    torch.manual_seed(1)
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


@pytest.mark.parametrize("residual", METHODS, ids=repr)
def test_gradients_are_equal_and_memory_is_lower(residual):
    model = make(residual, dropout=0.1)
    tokens = torch.randint(29, (4, 97))
    peaks = []
    for recomputes in (False, True):
        model.activation_checkpointing = recomputes
        found = gradients(model, tokens)
        peaks.append(peak_bytes(lambda: gradients(model, tokens), torch.device("cpu")))
        if not recomputes:
            loss, expected = found
    assert torch.equal(found[0], loss)
    for name, gradient in expected.items():
        # additions of parts of a gradient come in another order
        torch.testing.assert_close(found[1][name], gradient, rtol=2e-4, atol=1e-7, msg=name)
    assert peaks[1] < 0.5 * peaks[0], peaks


def test_autocast_reaches_what_is_computed_again():
    model = make(rr.WAV(num_blocks=2))
    tokens = torch.randint(29, (2, 97))
    found = []
    for recomputes in (False, True):
        model.activation_checkpointing = recomputes
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(model, tokens)[1])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0.05, atol=1e-4, msg=name)


def test_nothing_is_computed_again_without_gradients_or_with_a_cache():
    model = make(rr.WAV(num_blocks=2))
    model.activation_checkpointing = True
    tokens = torch.randint(29, (1, 8))
    with torch.no_grad():
        expected, _ = model(tokens)
    cached, _ = model(tokens, cache=model.new_cache())
    torch.testing.assert_close(cached, expected)
