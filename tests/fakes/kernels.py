"""kernels 0.17.2: get_kernel with its resolvers, local folders first, and no network behind the Hub."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

_loaded = {}


@dataclass(frozen=True)
class LoadedKernel:
    module: object
    repo_info: object = None


def get_loaded_kernels():
    return list(_loaded.values())


def get_kernel(
    repo_id, *, revision=None, version=None, backend=None, user_agent=None, trust_remote_code=False, check_arch=True
):
    if (revision is None) == (version is None):
        raise ValueError("Only one of `revision` or `version` must be specified.")
    assert revision is None or isinstance(revision, str)
    assert version is None or isinstance(version, int)
    folder = _local_folders().get(repo_id)
    if folder is not None:
        return _load_local(folder)
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        if revision is not None:
            raise FileNotFoundError(
                f"Cannot find a local snapshot for {repo_id} (revision: {revision}). When Hugging Face Hub is in offline"
                " mode the kernel must already be present in the local cache."
            )
        raise ValueError(
            f"Version {version} of '{repo_id}' is not available in the local cache and Hugging Face Hub is in offline mode."
            " Download the kernel while online first, or pass an explicit `revision=<commit>`."
        )
    raise ValueError(
        f"Kernel repository '{repo_id}' could not verify publisher trust status. Set trust_remote_code=True or add the"
        " repository ID to the trust_remote_code allowlist to allow loading kernels from untrusted sources."
    )


def _local_folders():
    folders = {}
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        if "=" not in entry:
            raise ValueError(f"Invalid LOCAL_KERNELS entry: {entry}. Expected format: repo_id_1=path_1:repo_id_2=path_2")
        repo_id, path = entry.split("=", 1)
        folders[repo_id] = Path(path)
    return folders


def _load_local(folder):
    variant = folder / "build" / "torch-universal"
    if not variant.is_dir():
        raise FileNotFoundError(f"Cannot find a build variant for this system in {folder}:\n\n")
    if variant in _loaded:
        return _loaded[variant].module
    metadata = json.loads((variant / "metadata.json").read_text())
    for field in ("id", "name", "version", "license", "python-depends", "backend"):
        if field not in metadata:
            raise ValueError(f'Cannot parse metadata from `"{variant}/metadata.json"`: missing field `{field}`')
    spec = importlib.util.spec_from_file_location(metadata["id"], variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded[variant] = LoadedKernel(module)
    return module
