"""Backends by name: torch's and guests', loaded when first asked for, those that users add, and their variants; as tables."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import itemgetter
from pkgutil import resolve_name
from typing import Any

from pytest_attn.backends.backend import Backend, FunctionBackend, LibraryBackend
from pytest_attn.backends.capabilities import COLUMNS
from pytest_attn.backends.compilers import compilers_of
from pytest_attn.backends.configured import Declared, Options, joined, options_of, split
from pytest_attn.backends.declaration import Declaration
from pytest_attn.backends.library import try_imports
from pytest_attn.backends.machine import Machine
from pytest_attn.backends.named import NamedFunction, is_name
from pytest_attn.backends.precision import DEFAULT, Precision, precision_named
from pytest_attn.backends.subject import CallableSubject, Dequantizer, Subject
from pytest_attn.backends.variants import Compiled, Graphed
from pytest_attn.seam import added, guests
from pytest_attn.workloads.catalog import Catalog
from pytest_attn.workloads.fields import did_you_mean
from pytest_attn.workloads.functions import describe, parameters_of, printable
from pytest_attn.workloads.workload import Workload

VARIANTS = ("compile", "max_autotune", "graph")
_HERE = "pytest_attn.backends"
#: torch's own; in tables and in "all" those of guests follow
TORCH = {
    "math": f"{_HERE}.sdpa:Math",
    "eager": f"{_HERE}.eager:Eager",
    "sdpa": f"{_HERE}.sdpa:Automatic",
    "sdpa_flash": f"{_HERE}.sdpa:Flash",
    "sdpa_efficient": f"{_HERE}.sdpa:Efficient",
    "sdpa_cudnn": f"{_HERE}.sdpa:Cudnn",
    "sdpa_fa3": f"{_HERE}.sdpa:SdpaFa3",
    "sdpa_fa4": f"{_HERE}.sdpa:SdpaFa4",
    "varlen": f"{_HERE}.sdpa:Varlen",
    "kv_cache": f"{_HERE}.sdpa:KvCache",
    "flex": f"{_HERE}.flex:Flex",
    "flex_flash": f"{_HERE}.flex:FlexFlash",
    "flex_decode": f"{_HERE}.flex:FlexDecode",
}
#: and after those
APPROXIMATE = {"int8_dynamic": f"{_HERE}.eager:Int8Dynamic"}


class Registry:
    """Backends by name. `names` lists them without importing any. named: makes what stands for "module:function"."""

    def __init__(self, named: Callable[[str], NamedFunction] = NamedFunction) -> None:
        self.function_named = cache(named)
        self._loaders: dict[str, Callable[[], Backend]] = {}
        self._loaded: dict[str, Backend] = {}
        self._aliases = added("aliases")
        #: by the names of backends that nobody added, the argument of the marker attention whose tests take them, or ""
        self._arguments: dict[str, str] = {}
        #: by what stands before the colon, the whole name as it is shown ("hub:REPO"), and the class
        self._families: dict[str, tuple[str, str]] = {}
        of_guests = (one for guest in guests() for one in guest.backends.items())
        for argument, backends in sorted([("", TORCH), *of_guests, ("", APPROXIMATE)], key=itemgetter(0)):
            for name, cls in backends.items():
                if ":" in name:
                    self._families[name.partition(":")[0]] = name, cls
                else:
                    self._require_free(name)
                    self._arguments[name], self._loaders[name] = argument, partial(_made, cls)

    def argument_of(self, name: str) -> str:
        """Return the argument of the marker attention whose tests take a backend, "" for tests without any of a guest's.

        Loads only those that users added.
        """
        base = split(self.canonical(name))[0].partition("+")[0]
        is_added = base in self._loaders and base not in self._arguments
        return self[base].argument if is_added else self._arguments.get(base, "")

    def is_own(self, name: str) -> bool:
        """Return whether a backend is a user's, and neither torch's nor a guest's."""
        base = split(self.canonical(name))[0].partition("+")[0]
        return base not in self._arguments and (base in self._loaders or self._names_function(base))

    @property
    def families(self) -> list[tuple[str, str]]:
        """Names with a part that users fill in, as they are shown ("hub:REPO"), and what they stand for."""
        return [(shown, resolve_name(cls).stands_for) for shown, cls in self._families.values()]

    @property
    def names(self) -> list[str]:
        """Every registered name, without the variants."""
        return list(self._loaders)

    def add(self, backend: Backend) -> None:
        """Register a backend of your own; raise ValueError where it is none, or its name is taken or not a plain word."""
        if not isinstance(backend, Backend):
            raise ValueError(f"add takes an instance of pytest_attn.Backend, got {backend!r}; add_function takes functions")
        self._require_free(getattr(backend, "name", None))
        self._loaders[backend.name] = lambda: backend

    def add_function(
        self,
        name: str,
        fn: Callable[..., Any] | str,
        *,
        layout: str = "bhsd",
        precision: str | Precision | None = None,
        unsupported_because: Callable[[Workload], Sequence[str]] | None = None,
        configurations: Declared = (),
    ) -> None:
        """Register `fn(q, k, v, workload=workload) -> out` under `name`.

        fn: or its name, "module:function", by which it is imported when it is first called.
        layout: "bhsd" or "bshd", in which fn takes and returns tensors. precision: the rounding that it declares.
        unsupported_because: a function of the workload that returns reasons to refuse it, none where fn claims it.
        configurations: what --attn-tune tries, each handed to fn as further keyword arguments. {option: values} stands for
        every combination. A list of {option: value} or triton.Config, and a function of the workload that returns one, also
        do.
        """
        if isinstance(fn, str) and is_name(fn):
            fn = self.function_named(fn)
        if not callable(fn):
            raise ValueError(f"backend {name!r}: fn must be a function of (q, k, v, workload), got {fn!r}")
        taken = None if isinstance(fn, str | NamedFunction) else parameters_of(fn)
        if taken is not None and not any(one.name == "workload" or one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise ValueError(f"backend {name!r}: fn must be a function of (q, k, v, workload), got {fn!r} without it")
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f"backend {name!r}: layout must be 'bhsd' or 'bshd', got {layout!r}")
        try:
            backend = FunctionBackend(name, fn, layout, precision, unsupported_because, configurations)
        except ValueError as error:
            raise ValueError(f"backend {name!r}: {error}") from None
        self.add(backend)

    def _require_free(self, name: object) -> None:
        if not isinstance(name, str):
            raise ValueError(f"a backend must have a name, text without spaces, got {name!r}")
        if name in ("all", "available"):
            raise ValueError(f"backend name {name!r} means a selection in --attn-backends; rename yours")
        if not name.replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"backend name {name!r} must consist of letters, digits, underscores and dots")
        if name in self._loaders:
            raise ValueError(f"two backends are named {name!r}; rename one")
        if name in self._aliases:
            raise ValueError(f"backend name {name!r} is an alias of {self._aliases[name]!r}; rename yours")

    def __getitem__(self, name: str) -> Backend:
        """Return a backend, by its name or an alias, or a variant ("sdpa+compile"); raise ValueError for an unknown one."""
        if name not in self._loaded:
            self.require(name)
            name = self.canonical(name)
        if name not in self._loaded:
            base, _, variant = name.partition("+")
            backend = self._load(base)
            if variant:
                backend = backend.variant(variant) or (Graphed(backend) if variant == "graph" else Compiled(backend, variant))
            backend.compiles = backend.compiles or bool(compilers_of(name))
            self._loaded[name] = backend
        return self._loaded[name]

    def subject(
        self,
        target: Callable[..., Any] | Backend | str,
        name: str | None = None,
        declared: Declaration = Declaration(),
        within: str = "",
        dequantized: Dequantizer | None = None,
    ) -> Subject:
        """Return what is tested behind its one type: a backend as it is or by its name, or a callable of (q, k, v).

        target: a callable may be named, "module:function".
        name: what reports call a callable. declared: what its test says of it; a backend says it itself. within: the
        qualified name of that test. dequantized: what a callable that quantizes makes of q, k and v.
        Raises ValueError for an unknown backend, TypeError for what is none of the three, and for a name that is none.
        """
        __tracebackhide__ = True
        if name is not None and not (isinstance(name, str) and name.strip() and "|" not in name):
            raise TypeError(f"name must be a text without '|', got {name!r}")
        if isinstance(target, str):
            target = self.function_named(target) if self._names_function(target) else self[target]
        if isinstance(target, Backend):
            if dequantized is not None:
                raise TypeError("dequantized says what a callable makes of q, k and v; a backend says it itself")
            if (shown := printable(target.name)) != target.name:
                target = copy.copy(target)
                target.name = shown
            return target
        if isinstance(target, type):
            name = target.__name__
            said = f"pass {name}.apply if it is an autograd Function, otherwise an instance"
            raise TypeError(f"needs a callable of (q, k, v), got the class {name}; {said}")
        if not callable(target):
            meant = "; pass the function, do not call it" if hasattr(target, "dtype") else ""
            raise TypeError(f"needs a callable of (q, k, v), a backend or a backend's name, got {describe(target)}{meant}")
        subject = CallableSubject(target, name, declared, within)
        return subject if dequantized is None else subject.quantizing(dequantized)

    def _names_function(self, target: object) -> bool:
        """Return whether a text is "module:function", and no backend of a family."""
        return isinstance(target, str) and is_name(target) and target.partition(":")[0] not in self._families

    def canonical(self, name: str) -> str:
        """Return the name that an alias stands for; other names as they are."""
        base, plus, variant = name.partition("+")
        plain, label = split(base)
        if plain in self._loaders:
            return name
        return "".join((self._aliases.get(plain, plain), f"@{label}" if label else "", plus, variant))

    def require(self, name: str) -> None:
        """Raise ValueError unless `name` is registered, without loading it."""
        base, plus, variant = self.canonical(name).partition("+")
        base, label = split(base)
        prefix, colon, rest = base.partition(":")
        is_of_family = prefix in self._families and rest and printable(rest) == rest
        if base not in self._loaders and not is_of_family and not self._names_function(base):
            if colon and prefix in self._families and not rest:
                raise ValueError(f"backend {base!r} names nothing after the colon; expected {self._families[prefix][0]}")
            meant = did_you_mean(base, self._loaders)
            known = ", ".join([*self._loaders, *(shown for shown, _ in self._families.values())])
            raise ValueError(f"unknown backend {base!r};{meant} known: {known}")
        if plus and variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r} of backend {base!r}; known: {', '.join(VARIANTS)}")
        if label:
            _configured(self[base], options_of(label))

    def require_tunable(self, name: str) -> None:
        """Raise ValueError for a backend that is not registered, names a configuration already, or declares none."""
        self.require(name)
        plain, label = split(self.canonical(name))
        if label:
            raise ValueError(f"{name!r} is one configuration; name the backend alone: {plain}")
        if not _has_configurations(self[plain.partition("+")[0]]):
            known = [one for one in self.names if _has_configurations(self[one])]
            raise ValueError(
                f"backend {name!r} declares no configurations; those that do: {', '.join(known) or 'none'}."
                " One of yours does with registry.add_function(name, fn, configurations=...)"
            )

    def is_known(self, name: str) -> bool:
        """Return whether `require` would let the name pass."""
        try:
            self.require(name)
        except ValueError:
            return False
        return True

    def _load(self, base: str) -> Backend:
        plain, label = split(base)
        if label:
            return _configured(self[plain], options_of(label))
        if base in self._loaders:
            return self._loaders[base]()
        if self._names_function(base):
            return FunctionBackend(base, self.function_named(base))
        prefix, _, rest = base.partition(":")
        return _made(self._families[prefix][1], rest)


