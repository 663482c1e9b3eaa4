import logging

import pytest
import torch
from transformers.utils import logging as transformers_logging


@pytest.fixture(autouse=True)
def _quiet():
    """Without progress bars and notes of transformers."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)


@pytest.fixture
def ids():
    """Token ids (2, 12) of a vocabulary of 97, without the padding 0."""
    return torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def make_gpt():
    """Makes a small GPT (vocabulary 23, context 32) whose weights are nowhere special."""
    import resroute as rr

    def make(residual=None, *, seed=0, **shape):
        sizes = {"vocab_size": 23, "context": 32, "num_layers": 3, "num_heads": 4, "dim": 16}
        residual = residual or rr.WAV(num_blocks=2)
        torch.manual_seed(seed)
        model = rr.GPT(rr.GPTConfig(residual=residual, **{**sizes, **shape}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return make
