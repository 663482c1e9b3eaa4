"""Run by `torchrun`: how far the gradients of a stack on two processes are from those of one."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import resroute as rr
from resroute.testing import randomise

DIM, LAYERS = 8, 4
CONFIGS = {"WAV": rr.WAV(num_blocks=2), "gated": rr.BlockAttnRes(num_blocks=2, gated=True)}


def build(config: rr.ResidualConfig) -> nn.Module:
    """The same on every process."""
    torch.manual_seed(0)
    stack = rr.RoutedStack(
        [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2 * LAYERS)],
        config,
        dim=DIM,
        kinds=("attention", "mlp"),
        norms=[nn.RMSNorm(DIM) for _ in range(2 * LAYERS)],
    )
    randomise(stack.policy)
    return stack


def gradients(run: nn.Module, module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the mean over rows, gathered where they are sharded."""
    for _ in range(2):
        module.zero_grad()
        run(x).pow(3).mean().backward()
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name.removeprefix("0.")] = full
    return found


def sharded(stack: nn.Module, root: nn.Module) -> nn.Module:
    for sublayer in stack.sublayers:
        fully_shard(sublayer)
    fully_shard(root)
    return root


def main() -> None:
    """Print one line a way to spread a stack."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(1))
    share = x.chunk(2)[rank]
    for name, config in CONFIGS.items():
        alone = build(config)
        expected = gradients(alone, alone, x)
        ways = {kind: build(config) for kind in ("ddp", "fsdp", "fsdp, recomputed")}
        ways |= {kind: build(config) for kind in ("fsdp around it", "ddp, compiled")}
        ways["fsdp, recomputed"].activation_checkpointing = True
        for kind, stack in ways.items():
            module = nn.Sequential(stack) if "around" in kind else stack
            if "fsdp" in kind:
                run = sharded(stack, module)
            else:
                if "compiled" in kind:
                    stack.compile(backend="aot_eager")
                run = nn.parallel.DistributedDataParallel(stack)
            found = gradients(run, module, share)
            assert found.keys() == expected.keys()
            distance = max((found[n] - expected[n]).abs().max().item() for n in expected)
            size = max(value.abs().max().item() for value in expected.values())
            if rank == 0:
                print(f"{name} {kind}: {distance / size}")
    refused = build(config)
    fully_shard(refused.policy)
    try:
        refused(share)
    except rr.UserError as error:
        if rank == 0:
            print(f"refused: {error}")


if __name__ == "__main__":
    # torch's, of views that a module returns under FSDP2
    warnings.simplefilter("ignore")
    main()
    sys.stdout.flush()
    # taking gloo down can wait for a message of its own for ever (see training/distributed.py)
    os._exit(0)
