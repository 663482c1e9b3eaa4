import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from resroute.config import UserError, from_dict, to_dict, variants
from resroute.model import GPT, GPTConfig
from resroute.model.gpt import MLP
from resroute.residual import (
    HAARES,
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    PreNorm,
    ResidualConfig,
    ReZero,
)


def plain(config: type[ResidualConfig]) -> ResidualConfig:
    """A method by its defaults, in two blocks where it has blocks."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**({"num_blocks": 2} if "num_blocks" in names else {}))


METHODS: dict[str, ResidualConfig] = {
    # every registered method, those to come as well
    **{name: plain(config) for name, config in variants(ResidualConfig).items()},
    "haares": HAARES(num_blocks=2),
    "delta_of_updates": DeltaAttnRes(),
    "delta_without_embedding": DeltaAttnRes(num_blocks=2, embedding_source=False),
    "full_gated": FullAttnRes(gated=True),
    "block_gated": BlockAttnRes(num_blocks=2, gated=True),
    "delta_gated": DeltaAttnRes(gated=True),
    "wav_gated": WAV(num_blocks=2, gated=True),
    "wav_of_all_options": WAV(
        block_layers=3,
        learn_bases=True,
        learn_detail_bias=False,
        details_in_readout=True,
        matching="attached",
        rho_max=None,
        key_gain=False,
        bias_running=False,
    ),
}
SHAPES: dict[str, dict[str, Any]] = {
    "learned": {"position": "learned"},
    "grouped": {"num_kv_heads": 2},
    "one_key_head": {"num_kv_heads": 1, "qk_norm": True},
    "tied": {"tie_embeddings": True},
    "gelu": {"mlp": "gelu", "mlp_ratio": 2.5},
}
CASES = [
    *(pytest.param({"residual": residual}, id=name) for name, residual in METHODS.items()),
    *(
        pytest.param({"residual": METHODS[method], **shape}, id=f"{name}-{method}")
        for name, shape in SHAPES.items()
        for method in ("pre_norm", "wav")
    ),
]


def config(**options: Any) -> GPTConfig:
    shape = {"vocab_size": 11, "context": 8, "num_layers": 4, "num_heads": 4, "dim": 16}
    return GPTConfig(**{**shape, **options})


def build(*, seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(config(**options))


def awake(**options: Any) -> GPT:
    """A float64 model with every parameter off its initial value, so that all of it matters."""
    model = build(**options).double()
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


@pytest.mark.parametrize("options", CASES)
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


@pytest.mark.parametrize("options", CASES)
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
    model, tokens = awake(residual=METHODS["wav"]), draw_tokens(3, 8)
    whole = logits_of(model, tokens)
    for row in range(3):
        alone = logits_of(model, tokens[row : row + 1])
        torch.testing.assert_close(alone, whole[row : row + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_order_of_tokens_matters(position: str) -> None:
    model, tokens = awake(position=position), torch.tensor([[1, 2, 3], [2, 1, 3]])
    first, second = logits_of(model, tokens)[:, -1]
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(
    "residual",
    [
        FullAttnRes(eps=0.0),
        BlockAttnRes(num_blocks=2, eps=0.0),
        BlockAttnRes(block_layers=3, eps=0.0),
        WAV(num_blocks=2, bases=(), eps=0.0),
    ],
    ids=str,
)
def test_plain_means_give_the_logits_of_pre_norm(residual: ResidualConfig) -> None:
    tokens = draw_tokens(3, 8)

    def start(method: ResidualConfig) -> GPT:
        model = awake(residual=method, norm_eps=0.0)
        pre_norm = awake(norm_eps=0.0)
        model.load_state_dict(pre_norm.state_dict(), strict=False)
        model.policy.reset_parameters()
        return model

    expected = logits_of(start(PreNorm()), tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(start(residual), tokens), expected, rtol=0, atol=1e-11)
    # far from it for details, whose shares are small but not nothing
    details = logits_of(start(WAV(num_blocks=2, eps=0.0)), tokens)
    assert (details - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in METHODS if name.endswith("_gated")])
def test_closed_gates_are_pre_norm_to_the_bit(name: str) -> None:
    tokens = draw_tokens(2, 8)
    expected = logits_of(build(), tokens)
    assert torch.equal(logits_of(build(residual=METHODS[name]), tokens), expected)


@pytest.mark.parametrize("where", ["first site of the fifth block", "readout"])
def test_details_of_four_blocks_start_with_their_documented_share(where: str) -> None:
    residual = WAV(block_layers=2, details_in_readout=True)
    num_layers, site = (10, 16) if where.startswith("first") else (8, 16)
    policy = residual.build(num_layers, 6).double()
    torch.manual_seed(0)
    stream = policy.start(torch.randn(5, 6, dtype=torch.float64))
    for index in range(site):
        stream = policy.write(stream, index, torch.randn(5, 6, dtype=torch.float64))
    names, weights = policy.weights(stream, site)
    is_detail = torch.tensor([name.startswith(("phase", "split")) for name in names])
    assert int(is_detail.sum()) == 8
    assert len(names) == 13
    share = 8 * math.exp(-2) / (5 + 8 * math.exp(-2))
    assert share == pytest.approx(0.178, abs=5e-4)
    expected = torch.full((5,), share, dtype=torch.float64)
    torch.testing.assert_close(weights[..., is_detail].sum(-1), expected)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_initial_weights_follow_their_laws(tied: bool) -> None:
    model = build(
        dim=64,
        vocab_size=200,
        context=50,
        position="learned",
        qk_norm=True,
        tie_embeddings=tied,
        residual=METHODS["wav"],
    )
    output = 0.02 / math.sqrt(8)
    laws = {
        "embedding.weight": 0.02 if tied else 1.0,
        "positions.weight": 0.02,
        "head.weight": 0.001,
    }
    for name, parameter in model.named_parameters():
        if name.startswith("policy."):
            continue
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = laws.get(name, output if name.endswith("output.weight") else 0.02)
        count = parameter.numel()
        # four standard errors
        assert float(parameter.std()) == pytest.approx(std, rel=4 / math.sqrt(2 * count)), name
        assert abs(float(parameter.mean())) < 4 * std / math.sqrt(count), name
    assert torch.equal(model.policy.query, torch.zeros(9, 64))
    assert torch.equal(model.policy.detail_bias, torch.full((8, 2), -2.0))


@pytest.mark.parametrize("name", METHODS)
def test_models_that_differ_in_the_method_alone_start_from_equal_weights(name: str) -> None:
    state = build(residual=METHODS[name], seed=5).state_dict()
    expected = build(seed=5).state_dict()
    assert {key for key in state if not key.startswith("policy.")} == set(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    other = build(seed=6).state_dict()
    assert not torch.equal(other["embedding.weight"], expected["embedding.weight"])


@pytest.mark.parametrize("name", METHODS)
def test_a_model_from_the_meta_device_equals_one_built_directly(name: str) -> None:
    options = {"residual": METHODS[name], "position": "learned", "qk_norm": True}
    with torch.device("meta"):
        model = GPT(config(**options))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    torch.manual_seed(3)
    model.init_weights()
    expected = build(seed=3, **options).state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_a_forward_pass_on_the_meta_device_gives_shapes() -> None:
    with torch.device("meta"):
        model, tokens = GPT(config(num_kv_heads=2)), torch.zeros(2, 8, dtype=torch.int64)
    logits, loss = model(tokens, tokens, return_logits=True)
    assert logits.is_meta
    assert logits.shape == (2, 8, 11)
    assert loss.shape == ()


@pytest.mark.parametrize("name", METHODS)
def test_dropout_acts_in_training_alone(name: str) -> None:
    tokens, residual = draw_tokens(2, 8), METHODS[name]
    expected = logits_of(build(residual=residual), tokens)
    model = build(residual=residual, dropout=0.3)
    assert torch.equal(logits_of(model.eval(), tokens), expected)
    model.train()
    first, second = logits_of(model, tokens), logits_of(model, tokens)
    assert not torch.equal(first, second)


def test_dropout_of_the_embedding_and_of_the_mlp_scale_what_they_keep() -> None:
    model = build(residual=ReZero(), dropout=0.5, vocab_size=11, dim=64, norm_eps=1.0)
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    tokens = draw_tokens(2, 8)
    # layers of ReZero start closed, so that the readout is the embedding
    model(tokens)
    ratio = seen[0] / model.embedding(tokens)
    assert sorted(set(ratio.flatten().round(decimals=4).tolist())) == [0.0, 2.0]
    assert 0.4 < (ratio == 0).float().mean() < 0.6

    mlp, x = MLP(config(dropout=0.75, dim=64)).double(), torch.randn(40, 1, 64).double()
    ratio = mlp.train()(x) / mlp.eval()(x)
    assert sorted(set(ratio.flatten().round(decimals=9).tolist())) == [0.0, 4.0]
    assert 0.7 < (ratio == 0).double().mean() < 0.8


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_the_mlp_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    mlp = MLP(config(mlp=kind, mlp_ratio=1.5, norm_eps=1e-3)).double()
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    h = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() @ mlp.up.weight.T
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
    x = x + layer.attention(x, None, None, 0)
    x = x + layer.mlp(x)
    x = model.norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = x @ model.head.weight.T
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


def test_predictions_start_near_uniform() -> None:
    loss = build()(draw_tokens(4, 8), draw_tokens(4, 8, seed=1))[1]
    assert float(loss) == pytest.approx(math.log(11), abs=0.005)


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
    model, tokens = build(), draw_tokens(1, 4)
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
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-12)
    for loss in losses:
        loss.backward()
    read, written = untied.embedding.weight.grad, untied.head.weight.grad
    assert read is not None
    assert written is not None
    assert min(float(read.abs().max()), float(written.abs().max())) > 1e-3
    torch.testing.assert_close(tied.embedding.weight.grad, read + written, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = awake(residual=METHODS[name], qk_norm=True, position="learned")
    model(draw_tokens(2, 8), draw_tokens(2, 8, seed=1))[1].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert float(parameter.grad.abs().max()) > 1e-9, key


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # per layer 16 d^2 and two norms; the final norm, embedding and head
        ({}, 4 * (16 * 256 + 32) + 16 + 2 * 11 * 16),
        ({"tie_embeddings": True}, 4 * (16 * 256 + 32) + 16 + 11 * 16),
        ({"position": "learned"}, 4 * (16 * 256 + 32) + 16 + 2 * 11 * 16 + 8 * 16),
        ({"mlp": "gelu"}, 4 * (12 * 256 + 32) + 16 + 2 * 11 * 16),
        ({"num_kv_heads": 1}, 4 * (16 * 256 - 2 * 16 * 12 + 32) + 16 + 2 * 11 * 16),
        ({"qk_norm": True}, 4 * (16 * 256 + 32 + 2 * 4) + 16 + 2 * 11 * 16),
    ],
)
def test_parameters_by_formula(options: dict[str, Any], expected: int) -> None:
    def count(**more: Any) -> int:
        return sum(p.numel() for p in build(**options, **more).parameters())

    assert count() == expected
    # queries and key gains, and two biases a site
    assert count(residual=WAV(num_blocks=2)) == expected + 2 * 9 * 16 + 2 * 8
    assert count(residual=FullAttnRes(key_gain=False, gated=True)) == expected + 9 * 16 + 9


# dynamo asks every tensor for its gradient, and torch warns where that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["pre_norm", "wav", "full_attn_res", "wav_of_all_options"])
def test_compiling_serves_any_depth_by_one_graph_a_sublayer(name: str) -> None:
    tokens, targets = draw_tokens(2, 8), draw_tokens(2, 8, seed=1)
    counts = []
    for num_layers in (4, 8):
        torch._dynamo.reset()
        model = awake(num_layers=num_layers, residual=METHODS[name])
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


@pytest.mark.parametrize("name", ["pre_norm", "wav", "wav_gated"])
def test_bfloat16_models_and_autocast_give_float32_logits_close_to_the_truth(name: str) -> None:
    model, tokens = awake(residual=METHODS[name], qk_norm=True), draw_tokens(3, 8)
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


@pytest.mark.parametrize("name", METHODS)
def test_configurations_survive_json(name: str) -> None:
    original = config(residual=METHODS[name], num_kv_heads=2, position="learned", dropout=0.1)
    assert from_dict(GPTConfig, to_dict(original)) == original


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"dim": 32, "num_heads": 5}, "divisible by num_heads, got 32 and 5; try 4 heads"),
        ({"num_heads": 16}, r"even head width, got 16 / 16 = 1; .* position='learned'"),
        ({"num_kv_heads": 3}, "divisible by num_kv_heads, got 4 and 3"),
        ({"num_kv_heads": 0}, "divisible by num_kv_heads, got 4 and 0"),
        ({"mlp": "relu"}, "mlp must be 'swiglu' or 'gelu', got 'relu'"),
        ({"position": "alibi"}, "position must be 'rope' or 'learned', got 'alibi'"),
        ({"mlp_ratio": 0.05}, "leave a hidden unit, got 0.05 at dim 16"),
        ({"mlp_ratio": math.inf}, "mlp_ratio must be finite and .*, got inf"),
        ({"mlp_ratio": math.nan}, "mlp_ratio must be finite and .*, got nan"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
        ({"norm_eps": -1e-6}, "norm_eps must be at least 0 and finite, got -1e-06"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0 and finite, got nan"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**options)


def test_odd_heads_are_fine_with_learned_positions() -> None:
    assert logits_of(build(num_heads=16, position="learned"), draw_tokens(1, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (WAV(num_blocks=5), "num_blocks=5 is more than the stack's 4 layers; use at most 4"),
        (DeltaAttnRes(num_blocks=9), "num_blocks=9 is more than the stack's 4 layers"),
        (BlockAttnRes(block_layers=6), "block_layers=6 is more than the stack's 4 layers"),
    ],
    ids=str,
)
def test_a_method_that_does_not_fit_the_depth_says_so(
    residual: ResidualConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(residual=residual)


def test_tokens_that_do_not_fit_are_refused() -> None:
    model = build()
    with pytest.raises(UserError, match="9 tokens exceed the model's context of 8"):
        model(draw_tokens(1, 9))
    with pytest.raises(UserError, match=r"tokens must be \(batch, tokens\), got shape \(8,\)"):
        model(draw_tokens(8))
    cache = model.new_cache()
    model(draw_tokens(1, 6), cache=cache)
    with pytest.raises(UserError, match="6 cached and 3 new tokens exceed the context of 8"):
        model(draw_tokens(1, 3), cache=cache)
