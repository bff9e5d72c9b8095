"""The tensors of a workload beside q, k and v that may be trained: sinks, the bias, ALiBi's slopes."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pytest_attn.workloads.workload import Workload


class Parameter(NamedTuple):
    """One of them."""

    name: str  # of the workload's field
    tensor: str  # the field of its inputs
    #: along which of batch, heads, rows and keys ("b", "h", "q", "k") it differs; its gradient is summed over the others
    dims: Callable[[Workload], str]
    dtype: Callable[[Workload], str]  # of the tensor and its gradient
    is_of_heads: bool = True  # it is one number for each head
    is_in_scores: bool = True  # it is added to scores, so that a score_mod may follow, whose slope nobody knows

    def shape(self, w: Workload) -> tuple[int, int, int, int]:
        """Return the shape of its gradient as it is compared: 1 in place of what it is summed over."""
        sizes = {"b": w.batch, "h": w.heads, "q": w.q_len, "k": w.kv_len}
        b, h, q, k = (size if dim in self.dims(w) else 1 for dim, size in sizes.items())
        return b, h, q, k


#: the tensors that every workload has, and whose gradients backward=True asks for
LEAVES = ("q", "k", "v")
#: by name
PARAMETERS = {
    one.name: one
    for one in (
        Parameter(
            "sinks",
            "sinks",
            dims=lambda w: "h",
            dtype=lambda w: w.sinks_dtype,
            is_in_scores=False,
        ),
        Parameter("bias", "bias", lambda w: str(w.bias), lambda w: w.bias_dtype or w.out_dtype, is_of_heads=False),
        Parameter("alibi", "alibi_slopes", dims=lambda w: "bh" if w.alibi == "batch" else "h", dtype=lambda w: w.out_dtype),
    )
}


def parameters_of(workload: Workload, among: Iterable[str] = tuple(PARAMETERS)) -> list[str]:
    """Return which of these parameters a workload has whose gradient is known: not before a score_mod, nor of a number."""
    known = [one.name for one in PARAMETERS.values() if workload.score_mod is None or not one.is_in_scores]
    if workload.fixed_sink is not None:
        known.remove("sinks")
    return [name for name in among if name in known and getattr(workload, name)]


def asked_gradients(backward: object, workloads: Sequence[Workload]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return of which of q, k and v, and of which parameters, `backward` asks for gradients: True or False, or their names.

    Raises ValueError for another name, and for a parameter that no workload has; workloads: none where any may come.
    """
    if backward is None or isinstance(backward, bool | int):
        return LEAVES if backward else (), ()
    names = _gradient_names(backward)
    leaves, wanted = (tuple(name for name in known if name in names) for known in (LEAVES, PARAMETERS))
    there = {name for workload in workloads for name in parameters_of(workload)}
    if workloads and (missing := [name for name in wanted if name not in there]):
        raise ValueError(f"backward asks for a gradient of {missing[0]}, and no workload has {missing[0]}")
    return leaves, wanted


def _gradient_names(backward: object) -> tuple[str, ...]:
    """Return the names of a list or tuple. Raises ValueError where it is none, is empty, or has another name."""
    names = tuple(map(str, backward)) if isinstance(backward, list | tuple) else ()
    known = (*LEAVES, *PARAMETERS)
    if not names or not set(names).issubset(known):
        shown = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"backward must be True, False, or a tuple of {shown}, got {backward!r}")
    return names
