"""Exceptions of a callable: it declines a case, or would end, skip or excuse its test, which is a fault of it."""

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import CodeType, FrameType, GetSetDescriptorType, NoneType, TracebackType, WrapperDescriptorType
from typing import NoReturn

from pytest_attn.processes.lifetime import replace_exits

# -- how a function declines a case: `raise NotImplementedError("no softcap")`, a statement of Python with a text ------------

#: libraries whose own NotImplementedError is a missing kernel or a missing gradient, which is a fault of who calls them
_FAULTS_OF = ("torch", "triton")
#: how torch says that it has no kernel for what `scaled_dot_product_attention` was asked, as for nested tensors and a mask
_NO_KERNEL = "No viable backend for scaled_dot_product_attention"


def message_of(error: BaseException) -> str:
    """Return what an exception says; "" where that raises another one."""
    try:
        return str(error)
    except Exception:
        return ""


def declined_because(error: BaseException) -> str | None:
    """Return the text with which a function declines a case, None where the exception is a fault.

    A fault is what torch or Triton raise ("Could not run 'aten::...'", a missing backward), and an exception without text,
    as a stub raises it. What torch says of attention that none of its kernels computes is a refusal.
    """
    if refused := refused_by_torch(error):
        return refused
    text = message_of(error).strip()
    if not isinstance(error, NotImplementedError) or not text or not _is_raised_by_its_author(error.__traceback__):
        return None
    return text.splitlines()[0]


def refused_by_torch(error: BaseException) -> str | None:
    """Return in which words torch has no kernel for what it was asked, None where the exception is another."""
    text = message_of(error).strip()
    return text.splitlines()[0] if isinstance(error, RuntimeError) and text.startswith(_NO_KERNEL) else None


