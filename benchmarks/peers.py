"""Training steps of whole models of other packages against ours, in alternating pairs.

    PYTHONPATH=/path/to/peers python benchmarks/peers.py --layers 24 --dim 128 --pairs 10

benchmarks/README.md says how to install the packages and how to read the numbers. The architectures
are as near to each other as public options make them, not equal: parameters of both are reported.
"""

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.bench import Comparison, Listener, Settings, footer, lines
from resroute.bench.check import Truth
from resroute.bench.settings import VOCABULARY, served
from resroute.bench.step import alternate_steps
from resroute.bench.workload import GPTStep, torch_step
from resroute.config import to_dict
from resroute.residual import BlockAttnRes, PreNorm, ResidualConfig
from resroute.training.device import environment

Loss = Callable[[Tensor, Tensor], Tensor]


def attn_res(settings: Settings) -> tuple[nn.Module, Loss]:
    """Block AttnRes of attn-res; its `n_layers` counts sublayers."""
    package = importlib.import_module("attn_res")
    config = package.TransformerConfig(
        d_model=settings.dim,
        n_layers=2 * settings.layers,
        n_heads=settings.num_heads,
        n_kv_heads=settings.num_heads,
        vocab_size=VOCABULARY,
        max_seq_len=settings.context,
        ffn_mult=4.0,
        attn_res_mode=package.AttnResMode.BLOCK,
        n_blocks=settings.num_blocks,
    )
    model = package.AttnResTransformer(config)
    return model, lambda tokens, targets: model(tokens, targets)[1]


def x_transformers(settings: Settings, *, flash: bool) -> tuple[nn.Module, Loss]:
    """PreNorm of x-transformers with RMSNorm, rotary positions and SwiGLU, as ours."""
    package = importlib.import_module("x_transformers")
    decoder = package.Decoder(
        dim=settings.dim,
        depth=settings.layers,
        heads=settings.num_heads,
        attn_dim_head=settings.dim // settings.num_heads,
        attn_flash=flash,
        rotary_pos_emb=True,
        rotary_emb_dim=settings.dim // settings.num_heads,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
    )
    model = package.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=settings.context,
        use_abs_pos_emb=False,
        attn_layers=decoder,
    )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    return model, loss


Peer = tuple[str, str, ResidualConfig, Callable[[Settings], tuple[nn.Module, Loss]]]

PEERS: tuple[Peer, ...] = (
    ("attn-res", "attn-res", BlockAttnRes(), attn_res),
    ("x-transformers", "x-tr.", PreNorm(), lambda s: x_transformers(s, flash=False)),
    ("x-transformers", "x-tr. sdpa", PreNorm(), lambda s: x_transformers(s, flash=True)),
)
"""Package, its name in the table, our method, the model."""


def compare(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time our step of each peer's method in turn with theirs; ours is checked first."""
    backend = served("auto", settings)
    missing: set[str] = set()
    for package, label, residual, make in PEERS:
        try:
            release = version(package)
        except PackageNotFoundError:
            if package not in missing:
                listener.message(f"{package} is not installed: left out")
            missing.add(package)
            continue
        truth = Truth(settings, residual)
        deviation = {"formula": truth.require_formula(backend)}
        ours = GPTStep(settings, residual, backend, compiled=settings.compiles)
        deviation["step"] = truth.require_step(ours)
        torch.manual_seed(0)
        model, loss = make(settings)
        theirs = torch_step(settings, model.to(settings.torch_device), loss)
        first = float(theirs.gradients())
        theirs.clear()
        if not math.isfinite(first):
            raise RuntimeError(f"{package}: its first loss is {first}; it is not timed")
        label_ = f"{residual.label} against {package}"
        yield Comparison(
            name=residual.label,
            backend=backend,
            against=label,
            unit="s",
            pairs=alternate_steps(theirs, ours, settings, label_, listener),
            details={
                "package": f"{package} {release}",
                "parameters": ours.parameters,
                "their_parameters": sum(p.numel() for p in model.parameters()),
                "their_first_loss": first,
                "deviation": deviation,
            },
        )


class Lines(Listener):
    """Says what is going on."""

    def message(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, words in (
        ("layers", 48, "layers of attention and MLP"),
        ("dim", 256, "width"),
        ("batch", 8, "windows a step"),
        ("context", 256, "tokens of a window"),
        ("pairs", 30, "measurements of each side, A B A B"),
    ):
        help_ = f"{words} ({default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_)
    parser.add_argument("--blocks", type=int, metavar="N", help="depth blocks (4)")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        metavar="P",
        help="auto, float32 or bfloat16 (auto)",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="our sublayers (compiled)"
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps (auto)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write: settings and every pair"
    )
    options = vars(parser.parse_args())
    out = options.pop("out")
    settings = Settings(**options)
    rows = list(compare(settings, Lines()))
    if not rows:
        return
    print("\n".join([*lines(rows), "", *footer("step", settings, rows)]))
    for row in rows:
        ours, theirs = row.details["parameters"], row.details["their_parameters"]
        print(f"parameters against {row.details['package']}: {ours:,} and {theirs:,}")
    if out is not None:
        machine = environment(settings.torch_device, settings.torch_precision)
        result = {"case": "peers", "settings": to_dict(settings), "machine": machine}
        result["rows"] = [row.to_json() for row in rows]
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
