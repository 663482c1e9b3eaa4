"""Training steps of a converted model of transformers against the untouched one, in pairs.

    python benchmarks/convert.py --layers 24 --dim 256 --pairs 10 --out runs/convert.json

The model is a Qwen3 of random weights, eager, with transformers' own attention (sdpa). Copies are
converted and checked before they are timed: PreNorm must give the untouched model's logits to the
bit, and so must closed gates.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

import resroute as rr
from resroute.bench import Comparison, Listener, Settings, footer, lines
from resroute.bench.settings import VOCABULARY
from resroute.bench.step import alternate_steps
from resroute.bench.workload import Step, torch_step
from resroute.config import to_dict
from resroute.residual import ResidualConfig
from resroute.training.device import environment


def untouched(settings: Settings) -> transformers.Qwen3ForCausalLM:
    """The model that the others are copies of."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=settings.dim,
        intermediate_size=4 * settings.dim,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.dim // settings.num_heads,
        max_position_embeddings=settings.context,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).to(settings.torch_device)


def step_of(settings: Settings, model: transformers.Qwen3ForCausalLM) -> Step:
    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return torch_step(settings, model, loss)


def compare(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time the step of each conversion in turn with the untouched model's."""
    plain = untouched(settings)
    window = torch.arange(settings.context, device=settings.torch_device)[None] % VOCABULARY
    with torch.no_grad():
        expected = plain(window).logits
    blocks = settings.blocks or min(4, settings.layers)
    methods: list[tuple[str, ResidualConfig]] = [
        ("PreNorm", rr.PreNorm()),
        ("Block AttnRes", rr.BlockAttnRes(num_blocks=blocks)),
        ("WAV", rr.WAV(num_blocks=blocks)),
        ("WAV, gated", rr.WAV(num_blocks=blocks, gated=True)),
    ]
    # which its steps train
    baseline = step_of(settings, copy.deepcopy(plain))
    for name, method in methods:
        model = rr.convert(copy.deepcopy(plain), method, from_scratch=True)
        with torch.no_grad():
            is_equal = torch.equal(model(window).logits, expected)
        if name in ("PreNorm", "WAV, gated") and not is_equal:
            raise RuntimeError(f"{name}: the logits are not the untouched model's; it is not timed")
        measured = step_of(settings, model)
        yield Comparison(
            name=name,
            against="untouched",
            unit="s",
            pairs=alternate_steps(baseline, measured, settings, name, listener),
            details={
                "parameters": sum(p.numel() for p in model.parameters()),
                "equal_at_the_start": is_equal,
            },
        )


class Lines(Listener):
    """Says what is going on."""

    def message(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole: Callable[[str], int] = int
    for name, default, words in (
        ("layers", 24, "layers of attention and MLP"),
        ("dim", 256, "width"),
        ("batch", 8, "windows a step"),
        ("context", 256, "tokens of a window"),
        ("pairs", 10, "measurements of each side, A B A B"),
    ):
        parser.add_argument(
            f"--{name}", type=whole, default=default, metavar="N", help=f"{words} ({default})"
        )
    parser.add_argument("--blocks", type=whole, metavar="N", help="depth blocks (4)")
    parser.add_argument(
        "--precision", default="auto", choices=["auto", "float32", "bfloat16"], metavar="P",
        help="auto, float32 or bfloat16 (auto)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or mps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file: settings, every pair")
    options = vars(parser.parse_args())
    out = options.pop("out")
    settings = Settings(**options, compile=False)
    rows = list(compare(settings, Lines()))
    print("\n".join([*lines(rows), "", *footer("step", settings, rows)]))
    if out is not None:
        machine = environment(settings.torch_device, settings.torch_precision)
        result = {"case": "convert", "settings": to_dict(settings), "machine": machine}
        result["transformers"] = transformers.__version__
        result["rows"] = [row.to_json() for row in rows]
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
