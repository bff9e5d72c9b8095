import os
import subprocess
import sys
import warnings

import pytest
from fakes import forget, install, uninstall
from fakes.judged import H200

from pytest_attn.backends import library
from pytest_attn.backends.library import Library
from pytest_attn.backends.registry import Registry

TRY_IN_CHILD = library.try_in_child
BROKEN = Library(("planted-broken",), "planted_broken.kernels", "pip install planted-broken")
SOUND = Library(("planted-sound",), "planted_sound", "pip install planted-sound")


def put_on_path(monkeypatch, *installed):
    install(monkeypatch, *installed)
    monkeypatch.setattr(library, "try_in_child", TRY_IN_CHILD)  # other tests leave it out
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)


@pytest.fixture
def plant(monkeypatch, tmp_path):
    def put(source, **more):
        files = {"planted_broken/kernels.py": f"{source}\n", **more}
        put_on_path(monkeypatch, tmp_path / "broken", files, "planted-broken", "0.1")
        return BROKEN

    yield put
    uninstall(["planted_broken", "planted_sound"])


@pytest.fixture
def sound(monkeypatch, tmp_path):
    put_on_path(monkeypatch, tmp_path / "sound", {"planted_sound/__init__.py": "answer = 42\n"}, "planted-sound", "2.0")
    return SOUND


def marks():
    return os.listdir(library._folder()) if library._folder().is_dir() else []


NO_CHILD = "a child process was started"


def forbid_children(monkeypatch):
    def raise_(*args, **kwargs):
        raise AssertionError(NO_CHILD)

    monkeypatch.setattr(subprocess, "Popen", raise_)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import math; math.nothing", "AttributeError: module 'math' has no attribute 'nothing'"),
        ("raise OSError('undefined symbol: _ZN3')", "OSError: undefined symbol: _ZN3"),
        ("raise SystemExit('a newer driver is needed')", "SystemExit: a newer driver is needed"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("raise RuntimeError('one\\n  two\\n\\nthree')", "RuntimeError: one two three"),
        ("raise RuntimeError('x' * 9000)", "RuntimeError: " + "x" * 300),
        ("def", "SyntaxError: invalid syntax (kernels.py, line 1)"),
        ("import os; os._exit(3)", "its import ends the process with exit code 3: it said nothing"),
        ("import os; os._exit(0)", "its import ends the process with exit code 0: it said nothing"),
        ("import ctypes; ctypes.string_at(0)", "its import ends the process with SIGSEGV: it said nothing"),
        (
            "import os, sys; sys.stderr.write('terminate called\\n  what(): no device\\n'); sys.stderr.flush(); os.abort()",
            "its import ends the process with SIGABRT: what(): no device",
        ),
        ("print('noise ' * 500_000, flush=True); raise ValueError('heard')", "ValueError: heard"),
        ("import sys; sys.stderr.write('noise ' * 500_000); raise ValueError('heard')", "ValueError: heard"),
    ],
)
def test_a_broken_library_is_refused_in_its_own_words(plant, sound, capfd, source, reason):
    broken = plant(source)
    said = f"planted_broken.kernels is installed but cannot be imported: {reason}"
    assert broken.missing_because() is None
    assert broken.broken_because() == said
    with pytest.raises(RuntimeError) as raised:
        broken.load()
    assert str(raised.value) == said
    assert capfd.readouterr() == ("", "")
    assert marks() == []
    assert sound.load().answer == 42


@pytest.mark.slow("waits for processes")
@pytest.mark.parametrize("source", ["import time; time.sleep(60)", "import os, time; os.fork(); time.sleep(60)"])
def test_an_import_that_hangs_is_given_up(plant, sound, monkeypatch, source):
    broken = plant(source)
    with monkeypatch.context() as patch:
        patch.setattr(library, "_IMPORT_SECONDS", 1)
        reason = broken.broken_because()
    assert reason == "planted_broken.kernels is installed but cannot be imported: its import took longer than 1 s"
    assert sound.load().answer == 42


def test_a_process_that_the_import_leaves_behind_is_not_waited_for(plant):
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'])"
    assert plant(f"{leaves}; import os; os._exit(3)").broken_because().endswith("with exit code 3: it said nothing")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_clean_import_leaves_a_mark_and_needs_no_child_the_second_time(sound, monkeypatch, is_kept):
    monkeypatch.setattr(sys, "dont_write_bytecode", not is_kept)  # in the child as well
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if is_kept else "1")
    assert marks() == []
    assert sound.broken_because() is None
    assert len(marks()) == 1
    uninstall(["planted_sound"])
    forbid_children(monkeypatch)
    assert sound.load().answer == 42


def test_another_version_is_tried_again(sound, monkeypatch, tmp_path):
    assert sound.broken_because() is None
    uninstall(["planted_sound"])
    (tmp_path / "sound" / "planted_sound-2.0.dist-info").rename(tmp_path / "sound" / "planted_sound-2.1.dist-info")
    metadata = tmp_path / "sound" / "planted_sound-2.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.0", "2.1"))
    forget()
    forbid_children(monkeypatch)
    with pytest.raises(AssertionError, match=NO_CHILD):
        sound.broken_because()


LOADING = """
import sys
sys.path[:] = {path!r}
from pytest_attn.backends.library import Library
print(Library(("planted-broken",), "planted_broken.kernels", "").broken_because())
"""


def load_in_a_process(**more):
    code = LOADING.format(path=sys.path)
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **more}, stdout=subprocess.PIPE, text=True)