def _configured(backend: Backend, options: Options) -> Backend:
    """Return the backend under options; raise ValueError for an option that it does not have."""
    known = backend.tunable
    unknown = [name for name in options if known is not None and name not in known]
    if unknown and not known:
        raise ValueError(f"backend {backend.name!r} has no configurations, got {unknown[0]}={options[unknown[0]]}")
    if unknown:
        raise ValueError(f"backend {backend.name!r} has no option {unknown[0]!r}; known: {', '.join(sorted(known or ()))}")
    made = copy.copy(backend)
    made.name, made.configuration = joined(backend.name, options), dict(options)
    return made


def _has_configurations(backend: Backend) -> bool:
    return backend.tunable is None or bool(backend.tunable)


def _made(cls: str, *arguments: str) -> Backend:
    backend: Backend = resolve_name(cls)(*arguments)
    return backend


Row = tuple[str, ...]
Table = tuple[Row, list[Row]]


def tables(registry: Registry, catalog: Catalog, machine: Machine) -> tuple[Table, ...]:
    """Return three tables, each a header and its rows: status of backends, what they can do, workloads."""
    return status_table(registry, machine), capability_table(registry), workload_table(catalog)


def status_table(registry: Registry, machine: Machine) -> Table:
    """Return which backend is available on the machine, and why the others are not; tries the libraries out at once."""
    backends = [registry[name] for name in registry.names]
    try_libraries([one for one in backends if _answer_of(partial(one.unavailable_because, machine)) is None])
    rows: list[Row] = []
    for backend in backends:
        reason, version = status_of(backend, machine)
        variants = " ".join(f"+{variant}" for variant in backend.variants)
        rows.append((backend.name, version, variants or "-", reason or "available"))
    rows += [(family, "-", "-", f"{about}; by name only, no part of all") for family, about in registry.families]
    return ("backend", "version", "variants", "status"), rows


