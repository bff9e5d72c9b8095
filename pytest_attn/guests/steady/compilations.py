"""Compilations while a kernel is called, as its compilers tell of them, each with the key that was new.

Torch lists its own, Triton calls a hook, and CUDA graphs, the CuTe DSL and NVRTC have a function that makes each. Compilers
that are programs, as TileLang's and FlashInfer's, are seen when Python starts them, by themselves or by a shell.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import dropwhile, pairwise
from typing import Any

#: module, what makes a kernel within it, and its name in words
_MAKERS = (
    ("torch.cuda", "CUDAGraph.capture_begin", "CUDA graph"),
    ("cutlass.cute", "compile", "CuTe DSL"),
    ("cuda.bindings.nvrtc", "nvrtcCompileProgram", "NVRTC"),
)
#: programs that compile, with what stands around their names; options that only ask them; and what comes before in a command
_PROGRAM = re.compile(r"(?:[\w.]+-)*(nvcc|ptxas|hipcc|ninja|c\+\+|g\+\+|gcc|cc|clang\+\+|clang)(?:-[\d.]+)?(?:\.exe)?")
_QUESTION = re.compile(r"--?(?:version|help(?:=.*)?|dump(?:full)?version|dump(?:machine|specs)|(?:print|list)-.*|[VEh])")
_NO_FILE = re.compile(r"-.+|\d+")  # as of 2>&1
_BEFORE = re.compile(
    r"\w+=.*|-.*|\d[\d.,]*[smhd]?|0x\w+|[A-Z_]+|if|then|else|do|while|until|!|\{\}?"
    r"|(?:.*/)?(?:env|exec|(?:io)?nice|time|timeout|nohup|setsid|stdbuf|taskset|sudo|xargs|parallel|s?ccache|distcc)"
)
#: among these what hands files to the command
_FEEDS = {"xargs", "parallel"}
_SHELL = re.compile(r"(?:ba|da|z|k)?sh")
#: what stands between the commands of a shell's text
_BETWEEN = "();<>|&`\n"
#: what stands around the reason that torch gives for compiling anew
_NOT_THE_REASON = re.compile(r"^\d+/\d+: | +#.*", re.DOTALL)
_DIVISIBLE = "divisible by 16"
#: what Python announces before it starts a program: which of what it tells is the command
_STARTS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1, "pty.spawn": 0}
#: those that this process has started since a watch has looked
_started: list[str] = []


class Watch:
    """Compilations since `taken` was last called, in words; of what is imported by then, as `renew` finds it."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._last_by_torch: object = None
        self.taken()
        self._replaced: dict[str, tuple[Any, str, Any]] = {}  # by module, whose attribute was what
        self._keys: dict[str, list[dict[str, str]]] = {}  # of each kernel of Triton

    def taken(self) -> list[str]:
        """Return what was compiled since, each once."""
        found = [*self._compiled_by_torch(), *self._found, *(f"{name} was started" for name in _started)]
        self._found.clear()
        _started.clear()
        return list(dict.fromkeys(found))

    def renew(self) -> None:
        """Watch compilers that were imported since, too."""
        for module, path, words in _MAKERS:
            if module in sys.modules and module not in self._replaced:
                self._watch_maker(module, path, words)
        if "triton" in sys.modules and "triton" not in self._replaced:
            self._watch_triton()

    def stop(self) -> None:
        """Put everything back."""
        for owner, name, was in self._replaced.values():
            setattr(owner, name, was)

    def _compiled_by_torch(self) -> Iterator[str]:
        """Yield the functions that torch has compiled since, and why anew."""
        utils = sys.modules.get("torch._dynamo.utils")
        made = utils.get_compilation_metrics() if utils else []
        last, self._last_by_torch = self._last_by_torch, made[-1] if made else None
        known = next((at for at, one in enumerate(made) if one is last), -1)
        for one in made[known + 1 :]:
            reason = _NOT_THE_REASON.sub("", getattr(one, "recompile_reason", None) or "")
            yield f"torch.compile of {one.co_name}{reason and f', {reason}'}"

    def _watch_maker(self, module: str, path: str, words: str) -> None:
        owner, _, name = path.rpartition(".")
        parent = getattr(sys.modules[module], owner, None) if owner else sys.modules[module]
        if (was := getattr(parent, name, None)) is not None:
            noted = _Noted(was, lambda: self._found.append(words))
            setattr(parent, name, (lambda *args, **kwargs: noted(*args, **kwargs)) if owner else noted)
            self._replaced[module] = parent, name, was

    def _watch_triton(self) -> None:
        """Take the hook that Triton calls after it has made a kernel; another one's is called as before."""
        runtime = getattr(getattr(sys.modules["triton"], "knobs", None), "runtime", None)
        owner, name = runtime, "jit_post_compile_hook"
        if runtime is None:  # before 3.4
            owner, name = sys.modules["triton.runtime.jit"].JITFunction, "compiled_hook"
        was = getattr(owner, name, None)

        def hook(*args: Any, **told: Any) -> Any:
            with suppress(Exception):  # what it tells differs between releases, and must not end the kernel's call
                self._by_triton(told)
            return was(*args, **told) if was else None

        setattr(owner, name, hook)
        self._replaced["triton"] = owner, name, was

    def _by_triton(self, told: Mapping[str, Any]) -> None:
        fn = told.get("fn")
        name = str(getattr(fn, "name", fn)).rpartition(".")[2]
        self._found.append(f"Triton's {name}")
        key, earlier = triton_key(getattr(fn, "jit_function", None), told.get("compile", {})), self._keys.setdefault(name, [])
        self._found[-1] += f", {difference_of(key, earlier)}"
        earlier.append(key)


