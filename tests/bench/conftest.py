import pytest

from resroute.bench import Settings


@pytest.fixture(autouse=True)
def no_build(monkeypatch):
    """`auto` is lean: no test here waits for a compiler."""
    monkeypatch.setattr("resroute.ops.native.available", lambda: False)


@pytest.fixture
def tiny():
    """Settings that a case runs with in a second; options replace fields."""

    def make(**options):
        sizes = {"layers": 4, "dim": 16, "batch": 2, "context": 8, "blocks": 2, "pairs": 2}
        fixed = {"precision": "float32", "compile": False, "device": "cpu", "backends": ("lean",)}
        return Settings(**{**sizes, **fixed, **options})

    return make
