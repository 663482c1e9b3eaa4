"""A large vocabulary and a long context need no memory of their product."""

import pytest
import torch

import resroute as rr
from resroute.bench.memory import peak_bytes


@pytest.mark.slow
def test_a_vocabulary_of_200_000_at_a_context_of_4096_takes_a_step():
    torch.manual_seed(0)
    model = rr.GPT(
        rr.GPTConfig(
            vocab_size=200_000,
            context=4096,
            num_layers=4,
            num_heads=2,
            dim=32,
            residual=rr.WAV(num_blocks=2),
        )
    )
    model.activation_checkpointing = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = torch.randint(200_000, (1, 4097))
    losses = []

    def step():
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    step()
    peak = peak_bytes(step, torch.device("cpu"))
    # weights of embedding and head have a gradient each; logits whole would take 3.3 GB
    gradients = 2 * 200_000 * 32 * 4
    assert peak < gradients + 1.2e9
    assert losses[1] < losses[0]
