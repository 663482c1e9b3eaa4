import dataclasses

import pytest

import resroute as rr


@pytest.fixture
def make_config(cheap_corpus, tmp_path):
    """Configurations of runs that take a fraction of a second."""

    def make(residual=None, *, out="run", model=None, **options):
        shape = {"num_layers": 2, "dim": 12, "num_heads": 2, "context": 48, **(model or {})}
        config = rr.GPTConfig(
            vocab_size=cheap_corpus.tokenizer.vocab_size,
            residual=residual or rr.WAV(num_blocks=1),
            **shape,
        )
        settings = {
            "steps": 6,
            "batch_size": 4,
            "warmup_steps": 2,
            "learning_rate": 3e-3,
            "evaluate_every": 2,
            "evaluation_windows": 4,
            "log_every": 1,
            "checkpoint_every": 2,
            "precision": "float32",
            "device": "cpu",
            **options,
        }
        return rr.TrainConfig(
            model=config, data=str(cheap_corpus.path), out=str(tmp_path / out), **settings
        )

    return make


@pytest.fixture
def replaced():
    return dataclasses.replace
