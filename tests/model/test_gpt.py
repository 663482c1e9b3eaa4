import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from resroute.config import UserError
from resroute.model import GPT
from resroute.model.gpt import MLP
from resroute.residual import WAV, BlockAttnRes, FullAttnRes, PreNorm, ResidualConfig, ReZero
from resroute.testing import small_gpt, small_gpt_config


def awake(**options: Any) -> GPT:
    """A float64 model with every parameter off its initial value, so that all of it matters."""
    model = small_gpt(**options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def draw_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: GPT, tokens: Tensor, **options: Any) -> Tensor:
    logits = model(tokens, **options)[0]
    assert logits is not None
    return logits


@torch.no_grad()
def test_cached_logits_equal_uncached_ones(options: dict[str, Any]) -> None:
    model, tokens = awake(**options), draw_tokens(3, 8)
    expected = logits_of(model, tokens)
    assert expected.std() > 0.1
    for sizes in ([1] * 8, [3, 1, 4], [7, 1], [8]):
        cache = model.new_cache()
        chunks = [logits_of(model, chunk, cache=cache) for chunk in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(chunks, dim=1), expected, rtol=0, atol=1e-10)
        assert cache.length == 8


@torch.no_grad()
def test_future_tokens_never_change_the_past(options: dict[str, Any]) -> None:
    model, tokens = awake(**options), draw_tokens(2, 8)
    before = logits_of(model, tokens)
    for place in (1, 4, 7):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = logits_of(model, changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-13)
        assert ((after[:, place:] - before[:, place:]).abs().amax(-1) > 1e-6).all()


