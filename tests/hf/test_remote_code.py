"""Exported code without resroute: formulas of its own, and folders that load by themselves."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import resroute as rr
from resroute.config import to_dict, variants
from resroute.core import SIGN_RULES
from resroute.hf import routing_resroute as routing
from resroute.hf.gpt import from_gpt
from resroute.residual import ResidualConfig
from resroute.residual.base import DEFAULT_KINDS

# notes on shapes are the concern of the policies' own tests
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHAPES = {"layers": 5, "dim": 16}
METHODS = {
    "pre-norm": rr.PreNorm(),
    "re-zero": rr.ReZero(),
    "layer-scale": rr.LayerScale(init=0.3),
    "layer-scale-by-depth": rr.LayerScale(init=None),
    "full": rr.FullAttnRes(),
    "full-gated-no-gain": rr.FullAttnRes(gated=True, key_gain=False),
    "block": rr.BlockAttnRes(),
    "block-of-layers": rr.BlockAttnRes(block_layers=3, eps=0.01),
    "block-gated": rr.BlockAttnRes(num_blocks=2, gated=True),
    "delta": rr.DeltaAttnRes(),
    "delta-blocks-gated": rr.DeltaAttnRes(num_blocks=2, gated=True),
    "delta-no-embedding": rr.DeltaAttnRes(embedding_source=False),
    "delta-blocks-no-embedding": rr.DeltaAttnRes(num_blocks=2, embedding_source=False),
    "wav": rr.WAV(),
    "wav-short-last-block": rr.WAV(num_blocks=2, key_gain=False),
    "wav-layer-blocks": rr.WAV(block_layers=1),
    "wav-no-basis": rr.WAV(bases=(), num_blocks=2),
    "haares": rr.HAARES(num_blocks=2),
    "wav-gated": rr.WAV(num_blocks=2, gated=True, eps=1e-3),
    "wav-controls": rr.WAV(num_blocks=2, bases=("duplicate", "duplicate_2")),
    "wav-random": rr.WAV(num_blocks=2, bases=("random", "phase", "random_2"), basis_seed=7),
    "wav-learned": rr.WAV(num_blocks=2, learn_bases=True, bases=("split", "phase")),
    "wav-fixed-bias": rr.WAV(num_blocks=2, detail_bias=0.5, learn_detail_bias=False),
    "wav-running-unbiased": rr.WAV(num_blocks=2, bias_running=False),
    "wav-attached": rr.WAV(num_blocks=2, matching="attached", rho_max=None),
    "wav-off": rr.WAV(num_blocks=2, matching="off"),
    "wav-rho": rr.WAV(num_blocks=2, rho_max=0.6),
    "wav-readout": rr.WAV(num_blocks=2, details_in_readout=True),
    "wav-readout-gated": rr.WAV(
        num_blocks=3, details_in_readout=True, gated=True, learn_bases=True, detail_bias=0.0
    ),
}


def pair(method, dtype=torch.float64):
    """A policy of resroute and the formula's, with equal parameters that are nowhere special."""
    options = json.loads(json.dumps(to_dict(method)))
    ours = method.build(SHAPES["layers"], SHAPES["dim"]).to(dtype)
    kind = routing.Sums if options["type"] in routing.SUMS else routing.Routed
    theirs = kind(options, SHAPES["layers"], SHAPES["dim"]).to(dtype)
    theirs.reset_parameters()
    torch.manual_seed(1)
    with torch.no_grad():
        for value in ours.state_dict().values():
            value += 0.7 * torch.randn_like(value)
    return ours, theirs


def walk(policy, embedding, weights):
    """Reads and readout of a stack of linear maps."""
    stream, reads = policy.start(embedding), []
    for site, weight in enumerate(weights):
        read, stream = policy.read_normalised(stream, site, nn.functional.normalize)
        reads.append(policy.read(stream, site))
        stream = policy.write(stream, site, (read + reads[-1]).tanh() @ weight)
    return [*reads, policy.finish(stream)]


@pytest.mark.parametrize("name", METHODS)
def test_a_formula_has_the_values_and_gradients_of_its_policy(name):
    ours, theirs = pair(METHODS[name])
    assert list(theirs.state_dict()) == list(ours.state_dict())
    starts = {key: value.clone() for key, value in theirs.state_dict().items()}
    fresh = METHODS[name].build(SHAPES["layers"], SHAPES["dim"]).state_dict()
    assert all(torch.equal(starts[key].float(), fresh[key]) for key in fresh)
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(2)
    embedding = torch.randn(2, 3, SHAPES["dim"], dtype=torch.float64)
    weights = torch.randn(2 * SHAPES["layers"], SHAPES["dim"], SHAPES["dim"]).double() / 3
    probe = torch.randn(2, 3, SHAPES["dim"], dtype=torch.float64)
    gradients = []
    for policy in (ours, theirs):
        leaves = [embedding.clone().requires_grad_(), weights.clone().requires_grad_()]
        reads = walk(policy, *leaves)
        (sum((read * probe).sum() for read in reads)).backward()
        found = {key: parameter.grad for key, parameter in policy.named_parameters()}
        gradients.append((reads, {**found, "embedding": leaves[0].grad, "weights": leaves[1].grad}))
    for ours_read, theirs_read in zip(gradients[0][0], gradients[1][0], strict=True):
        torch.testing.assert_close(theirs_read, ours_read, rtol=0, atol=1e-10)
    for key, value in gradients[0][1].items():
        torch.testing.assert_close(gradients[1][1][key], value, rtol=1e-9, atol=1e-9, msg=key)


