"""Time of a training step, each method against PreNorm.

Steps alternate within one process, PreNorm then method, so that both see the same machine; the
figure is the median of the pairs' ratios with a 95 % interval from order statistics. Before any
timing, each policy is checked against the formula in float64 (the parity cases do more).

    make bench ARGS='--layers 24 --dim 128 --pairs 10'
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

import resroute as rr
from resroute.testing import random_stack, randomise
from resroute.training.config import TrainConfig
from resroute.training.device import choose_device, choose_precision, environment
from resroute.training.optim import make_optimizer

METHODS = {
    "block-attn-res": rr.BlockAttnRes(num_blocks=4),
    "wav": rr.WAV(num_blocks=4),
    "full-attn-res": rr.FullAttnRes(),
    "delta-attn-res": rr.DeltaAttnRes(num_blocks=4),
}


def check(residual: rr.ResidualConfig) -> None:
    """Refuse to time a wrong method: with open gates it is the method, with closed ones PreNorm."""
    from dataclasses import replace

    stack = random_stack(16, 8)
    gated = replace(residual, gated=True).build(8, 8).double()
    plain = residual.build(8, 8).double()
    randomise(plain)
    for gate, other in ((0.0, rr.PreNorm().build(8, 8)), (1.0, plain)):
        gated.load_state_dict({**plain.state_dict(), "gate": torch.full_like(gated.gate, gate)})
        torch.testing.assert_close(stack.run(gated)[1], stack.run(other)[1])


class Step:
    """One model and its optimizer on one random batch."""

    def __init__(self, residual: rr.ResidualConfig, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = rr.GPTConfig(
            vocab_size=64,
            context=options.context,
            num_layers=options.layers,
            num_heads=max(1, options.dim // 32),
            dim=options.dim,
            residual=residual,
        )
        self.device = choose_device(options.device)
        self.precision = choose_precision(options.precision, self.device)
        self.model = rr.GPT(config).to(self.device)
        self.optimizer = make_optimizer(self.model, TrainConfig(model=config, data="none"))
        self.tokens = torch.randint(64, (options.batch, options.context), device=self.device)

    def run(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        use_half = self.precision == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=use_half):
            loss = self.model(self.tokens, self.tokens)[1]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from order statistics."""
    ordered, n = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 24), ("dim", 128), ("batch", 8), ("context", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    plain, rows = Step(rr.PreNorm(), options), []
    print(f"{'method':16} {'ratio':>6}  95 % interval   PreNorm seconds")
    for name, residual in METHODS.items():
        check(residual)
        routed = Step(residual, options)
        plain.run(), routed.run()
        pairs = [(plain.run(), routed.run()) for _ in range(options.pairs)]
        ratios = [b / a for a, b in pairs]
        low, high = interval(ratios)
        seconds = statistics.median(a for a, _ in pairs)
        ratio = statistics.median(ratios)
        rows.append({"method": name, "ratio": ratio, "interval": [low, high], "pairs": pairs})
        print(f"{name:16} {ratio:6.2f}  {low:5.2f} .. {high:5.2f}   {seconds:8.3f}", flush=True)
    if options.out:
        settings = {k: v for k, v in vars(options).items() if k != "out"}
        machine = environment(plain.device, plain.precision)
        result = {"settings": settings, "machine": machine, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