def test_rows_of_a_batch_never_see_each_other() -> None:
    model, tokens = awake(residual=WAV(num_blocks=2)), draw_tokens(3, 8)
    whole = logits_of(model, tokens)
    for row in range(3):
        alone = logits_of(model, tokens[row : row + 1])
        torch.testing.assert_close(alone, whole[row : row + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_order_of_tokens_matters(position: str) -> None:
    model, tokens = awake(position=position), torch.tensor([[1, 2, 3], [2, 1, 3]])
    first, second = logits_of(model, tokens)[:, -1]
    assert (first - second).abs().max() > 1e-3


def like_pre_norm(method: ResidualConfig) -> GPT:
    """A model with the sublayers of `awake(norm_eps=0.0)` and the policy at its start."""
    model = awake(residual=method, norm_eps=0.0)
    model.load_state_dict(awake(norm_eps=0.0).state_dict(), strict=False)
    model.policy.reset_parameters()
    return model


@pytest.mark.parametrize(
    "method",
    [
        FullAttnRes(eps=0.0),
        BlockAttnRes(num_blocks=2, eps=0.0),
        BlockAttnRes(block_layers=3, eps=0.0),
        WAV(num_blocks=2, bases=(), eps=0.0),
    ],
    ids=["full", "two blocks", "uneven blocks", "wav without bases"],
)
def test_plain_means_give_the_logits_of_pre_norm(method: ResidualConfig) -> None:
    tokens = draw_tokens(3, 8)
    expected = logits_of(like_pre_norm(PreNorm()), tokens)
    assert expected.std() > 0.1
    logits = logits_of(like_pre_norm(method), tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


@torch.no_grad()
def test_details_start_close_to_pre_norm_but_not_equal() -> None:
    tokens = draw_tokens(3, 8)
    expected = logits_of(like_pre_norm(PreNorm()), tokens)
    logits = logits_of(like_pre_norm(WAV(num_blocks=2, eps=0.0)), tokens)
    assert 0.01 < float((logits - expected).norm() / expected.norm()) < 0.6


@pytest.mark.parametrize(
    "residual", ["full_gated", "block_gated", "delta_gated", "wav_gated"], indirect=True
)
@torch.no_grad()
def test_closed_gates_are_pre_norm_to_the_bit(residual: ResidualConfig) -> None:
    tokens, model = draw_tokens(2, 8), awake(residual=residual)
    pre_norm = awake()
    model.load_state_dict(pre_norm.state_dict(), strict=False)
    # whatever the queries are
    dict(model.policy.named_parameters())["gate"].zero_()
    assert torch.equal(logits_of(model, tokens), logits_of(pre_norm, tokens))


def test_dropout_acts_in_training_alone(residual: ResidualConfig) -> None:
    tokens = draw_tokens(2, 8)
    expected = logits_of(small_gpt(residual=residual), tokens)
    model = small_gpt(residual=residual, dropout=0.3)
    assert torch.equal(logits_of(model.eval(), tokens), expected)
    model.train()
    first, second = logits_of(model, tokens), logits_of(model, tokens)
    assert not torch.equal(first, second)


def test_dropout_of_the_embedding_and_of_the_mlp_scale_what_they_keep() -> None:
    model = small_gpt(residual=ReZero(), dropout=0.5, vocab_size=11, dim=64, norm_eps=1.0)
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    tokens = draw_tokens(2, 8)
    # layers of ReZero start closed, so that the readout is the embedding
    model(tokens)
    ratio = seen[0] / model.embedding(tokens)
    assert sorted(set(ratio.flatten().round(decimals=4).tolist())) == [0.0, 2.0]
    assert 0.4 < (ratio == 0).float().mean() < 0.6

    mlp, x = MLP(small_gpt_config(dropout=0.75, dim=64)).double(), torch.randn(40, 1, 64).double()
    ratio = mlp.train()(x) / mlp.eval()(x)
    assert sorted(set(ratio.flatten().round(decimals=9).tolist())) == [0.0, 4.0]
    assert 0.7 < (ratio == 0).double().mean() < 0.8


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_the_mlp_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    mlp = MLP(small_gpt_config(mlp=kind, mlp_ratio=1.5)).double()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    h = x @ mlp.up.weight.T
    if kind == "swiglu":
        assert h.shape[-1] == 48
        h = h[..., :24] / (1 + (-h[..., :24]).exp()) * h[..., 24:]
    else:
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    torch.testing.assert_close(mlp(x), h @ mlp.output.weight.T, rtol=0, atol=1e-12)


def test_one_layer_of_pre_norm_is_two_residual_additions() -> None:
    model, tokens = awake(num_layers=1, position="learned", norm_eps=1e-3), draw_tokens(2, 5)
    layer: Any = model.layers[0]
    assert model.positions is not None
    assert model.head is not None
    x = model.embedding.weight[tokens] + model.positions.weight[:5]

    def normed(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    x = x + layer.attention(normed(x, layer.attention.norm.weight), None, None, 0)
    x = x + layer.mlp(normed(x, layer.mlp.norm.weight))
    expected = normed(x, model.norm.weight) @ model.head.weight.T
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    model, tokens, targets = awake(), draw_tokens(2, 8), draw_tokens(2, 8, seed=1)
    targets[0, 2:7] = -100
    targets[1, 0] = -100
    logits, loss = model(tokens, targets, return_logits=True)
    assert logits is not None
    nats = [
        float(logits[row, t].logsumexp(-1) - logits[row, t, targets[row, t]])
        for row in range(2)
        for t in range(8)
        if targets[row, t] != -100
    ]
    assert len(nats) == 10
    assert loss is not None
    assert float(loss) == pytest.approx(sum(nats) / 10, abs=1e-12)


@pytest.mark.parametrize(
    ("has_targets", "return_logits", "expected"),
    [
        (False, None, (True, False)),
        (False, True, (True, False)),
        (False, False, (False, False)),
        (True, None, (False, True)),
        (True, True, (True, True)),
        (True, False, (False, True)),
    ],
)
def test_what_is_returned(
    has_targets: bool, return_logits: bool | None, expected: tuple[bool, bool]
) -> None:
    model, tokens = small_gpt(), draw_tokens(1, 4)
    targets = tokens if has_targets else None
    logits, loss = model(tokens, targets, return_logits=return_logits)
    assert (logits is not None, loss is not None) == expected


def test_a_tied_head_gathers_both_gradients_in_the_embedding() -> None:
    tokens, targets = draw_tokens(2, 8), draw_tokens(2, 8, seed=1)
    tied = awake(tie_embeddings=True)
    assert not any(name.startswith("head") for name in tied.state_dict())
    untied = awake()
    assert untied.head is not None
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    losses = [model(tokens, targets)[1] for model in (tied, untied)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)
    for loss in losses:
        loss.backward()
    read, written = untied.embedding.weight.grad, untied.head.weight.grad
    assert read is not None
    assert written is not None
    assert min(float(read.abs().max()), float(written.abs().max())) > 1e-3
    torch.testing.assert_close(tied.embedding.weight.grad, read + written, rtol=0, atol=1e-12)


def test_every_parameter_gets_a_gradient(residual: ResidualConfig) -> None:
    model = awake(residual=residual, qk_norm=True, position="learned")
    model(draw_tokens(2, 8), draw_tokens(2, 8, seed=1))[1].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert float(parameter.grad.abs().max()) > 1e-9, key


# dynamo asks every tensor for its gradient, and torch warns where that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "residual", ["pre_norm", "wav", "full_attn_res", "wav_of_all_options"], indirect=True
)
def test_compiling_serves_any_depth_by_one_graph_a_sublayer(residual: ResidualConfig) -> None:
    tokens, targets = draw_tokens(2, 8), draw_tokens(2, 8, seed=1)
    counts = []
    for num_layers in (4, 8):
        torch._dynamo.reset()
        model = awake(num_layers=num_layers, residual=residual)
        expected = logits_of(model, tokens)
        model(tokens, targets)[1].backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        counter = CompileCounterWithBackend("eager")
        model.compile(backend=counter)
        assert torch.equal(logits_of(model, tokens), expected)
        model(tokens, targets)[1].backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts == [2, 2]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# torch's own tracing of autograd functions warns
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("residual", ["pre_norm", "wav"], indirect=True)
def test_graphs_are_as_many_at_12_and_48_layers_under_autocast(residual: ResidualConfig) -> None:
    tokens, targets = draw_tokens(2, 8), draw_tokens(2, 8, seed=1)
    counts = []
    for num_layers in (12, 48):
        torch._dynamo.reset()
        model = small_gpt(num_layers=num_layers, residual=residual)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(tokens, targets)[1]
        counter = CompileCounterWithBackend("eager")
        model.compile(backend=counter, dynamic=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, targets)[1]
        loss.backward()
        assert torch.equal(loss, expected)
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts == [2, 2]


@pytest.mark.parametrize("residual", ["pre_norm", "wav", "wav_gated"], indirect=True)
@torch.no_grad()
def test_half_precision_gives_float32_logits_close_to_the_truth(residual: ResidualConfig) -> None:
    model, tokens = awake(residual=residual, qk_norm=True), draw_tokens(3, 8)
    expected = logits_of(model, tokens).float()
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, tokens, return_logits=True)
    assert logits.dtype == loss.dtype == torch.float32
    error = float((logits - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05
    logits = logits_of(model.bfloat16(), tokens)
    assert logits.dtype == torch.float32
    assert float((logits - expected).norm() / expected.norm()) < 0.05


def test_tokens_that_do_not_fit_are_refused() -> None:
    model = small_gpt()
    with pytest.raises(UserError, match="9 tokens exceed the model's context of 8"):
        model(draw_tokens(1, 9))
    with pytest.raises(UserError, match=r"tokens must be \(batch, tokens\), got shape \(8,\)"):
        model(draw_tokens(8))
    cache = model.new_cache()
    model(draw_tokens(1, 6), cache=cache)
    with pytest.raises(UserError, match="6 cached and 3 new tokens exceed the context of 8"):
        model(draw_tokens(1, 3), cache=cache)


def test_a_cache_belongs_to_one_model_and_batch() -> None:
    model = small_gpt().eval()
    tokens = torch.arange(8).view(2, 4)
    cache = model.new_cache()
    model(tokens, cache=cache)
    with pytest.raises(UserError, match="the cache holds 2 sequences, got 1"):
        model(tokens[:1, :1], cache=cache)
    with pytest.raises(UserError, match="made for another model"):
        model(tokens, cache=small_gpt(num_layers=6).new_cache())
    # a pass that failed left no trace
    assert cache.length == 4
    with pytest.raises(IndexError):
        model(tokens + 100, cache=cache)
    assert cache.length == 4
    whole = model(torch.cat((tokens, tokens), 1))[0]
    torch.testing.assert_close(model(tokens, cache=cache)[0], whole[:, 4:])


def test_targets_have_the_shape_of_tokens() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"shape of tokens, \(2, 4\), got \(4, 2\)"):
        small_gpt()(tokens, tokens.T)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_a_compiled_model_takes_another_length() -> None:
    model = small_gpt()
    model.compile(backend="aot_eager", fullgraph=True)
    for length in (8, 5, 7):
        tokens = draw_tokens(2, length)
        expected = small_gpt()(tokens, tokens)[1]
        torch.testing.assert_close(model(tokens, tokens)[1], expected)
    torch._dynamo.reset()