def test_every_method_and_basis_has_a_formula():
    assert set(routing.METHODS) == set(variants(ResidualConfig))
    assert set(routing.BASES) == set(SIGN_RULES)
    assert {method.type_name for method in METHODS.values()} == set(routing.METHODS)
    for length in (2, 6):
        for seed in (0, 5):
            kinds, block = DEFAULT_KINDS * (length // 2), range(4, 4 + length)
            for basis in routing.BASES:
                assert routing._signs(basis, block, seed) == SIGN_RULES[basis](kinds, seed)


@pytest.mark.parametrize("method", variants(ResidualConfig).values(), ids=lambda m: m.type_name)
def test_options_that_are_left_out_have_the_defaults(method):
    _, theirs = pair(method())
    name = method.type_name
    kind = routing.Sums if name in routing.SUMS else routing.Routed
    bare = kind({"type": name}, SHAPES["layers"], SHAPES["dim"])
    bare.reset_parameters()
    plain = {key: value for key, value in vars(bare).items() if not key.startswith("_")}
    plain.pop("options", None)
    assert plain == {key: vars(theirs)[key] for key in plain}
    assert {k: v.shape for k, v in bare.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }


def test_bfloat16_streams_round_where_policies_do():
    ours, theirs = pair(rr.WAV(num_blocks=2, gated=True), torch.float32)
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(2)
    embedding = torch.randn(2, 3, SHAPES["dim"]).bfloat16()
    weights = (torch.randn(10, SHAPES["dim"], SHAPES["dim"]) / 3).bfloat16()
    with rr.backend("reference"):
        expected = walk(ours, embedding, weights)
    for found, read in zip(walk(theirs, embedding, weights), expected, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, read, rtol=0.01, atol=0.01)


CHECK = """
import json, sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("resroute", "jaxtyping"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Block())
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
root, answers = Path(sys.argv[1]), {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    expected = load_file(root / f"{folder.name}.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    written = model.generate(
        expected["ids"][:, :8], do_sample=False, max_new_tokens=expected["written"].shape[1] - 8
    )
    answers[folder.name] = [
        (logits - expected["logits"]).abs().max().item(),
        torch.equal(written, expected["written"]),
        type(model.model.policy).__module__.rpartition(".")[2],
        list(model.model.policy.state_dict()),
    ]
answers["there"] = [name for name in ("resroute", "jaxtyping") if name in sys.modules]
print(json.dumps(answers))
"""


def test_folders_load_without_resroute_and_give_its_logits(tmp_path, make_gpt):
    from safetensors.torch import save_file

    shapes = {
        "pre-norm": {"position": "learned", "mlp": "gelu"},
        "wav": {"num_kv_heads": 2, "qk_norm": True, "mlp_ratio": 2.5},
        "full": {"tie_embeddings": True, "num_kv_heads": 1},
    }
    ids = torch.randint(0, 23, (2, 20), generator=torch.Generator().manual_seed(4))
    for name, method in METHODS.items():
        model = make_gpt(method, num_layers=5, **shapes.get(name, {}))
        from_gpt(model).save_pretrained(tmp_path / name)
        with torch.no_grad():
            logits = model(ids)[0]
        written = rr.generate(model, ids[:, :8], 6, temperature=0)
        save_file(
            {"ids": ids, "logits": logits, "written": written}, tmp_path / f"{name}.safetensors"
        )
    answer = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(tmp_path.parent / "code"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found.pop("there") == []
    assert found.keys() == METHODS.keys()
    for name, (difference, is_equal, module, parameters) in found.items():
        assert difference < 1e-5, name
        assert is_equal, name
        assert module == "routing_resroute"
        assert parameters == list(METHODS[name].build(5, 16).state_dict()), name


def test_unknown_methods_and_bases_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(routing, "has_resroute", False)
    with pytest.raises(ValueError, match="unknown residual method 'spiral'; install resroute"):
        routing.build_policy({"type": "spiral"}, 2, 8)
    with pytest.raises(ValueError, match="unknown basis 'zigzag'"):
        routing.build_policy({"type": "wav", "bases": ["zigzag"]}, 2, 8)
    assert isinstance(routing.build_policy({"type": "wav"}, 2, 8), routing.Routed)


def test_resroute_is_used_where_it_is_there():
    assert isinstance(routing.build_policy({"type": "wav"}, 2, 8), rr.Policy)
    with pytest.raises(rr.UserError, match="unknown field 'rho_mox'"):
        routing.build_policy({"type": "wav", "rho_mox": 1.0}, 2, 8)
