"""A machine with two GPUs, as torch and NVML know them: of the fake NVML of this folder."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from fakes import install, uninstall

UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
OTHER = "00000000-8ff3-c2dc-3b0d-fafd804516ae"


@contextmanager
def two_gpus(monkeypatch, folder):
    """Yield NVML on a machine whose second GPU is what torch calls cuda:0."""
    install(monkeypatch, folder, {"pynvml.py": "nvml.py"}, "nvidia-ml-py", "13.615.71")
    import pynvml

    pynvml.GPUS[:] = [pynvml.Gpu(f"GPU-{OTHER}", "00000000:18:00.0"), pynvml.Gpu(f"GPU-{UUID}", "00000001:DB:00.0")]
    torch_says(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield pynvml
    uninstall(["pynvml.py"])


def torch_says(monkeypatch, **properties):
    """Have torch tell these properties of every device, its UUID if none are given."""
    properties = properties or {"uuid": UUID}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
