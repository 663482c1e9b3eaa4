"""What is kept for the backward pass: by arithmetic, and by counting allocated bytes."""

import dataclasses

import pytest
import torch

import resroute as rr
from resroute.bench.memory import peak_bytes
from resroute.model import attend, loss
from resroute.training import activations
from resroute.training.plan import Layout, memory


def shape(residual, **options):
    sizes = {"vocab_size": 46, "context": 128, "num_layers": 7, "num_heads": 4, "dim": 64}
    return rr.GPTConfig(**{**sizes, "residual": residual, **options})


def layout_of(precision, recomputes, **options):
    fields = {"precision": precision, "activation_checkpointing": recomputes, "windows": 8}
    return Layout(**{**fields, **options})


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Multiply and attend in bfloat16, also where this CPU is slow at it."""
    monkeypatch.setattr("resroute.model.projection.NARROW_IS_SLOW", False)

    def attention(queries, keys, values, *, dropout):
        return attend._attend(queries, keys, values, dropout)

    monkeypatch.setattr("resroute.model.attention.causal_attention", attention)


def forward_of(model_config, layout):
    torch.manual_seed(0)
    model = rr.GPT(model_config)
    model.activation_checkpointing = layout.activation_checkpointing
    tokens = torch.randint(model_config.vocab_size, (layout.windows, model_config.context))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=layout.precision == "bfloat16"):
            return model(tokens, tokens.clone())[1]

    # builds kernels
    forward().backward()
    return forward


KEPT = [
    (rr.PreNorm(), {}),
    (rr.BlockAttnRes(num_blocks=2), {}),
    (rr.WAV(num_blocks=3), {}),
    (rr.WAV(num_blocks=7), {}),
    (rr.HAARES(num_blocks=2), {"mlp": "gelu", "num_kv_heads": 2}),
    (rr.WAV(bases=("phase",), details_in_readout=True), {"num_layers": 6}),
    # large logits are not kept
    (rr.WAV(num_blocks=2), {"vocab_size": 3000, "mlp_ratio": 2.5}),
]
USUAL = [(precision, recomputes) for precision in ("float32", "bfloat16") for recomputes in (0, 1)]


@pytest.mark.filterwarnings("ignore:with one layer a block")
@pytest.mark.parametrize(
    ("case", "precision", "recomputes"),
    [
        *((case, *layout) for case in range(3) for layout in USUAL),
        *((case, "bfloat16", recomputes) for case in range(3, 7) for recomputes in (0, 1)),
    ],
)
def test_what_is_kept_for_the_backward_pass(as_on_a_gpu, case, precision, recomputes):
    residual, options = KEPT[case]
    model, layout = shape(residual, **options), layout_of(precision, bool(recomputes))
    forward = forward_of(model, layout)
    kept = []
    # more than all that comes and goes: the peak is when it is there
    much = 2**28

    def work():
        kept.append(forward())
        torch.empty(much, dtype=torch.uint8)

    found = peak_bytes(work, torch.device("cpu")) - much
    plan = memory(model, layout)
    planned = plan.streams + plan.sublayers + plan.ends
    if recomputes:
        # each layer keeps the state of the random generator
        found -= model.num_layers * torch.get_rng_state().nbytes
    else:
        planned += plan.casts
    # besides there are rotary tables and folded queries, which do not grow with the batch; the
    # backend lean keeps a number less for each basis
    assert planned == pytest.approx(found, rel=8e-3)


def test_constants_are_those_of_the_code():
    assert loss._SMALL_BYTES == activations.SMALL_LOGITS


@pytest.mark.parametrize(("narrow", "precision"), [(4, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize(("layers", "blocks"), [(12, 4), (48, 8)])
def test_the_document_s_formulas_of_streams(layers, blocks, narrow, precision):
    whole = {
        "PreNorm": (2 * layers + 1, 0),
        "Block AttnRes": (2 * layers + 2, 2 * layers),
        "WAV": (2 * layers + 3 * blocks, 2 * layers),
    }
    less = {
        "PreNorm": (layers + 1, layers - 1),
        "Block AttnRes": (layers + 2, 3 * layers - blocks),
        "WAV": (2 * layers + blocks, 3 * layers - 2 * blocks),
    }
    # so wide that scalars do not show
    sizes = {"num_layers": layers, "dim": 2**20, "num_heads": 1, "context": 1}
    for residual in (rr.PreNorm(), rr.BlockAttnRes(num_blocks=blocks), rr.WAV(num_blocks=blocks)):
        model, layout = shape(residual, **sizes), Layout(precision=precision, windows=1)
        for formula, plan in (
            (whole, layout),
            (less, dataclasses.replace(layout, activation_checkpointing=True)),
        ):
            wide, mixes = formula[residual.label]
            assert memory(model, plan).streams // 2**20 == 4 * wide + narrow * mixes
