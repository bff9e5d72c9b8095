"""Stand-ins of libraries on the path, by the backend that calls them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fakes import LIBRARIES, put, uninstall

from pytest_attn.backends.registry import Registry
from pytest_attn.guests.libraries import cudnn, flash_attention

#: backend, or what its name begins with -> the libraries to install; "/old" is an older generation of the same library
BACKENDS = {
    "cudnn": ("cudnn",),
    "diffusers:flash": ("flash2", "diffusers"),
    "diffusers:": ("diffusers",),
    "flash2": ("flash2",),
    "flash3/old": ("flash3_old",),
    "flash3": ("flash3",),
    "flash4": ("flash4",),
    "flex_flash": ("flash4",),
    "sdpa_fa4": ("flash4",),
    "flashinfer": ("flashinfer",),
    "natten": ("natten",),
    "sage": ("sage2",),
    "te_": ("transformer_engine",),
    "transformers:flash_attention_2": ("flash2", "transformers"),
    "transformers:": ("transformers",),
    "xformers": ("xformers",),
}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install what a backend needs; returns it. changed: files of it that have another source; libraries: others instead."""
    files = []

    def made(name, libraries=None, **changed):
        needed = next((taken for begin, taken in BACKENDS.items() if name.startswith(begin)), ())
        for library in needed if libraries is None else libraries:
            own = LIBRARIES[library][0]
            tops = {path.partition("/")[0] for path in own}
            put(monkeypatch, tmp_path, library, **{path: changed[path] for path in changed if path.partition("/")[0] in tops})
            files.extend(own)
        if name == "cudnn":
            monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
            monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
        forget()
        return Registry()[name.removesuffix("/old")]

    yield made
    uninstall(files)
    forget()


def forget():
    for kept in (flash_attention._refused_by_build, cudnn._handle, cudnn._not_supported_because):
        kept.cache_clear()
