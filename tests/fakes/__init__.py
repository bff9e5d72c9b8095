"""Stand-ins for libraries that are not installed here: real packages on the path, with the real ones' signatures.

Each file is the module of one library, computing with torch on the CPU what the real one computes on its GPU: same
signature, layout, causal alignment, tuple and error types. `install` puts one on the path with its distribution.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from pytest_attn.backends import library

HERE = Path(__file__).parent

_DPA = "transformer_engine/pytorch/attention/dot_product_attention"
#: name -> its files in site-packages, its distribution, and the version
LIBRARIES = {
    "flash2": (
        {
            "flash_attn/flash_attn_interface.py": "flash2.py",
            "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import *\n",
        },
        "flash-attn",
        "2.8.3",
    ),
    "flash3": ({"flash_attn_3/flash_attn_interface.py": "flash3.py"}, "flash-attn-3", "3.0.0b1"),
    "flash3_old": ({"flash_attn_interface.py": "flash3_old.py"}, "flash-attn-3", "3.0.0b1"),
    "flash4": ({"flash_attn/cute/__init__.py": "flash4.py"}, "flash-attn-4", "4.0.0b36"),
    "transformer_engine": (
        {
            f"{_DPA}/__init__.py": "from .dot_product_attention import DotProductAttention, _attention_backends\n",
            f"{_DPA}/dot_product_attention.py": "te_dpa.py",
            f"{_DPA}/utils.py": "te_utils.py",
            "transformer_engine/pytorch/__init__.py": f"from {_DPA.replace('/', '.')} import DotProductAttention\n",
        },
        "transformer-engine-torch",
        "2.20.2",
    ),
    "xformers": (
        {
            "xformers/_cpp_lib.py": "_cpp_library_load_exception = None\n",
            "xformers/ops/__init__.py": "import xformers._cpp_lib\nfrom xformers.ops.fmha import *\n",
            "xformers/ops/fmha/__init__.py": "xformers_fmha.py",
            "xformers/ops/fmha/attn_bias.py": "xformers_attn_bias.py",
        },
        "xformers",
        "0.0.35",
    ),
    "sage1": ({"sageattention/__init__.py": "sage1.py"}, "sageattention", "1.0.6"),
    "sage2": ({"sageattention/__init__.py": "sage2.py"}, "sageattention", "2.2.0"),
    "flashinfer": (
        {
            "flashinfer/__init__.py": "flashinfer.py",
            "flashinfer/jit/env.py": "def has_flashinfer_jit_cache():\n    return True\n",
        },
        "flashinfer-python",
        "0.5.3",
    ),
    "cudnn": ({"cudnn/__init__.py": "cudnn.py"}, "nvidia-cudnn-frontend", "1.32.0"),
    "natten": (
        {
            "natten/__init__.py": "from natten.functional import na1d, na2d, na3d\n",
            "natten/functional.py": "natten.py",
            "natten/backends.py": "natten_backends.py",
        },
        "natten",
        "0.21.7",
    ),
    "diffusers": ({"diffusers/models/attention_dispatch.py": "diffusers.py"}, "diffusers", "0.42.1"),
    "transformers": (
        {
            "transformers/modeling_utils.py": "transformers.py",
            "transformers/modeling_flash_attention_utils.py": "from transformers.modeling_utils import *\n",
            "transformers/models/llama/modeling_llama.py": (
                "from transformers.modeling_utils import eager_attention_forward\n"
            ),
        },
        "transformers",
        "5.17.0",
    ),
}


def install(monkeypatch, folder, files, distribution, version="1.0"):
    """Install fake modules into `folder`: files maps a path in site-packages to a file of this folder or to source text.

    They are imported without being tried in a child process first, which tests/backends/test_library.py is about.
    """
    monkeypatch.setattr(library, "try_in_child", lambda module: None)
    for path, source in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for parent in list(Path(path).parents)[:-1]:
            init = folder / parent / "__init__.py"
            if not init.exists():
                init.touch()
        target.write_text(source_of(source) if source.endswith(".py") and "\n" not in source else source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (folder / "tmp").mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.syspath_prepend(str(folder))
    tops = {Path(path).parts[0].removesuffix(".py") for path in files}
    for name in [n for n in sys.modules if n.split(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    forget()


def source_of(file):
    """Return the text of a fake: of a file here, or of one of the family that stands in flash_attention.py."""
    name = file.removesuffix(".py")
    if name in ("flash2", "flash3", "flash3_old", "flash4", "hub"):
        return (HERE / "flash_attention.py").read_text() + f'\n\npublish("{name}")\n'
    return (HERE / file).read_text()


def faulty(file, right, wrong):
    source = source_of(file)
    assert right in source, f"{file} has no {right!r}"
    return source.replace(right, wrong)


def planted(file, right, wrong):
    """Return the path of a fake in its library, with its text with a fault planted in it."""
    (path,) = {path for files, *_ in LIBRARIES.values() for path, source in files.items() if source == file}
    return {path: faulty(file, right, wrong)}


def put(monkeypatch, folder, name, **changed):
    """Install one of `LIBRARIES`. changed: files of it, by their paths, that have another source."""
    files, distribution, version = LIBRARIES[name]
    install(monkeypatch, folder, files | changed, distribution, version)


def uninstall(files):
    """Forget the modules again, so that no other test finds them imported."""
    tops = {Path(path).parts[0].removesuffix(".py") for path in files}
    for name in [n for n in sys.modules if n.split(".")[0] in tops]:
        del sys.modules[name]
    forget()


def forget():
    library._version_of.cache_clear()
    library._has_file.cache_clear()
    library.import_failure.cache_clear()
    library.installed_packages.cache_clear()