def test_where_an_import_that_once_went_well_ends_its_process_the_next_one_tries_it_in_a_child(plant):
    broken = plant("import os\nif os.environ.get('PLANTED_END'):\n    os._exit(3)")
    assert broken.broken_because() is None
    with load_in_a_process(PLANTED_END="1") as ended:
        assert ended.communicate()[0] == ""
        assert ended.returncode == 3
    with load_in_a_process(PLANTED_END="1") as refused:
        assert "its import ends the process with exit code 3" in refused.communicate()[0]
    assert marks() == []


def test_an_import_that_raises_after_a_mark_is_refused(plant, monkeypatch):
    broken = plant("import os\nif os.environ.get('PLANTED_EXIT'):\n    raise SystemExit('not today')")
    assert broken.broken_because() is None
    uninstall(["planted_broken"])
    monkeypatch.setenv("PLANTED_EXIT", "1")
    reason = "planted_broken.kernels is installed but cannot be imported: SystemExit: not today"
    assert broken.broken_because() == reason
    assert marks() == []


def test_a_cache_that_cannot_be_written_costs_a_child_only(sound, monkeypatch, tmp_path):
    library._folder().touch()
    assert sound.broken_because() is None
    assert library._folder().is_file()


def test_what_another_user_put_there_is_not_believed(sound, monkeypatch, tmp_path):
    assert sound.broken_because() is None
    uninstall(["planted_sound"])
    there = library._folder()
    there.rename(tmp_path / "elsewhere")
    there.symlink_to(tmp_path / "elsewhere")
    forbid_children(monkeypatch)
    with pytest.raises(AssertionError, match=NO_CHILD):
        sound.broken_because()


def test_a_library_is_found_without_being_imported(plant, tmp_path):
    effect = tmp_path / "imported"
    effect_of_import = f"open({str(effect)!r}, 'w').close()\n"
    broken = plant(effect_of_import, **{"planted_broken/__init__.py": effect_of_import})
    assert broken.missing_because() is None
    assert broken.version() == "0.1"
    assert not effect.exists()
    broken.load()
    assert effect.exists()


def test_a_missing_library_or_part_says_what_to_install(plant):
    assert BROKEN.missing_because() == "planted-broken is not installed; pip install planted-broken"
    assert BROKEN.version() == "?"
    plant("")
    assert Library(("planted-broken",), "planted_broken.absent", "build it").missing_because() == (
        "planted-broken is installed, but has no module planted_broken.absent; build it"
    )


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("sage", "sageattention is not installed; pip install sageattention"),
        ("hub:org/repo", "kernels is not installed; pip install kernels"),
        ("diffusers:native", "diffusers is not installed; pip install diffusers"),
        ("transformers:sdpa", "transformers is not installed; pip install transformers"),
        ("flash3", "flash-attn-3 is not installed; build it from the folder hopper of Dao-AILab/flash-attention"),
        ("sdpa_fa4", "flash-attn-4 is not installed; pip install --pre flash-attn-4"),
        ("flex_flash", "flash-attn-4 is not installed; pip install --pre flash-attn-4"),
    ],
)
def test_a_backend_without_its_library_is_unavailable(monkeypatch, backend, reason):
    monkeypatch.setattr(library, "_version_of", lambda distribution: None)
    assert Registry()[backend].unavailable_because(H200) == reason


def test_what_an_uninstallation_left_behind_is_no_library(sound, tmp_path):
    (tmp_path / "sound" / "left_behind-1.0.dist-info").mkdir()
    forget()
    assert Library(("left-behind",), "left_behind", "pip install left-behind").missing_because() == (
        "left-behind is not installed; pip install left-behind"
    )
    assert sound.broken_because() is None


def test_variables_are_set_for_the_import_only(plant, monkeypatch):
    monkeypatch.delenv("PLANTED", raising=False)
    plant("import os; seen = os.environ['PLANTED']")
    needing = Library(("planted-broken",), "planted_broken.kernels", "", lambda: {"PLANTED": "yes"})
    assert needing.load().seen == "yes"
    assert "PLANTED" not in os.environ


def test_a_library_that_warns_is_not_broken_where_warnings_are_errors(monkeypatch, tmp_path):
    files = {"loud.py": "import warnings\nwarnings.warn('old', DeprecationWarning)\n"}
    install(monkeypatch, tmp_path, files, "loud")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Library(("loud",), "loud", "").broken_because() is None
    uninstall(files)


def test_several_are_tried_at_the_same_time_and_remembered(monkeypatch, tmp_path):
    files = {"first.py": "", "second.py": "raise OSError('no such file')\n"}
    install(monkeypatch, tmp_path, files, "first")
    first, second = Library(("first",), "first", ""), Library(("first",), "second", "")
    tried = []
    monkeypatch.setattr(
        library, "try_in_child", lambda module: tried.append(module) or ("broken" if module == "second" else None)
    )
    library.try_imports([first, second, first, Library(("absent",), "absent", "")])
    assert sorted(tried) == ["first", "second"]
    assert first.broken_because() is None
    assert sorted(tried) == ["first", "second"], "one that was imported without harm is not tried again"
    assert second.broken_because() == "second is installed but cannot be imported: broken"
    uninstall(files)


@pytest.mark.parametrize(
    ("text", "is_refusal"),
    [
        ("this flash-attn build has head_dim 64 and 128 only", True),
        ("FlashAttention only support fp16 and bf16 data type", True),
        ("CUDA error: an illegal memory access was encountered in flash_fwd_kernel, head 3", False),
        ("CUDA out of memory. Tried to allocate 2 GiB to support", False),
        ("expected a tensor", False),
    ],
)
def test_only_what_a_build_lacks_is_a_refusal(text, is_refusal):
    assert (library.refusal_of_build(RuntimeError(text)) is not None) == is_refusal