def try_libraries(backends: Iterable[Backend]) -> None:
    """Try to import the libraries of backends that are there, all at once, each in a process of its own."""
    try_imports([backend.source for backend in backends if isinstance(backend, LibraryBackend)])


def capability_table(registry: Registry) -> Table:
    """Return what each backend can do, wherever it runs; --attn-list shows it."""
    rows = []
    for name in registry.names:
        backend = registry[name]
        if backend.capabilities is not None:
            kind = "approximate" if backend.is_approximate else precision_named(backend.precision or DEFAULT).name
            rows.append((name, backend.needs, kind, *backend.capabilities.row()))
    return ("backend", "needs", "precision", *COLUMNS), rows


def workload_table(catalog: Catalog) -> Table:
    """Return the workloads, with their shapes and where these come from."""
    rows: list[Row] = [(e.workload.id, e.group, e.workload.shape_id, e.source) for e in catalog]
    return ("workload", "group", "shape", "source"), rows


def status_of(backend: Backend, machine: Machine) -> tuple[str | None, str]:
    """Return why a backend is not available, or None, and its version."""
    reason = _answer_of(lambda: backend.unavailable_because(machine) or backend.broken_because())
    return reason, "-" if reason else _answer_of(backend.version) or "-"


def _answer_of(question: Callable[[], str | None]) -> str | None:
    """Ask a backend something; a fault of its own code is an answer as well, and harms no other."""
    try:
        return question()
    except Exception as error:
        return f"cannot be queried: {type(error).__name__}: {error}"
