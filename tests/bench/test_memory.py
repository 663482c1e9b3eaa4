import pytest
import torch

from resroute.bench.memory import peak_bytes

CPU = torch.device("cpu")


def test_the_peak_by_hand():
    def work():
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        return second, third

    assert peak_bytes(work, CPU) == 12_000


def test_what_was_there_before_is_not_counted():
    before = torch.ones(10_000)
    assert peak_bytes(lambda: before + before, CPU) == 40_000
    assert peak_bytes(lambda: None, CPU) == 0
    # nor what an earlier measurement left behind
    kept = []
    assert peak_bytes(lambda: kept.append(torch.ones(50_000)), CPU) == 200_000
    assert peak_bytes(lambda: before + before, CPU) == 40_000


def test_what_backward_needs_is_counted():
    x = torch.ones(1000, requires_grad=True)

    def work():
        # exp and sigmoid each keep their result; the sum and its gradient are 4 bytes each
        torch.sigmoid(torch.exp(x)).sum()

    assert peak_bytes(work, CPU) == 2 * 4000 + 4


def test_the_profiler_says_nothing(capfd):
    peak_bytes(lambda: torch.ones(3), CPU)
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_the_peak_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = torch.device("cuda")

    def work():
        first = torch.empty(2**20, device=device)
        return first + first

    assert peak_bytes(work, device) == 2 * 2**22
