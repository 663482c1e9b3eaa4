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
