"""Stand-ins for libraries that are not installed here: real packages on the path, with the real ones' signatures.

Each file is the module of one library, computing with torch on the CPU what the real one computes on its GPU: same
signature, layout, causal alignment, tuple and error types. `install` puts one on the path with its distribution.
"""

import importlib
import sys
from pathlib import Path

from pytest_attn.backends import import_trial, library

HERE = Path(__file__).parent


def install(monkeypatch, folder, files, distribution, version="1.0"):
    """Install fake modules into `folder`: files maps a path in site-packages to a file of this folder or to source text.

    They are imported without being tried in a child process first, which tests/backends/test_library.py is about.
    """
    monkeypatch.setattr(import_trial, "try_in_child", lambda module: None)
    for path, source in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for parent in list(Path(path).parents)[:-1]:
            init = folder / parent / "__init__.py"
            if not init.exists():
                init.touch()
        target.write_text((HERE / source).read_text() if source.endswith(".py") and "\n" not in source else source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.syspath_prepend(str(folder))
    tops = {Path(path).parts[0].removesuffix(".py") for path in files}
    for name in [n for n in sys.modules if n.split(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    forget()


def uninstall(files):
    """Forget the modules again, so that no other test finds them imported."""
    tops = {Path(path).parts[0].removesuffix(".py") for path in files}
    for name in [n for n in sys.modules if n.split(".")[0] in tops]:
        del sys.modules[name]
    forget()


def forget():
    """Forget what was found of installed libraries."""
    library._is_installed.cache_clear()
    import_trial.import_failure.cache_clear()
    import_trial.installed_packages.cache_clear()
