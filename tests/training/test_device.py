import pytest
import torch

from resroute.training import device


def test_names_of_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.choose_device("auto") == torch.device("cpu")
    assert device.choose_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1", "mps"):
        with pytest.raises(
            ValueError, match=f"device '{name}' was asked for, but torch finds none"
        ):
            device.choose_device(name)
    with pytest.raises(ValueError, match=r"unknown device 'cdua' \(did you mean 'cuda'\?\)"):
        device.choose_device("cdua")
    with pytest.raises(ValueError, match="device 'meta' is not supported"):
        device.choose_device("meta")


def test_auto_prefers_cuda_then_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.choose_device("auto") == torch.device("cuda")
    with pytest.raises(ValueError, match="there are 1 CUDA devices"):
        device.choose_device("cuda:1")


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose_device("auto", 1) == torch.device("cuda:1")
    assert device.choose_device("cuda", 0) == torch.device("cuda:0")
    with pytest.raises(ValueError, match="there are 2 CUDA devices"):
        device.choose_device("cuda", 2)
    with pytest.raises(ValueError, match="several processes cannot share 'cuda:1'"):
        device.choose_device("cuda:1", 0)
    assert device.choose_device("cpu", 1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(("amx", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_where_the_cpu_is_faster_in_it(monkeypatch, amx, expected):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    # has bfloat16 instructions either way; they alone do not pay
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert device.choose_precision("auto", cpu) == expected
    assert device.choose_precision("float32", cpu) == torch.float32
    assert device.choose_precision("bfloat16", cpu) == torch.bfloat16


def test_the_environment_names_versions_and_no_place(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/somebody/bin/resroute", "train", "/home/somebody/x"])
    found = device.environment(torch.device("cpu"), torch.float32)
    assert found["command"] == ["resroute", "train", "x"]
    assert found["torch"] == torch.__version__
    assert found["precision"] == "float32"
    assert "somebody" not in str(found)


def test_the_compiler_that_torch_would_take(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not device.has_cpp_compiler()
    tool = tmp_path / "my-compiler"
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", "my-compiler")
    assert device.has_cpp_compiler()
