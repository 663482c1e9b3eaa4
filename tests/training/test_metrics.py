import json
import sys

import numpy as np
import pytest
import torch

from resroute.training.metrics import MetricsFile, PeakMemory


def test_lines_come_back_and_rewind(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    for step in range(4):
        file.append({"kind": "train", "step": step, "loss": step / 4})
    assert file.rewind(1) == [
        {"kind": "train", "step": 0, "loss": 0.0},
        {"kind": "train", "step": 1, "loss": 0.25},
    ]
    assert len(file.path.read_text().splitlines()) == 2
    file.append({"kind": "train", "step": 2, "loss": 9.0})
    assert [record["step"] for record in file.read()] == [0, 1, 2]


def test_a_torn_end_is_left_out_and_other_damage_is_named(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    whole = file.path.read_text()
    file.path.write_text(whole + '{"step": 2, "lo')
    assert file.read() == [{"step": 1}]
    file.path.write_text('{"ste\n' + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1: damaged JSON"):
        file.read()


def test_numbers_that_json_has_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsFile(tmp_path / "m").append({"loss": float("nan")})
    with pytest.raises(TypeError):
        json.dumps(torch.ones(1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak")
def test_peak_memory_is_of_its_own_span():
    big = np.ones(40_000_000)
    before = PeakMemory(torch.device("cpu")).read()
    del big
    memory = PeakMemory(torch.device("cpu"))
    low = memory.read()
    assert low < before - 200e6
    big = np.ones(60_000_000)
    del big
    assert low + 400e6 < memory.read() < low + 600e6
    assert memory.kind == "resident"