def _is_raised_by_its_author(traceback: TracebackType | None) -> bool:
    """Return whether the innermost frame is a `raise`, and none of torch or Triton: operators in C++ raise without one."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code: CodeType = traceback.tb_frame.f_code
    operation = dis.opname[code.co_code[traceback.tb_lasti]]
    return operation == "RAISE_VARARGS" and _library_of(traceback.tb_frame) not in _FAULTS_OF


# -- what would end, skip or excuse the test ---------------------------------------------------------------------------


class EndsTestError(Exception):
    """An exception that would end, skip or excuse the test of what is judged: a fault of it, and the text says which.

    where: the file and line of it, "" where nobody knows.
    """

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where = where


class RemoteRaisedError(RuntimeError):
    """An exception that a kernel raised in another process, which the text names."""


#: exceptions of others, by the module and name of one of their classes, and as the text calls them
_ENDING = {
    ("builtins", "Skipped"): "pytest.skip",  # as pytest says of itself
    ("_pytest.outcomes", "XFailed"): "pytest.xfail",
    ("builtins", "Failed"): "pytest.fail",
    ("_pytest.outcomes", "Exit"): "pytest.exit",
    ("unittest.case", "SkipTest"): "unittest.SkipTest",
    ("hypothesis.errors", "UnsatisfiedAssumption"): "hypothesis.assume",
    ("builtins", "StopIteration"): "StopIteration",  # which ends a map() that calls it without a word
}
#: what interrupts any code for a person, or for a time limit: debuggers, pytest-timeout, the draws of Hypothesis, locks
_INTERRUPTS = ("pdb", "bdb", "cmd", "IPython", "pytest_timeout", "hypothesis")
#: modules of ours in whose frames an exception of ours is our own word, although a kernel, or what calls it, is further out
_OURS = ("pytest_attn.guests", "pytest_attn.session")
#: what our own calls go through
_BETWEEN = ("contextlib", "functools", "torch")
#: whose lines say little of a fault
_NOT_WHERE = ("pytest_attn", "_pytest", *_BETWEEN)


@contextmanager
def ending_no_test(name: str, calls: bool = True) -> Iterator[None]:
    """Surround what is judged: what would end, skip or excuse its test becomes an EndsTestError that names it.

    So does `os._exit`, and `os.execv`, in the thread that calls it. What a signal raises passes: Ctrl-C, and the time limits.

    calls: only what is judged is called inside, and exceptions of ours are not for it to raise.
    """
    try:
        with _staying(name):
            yield
    except BaseException as error:
        if (what := _ending(error, calls)) is None:
            raise
        said = message_of(error).strip().splitlines()
        own = [
            (frame.f_code.co_filename, line)
            for frame, line in walk_tb(error.__traceback__)
            if _library_of(frame) not in _NOT_WHERE
        ]
        where = "{}:{}".format(*own[-1]) if own else ""
        fault = EndsTestError(_fault(name, f"raised {what}{f' ({said[0]})' if said else ''}"), where)
        raise fault.with_traceback(error.__traceback__) from None


def _fault(name: str, did: str) -> str:
    return f"{name} {did}: a kernel cannot end, skip or excuse its test"


def _ending(error: BaseException, calls: bool) -> str | None:
    """Return what an exception is called that would end, skip or excuse a test and is of what is judged; None for others."""
    kind = type(error)
    if kind is EndsTestError:
        return None
    if kind.__module__.startswith("pytest_attn."):
        return f"pytest-attn's own {kind.__name__}" if calls and _is_foreign(error) else None
    if _says_its_class(kind):
        return f"{kind.__name__}, which says itself of which class it is"
    known = (_ENDING.get((one.__module__, one.__name__)) for one in kind.__mro__)
    what = next(filter(None, known), None if isinstance(error, Exception) else kind.__name__)
    return None if what not in (None, "hypothesis.assume") and _interrupts(error) else what


def _says_its_class(kind: type) -> bool:
    """Return whether exceptions of a class say themselves what they are, which pytest believes."""
    answers = (vars(one).get(name) for one in kind.__mro__ for name in ("__class__", "__getattribute__"))
    return any(type(one) not in (NoneType, WrapperDescriptorType, GetSetDescriptorType) for one in answers)


def _interrupts(error: BaseException) -> bool:
    """Return whether an exception is raised for a person, or for a time limit, and not by what is judged."""
    if isinstance(error, KeyboardInterrupt):
        return isinstance(error.__context__, KeyboardInterrupt) or not _is_raised_by_its_author(error.__traceback__)
    raisers = [frame for frame, _ in walk_tb(error.__traceback__) if _library_of(frame) != "_pytest"]
    home = str(raisers[-1].f_globals.get("__name__", "")) if raisers else ""
    return home.partition(".")[0] in _INTERRUPTS or home.startswith("pytest_attn.session")


def _is_foreign(error: BaseException) -> bool:
    """Return whether code that is not ours raised an exception of ours, or had ours raise it."""
    found = False
    for frame, _ in walk_tb(error.__traceback__):
        home = str(frame.f_globals.get("__name__", ""))
        is_true = getattr(sys.modules.get(home), "__dict__", None) is frame.f_globals
        library = home.partition(".")[0] if is_true else ""
        if library == "pytest_attn":
            found = found and not home.startswith(_OURS)
        elif library not in _BETWEEN:
            found = True
    return found


def _library_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


@contextmanager
def _staying(name: str) -> Iterator[None]:
    """Have what ends this process raise in this thread; another thread ends it with a status that is not 0."""
    thread: int | None = threading.get_ident()

    def leave(what: str, status: int, really: Callable[[int], NoReturn]) -> NoReturn:
        if thread is None:  # it was taken hold of, as by a module that was imported meanwhile
            really(status)
        if threading.get_ident() == thread:
            raise EndsTestError(_fault(name, f"called {what}"))
        really(status or 1)

    put_back = replace_exits(leave)
    try:
        yield
    finally:
        put_back()
        thread = None