class _Noted:
    """Something that is called, or indexed and then called; each call is noted."""

    def __init__(self, inner: Any, note: Callable[[], object]) -> None:
        self._inner, self._note = inner, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._inner(*args, **kwargs)

    def __getitem__(self, options: Any) -> _Noted:
        return _Noted(self._inner[options], self._note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def triton_key(function: Any, told: Mapping[str, Any]) -> dict[str, str]:
    """Return what a kernel of Triton was specialized on, by the names of its arguments."""
    names = [str(getattr(one, "name", one)) for one in getattr(function, "params", ())]

    def named(path: Any) -> str:
        place = path[0] if isinstance(path, tuple) and path else path
        return names[place] if isinstance(place, int) and place < len(names) else str(place)

    key = {named(path): str(kind) for path, kind in told.get("signature", {}).items()}
    for path, value in told.get("constants", {}).items():
        key[named(path)] = f"the constant {value}"
    for attributes in told.get("configs", ()):
        divisible = [path for path, of in dict(attributes).items() if "divisibility" in str(of)]
        key |= {named(path): f"{key.get(named(path), '')} {_DIVISIBLE}".strip() for path in divisible}
    return key


def difference_of(key: Mapping[str, str], earlier: list[dict[str, str]]) -> str:
    """Say what is new of a key, beside the most similar one before."""
    changes = [[name for name in {**key, **one} if key.get(name) != one.get(name)] for one in earlier]
    changed = min(changes, key=len, default=list(key))
    if not earlier or not changed:
        return "; ".join(f"{name}: {kind}" for name, kind in key.items()) or "anew"
    was = earlier[changes.index(changed)]
    return "; ".join(_changed(name, was.get(name, ""), key.get(name, "")) for name in changed)


def _changed(name: str, was: str, now: str) -> str:
    if was == f"{now} {_DIVISIBLE}":
        return f"{name} {_DIVISIBLE} no longer"
    return f"{name} is {now or 'missing'}, was {was or 'missing'}"


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch compilers within the block."""
    with suppress(ImportError):  # else a kernel that imports it later has compiled before it is watched
        importlib.import_module("triton")
    _note_programs()
    watch = Watch()
    try:
        yield watch
    finally:
        watch.stop()


@cache
def _note_programs() -> None:
    """Have Python note the compilers that it starts, for the rest of the process: no audit hook can be taken away."""

    def note(event: str, told: tuple[Any, ...]) -> None:
        if event in _STARTS:
            with suppress(Exception):
                _started.extend(compilers_in(told[_STARTS[event]]))

    sys.addaudithook(note)


def compilers_in(command: Any) -> list[str]:
    """Return the compilers that a command runs, by their names: words, or a text for a shell."""
    if isinstance(command, str | bytes | os.PathLike):
        return [name for words in _commands(os.fsdecode(command)) for name in compilers_in(words)]
    given = [*map(os.fsdecode, command)]
    words = list(dropwhile(_BEFORE.fullmatch, given))
    if not words:
        return []
    name = os.path.basename(words[0])
    if name == "find":
        return compilers_in(["xargs", *list(dropwhile(lambda word: not word.startswith("-exec"), words))[1:]])
    if _SHELL.fullmatch(name):
        scripts = (text for option, text in pairwise(words) if re.fullmatch(r"-\w*c", option))
        return compilers_in(next(scripts, ""))
    found = _PROGRAM.fullmatch(name)
    if not found or any(map(_QUESTION.fullmatch, words[1:])):
        return []
    is_build = found[1] == "ninja" and not {"-n", "-t"} & {*words}
    is_fed = bool(_FEEDS.intersection(map(os.path.basename, given[: -len(words)])))
    has_file = found[1] != "ninja" and (is_fed or not all(map(_NO_FILE.fullmatch, words[1:])))
    return [found[1]] if is_build or has_file else []


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell's text."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_BETWEEN)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words, is_file = list[str](), False
    for word in lexer:
        if not word or not set(word) <= set(_BETWEEN):
            words += [] if is_file else [word]
            is_file = False
        elif not (is_file := bool(re.fullmatch("[^(]*[<>][^(]*", word))):
            yield words
            words = []
    yield words
