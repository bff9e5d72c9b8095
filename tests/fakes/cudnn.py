"""A stand-in for cudnn 1.32's pygraph: it records sdpa and sdpa_backward and computes them with torch at execute."""

from enum import Enum
from types import SimpleNamespace

import torch

from fakes.attention import attention
from fakes.signatures import row

#: streams that set_stream was given
streams = []
#: (name of the operation, its arguments) of every graph that was built
built = []


DataType = Enum("DataType", {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "INT32": "int32"})
HeurMode = Enum("HeurMode", ["A", "FALLBACK"])
DiagonalAlignment = Enum("DiagonalAlignment", ["TOP_LEFT", "BOTTOM_RIGHT"])


class GraphNotSupportedError(RuntimeError):
    pass


def create_handle():
    return object()


def set_stream(handle, stream):
    streams.append(stream)


class _Tensor:
    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.data_type = dim, stride, data_type

    def __getattr__(self, name):
        return lambda value: setattr(self, name.removeprefix("set_"), value) or self


class Graph:
    @row("cudnn", "__init__")
    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type is compute_data_type is DataType.FLOAT
        self._is_checked = self._is_built = False

    def tensor(self, dim, stride=None, data_type=None, name=""):
        return _Tensor(dim, stride, data_type)

    @row("cudnn", "sdpa")
    def sdpa(self, q, k, v, generate_stats, **options):
        self._operation, self._inputs, self._options = "sdpa", {"q": q, "k": k, "v": v}, SimpleNamespace(**options)
        self._outputs = {"out": _Tensor(), **({"stats": _Tensor()} if generate_stats else {})}
        return [self._outputs["out"], self._outputs.get("stats")]

    @row("cudnn", "sdpa_backward")
    def sdpa_backward(self, q, k, v, o, dO, stats, **options):
        self._operation, self._options = "sdpa_backward", SimpleNamespace(**options)
        self._inputs = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        self._outputs = {"dq": _Tensor(), "dk": _Tensor(), "dv": _Tensor()}
        return list(self._outputs.values())

    def validate(self):
        _validate(self._options, *self._inputs["q"].dim[2:], *self._inputs["v"].dim[2:])
        if self._operation == "sdpa_backward" and self._inputs["q"].dim[2] == self._inputs["v"].dim[2] == 1:
            raise GraphNotSupportedError("s_q = s_kv = 1 is not supported.")
        assert all(t.stride[-1] == 1 for t in (*self._inputs.values(), *self._outputs.values()))

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, modes):
        assert modes == [HeurMode.A, HeurMode.FALLBACK]

    def check_support(self):
        self._is_checked = True

    def build_plans(self):
        assert self._is_checked
        built.append((self._operation, self._options))
        self._is_built = True

    def get_workspace_size(self):
        return 0

    def execute(self, tensors, workspace, handle=None):
        assert self._is_built
        assert streams[-1] == 7
        for described, data in tensors.items():
            assert tuple(described.dim) == data.shape
            assert tuple(described.stride) == data.stride()
            assert described.data_type.value == str(data.dtype).removeprefix("torch.")
            assert not data.requires_grad  # DLPack refuses tensors that require a gradient
        given = {name: tensors[t] for name, t in self._inputs.items()}
        compute = _forward if self._operation == "sdpa" else _backward
        results = compute(given, self._options, tensors)
        for name, described in self._outputs.items():
            tensors[described].copy_(results[name])


def _validate(options, rows, dim, keys, value_dim):
    is_bottom_right = options.diagonal_alignment is DiagonalAlignment.BOTTOM_RIGHT
    causal = is_bottom_right and options.diagonal_band_right_bound is not None
    is_longer = rows > keys and not options.use_padding_mask
    for is_against, words in (
        (dim % 8 or value_dim % 8, "hidden_dim should be multiple of 8"),
        (causal and is_longer, "Bottom right causal mask does not support max_s_q > max_s_kv."),
        (causal and options.bias is not None, "Bottom right causal mask is only supported with is_bias=False."),
        (
            options.diagonal_band_left_bound is not None and is_longer,
            "Sliding window attention is only supported with max_s_q <= max_s_kv.",
        ),
    ):
        if is_against:
            raise GraphNotSupportedError(words)


def _visible(options, rows, keys, length):
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
    left, right = options.diagonal_band_left_bound, options.diagonal_band_right_bound
    diagonal = i + (length - rows if options.diagonal_alignment is DiagonalAlignment.BOTTOM_RIGHT else 0)
    seen = (j < length).expand(rows, keys)
    if right is not None:
        seen = seen & ~(j > diagonal + right)  # columns beyond row + right_bound are masked
    if left is not None:
        seen = seen & ~(j <= diagonal - left)  # columns at or before row - left_bound are masked
    return seen


def _forward(given, options, tensors):
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    padded = options.use_padding_mask
    lens = tensors[options.seq_len_kv].flatten().tolist() if padded else [k.shape[1]] * len(k)
    assert not padded or tensors[options.seq_len_q].flatten().tolist() == [q.shape[1]] * len(q)
    outs, stats = [], []
    for b, length in enumerate(lens):
        bias = tensors[options.bias][b % tensors[options.bias].shape[0]] if options.bias else None
        seen = _visible(options, q.shape[1], k.shape[1], length)
        out, lse = attention(*(t[b : b + 1] for t in (q, k, v)), scale=options.attn_scale, bias=bias, visible=seen)
        outs.append(out)
        stats.append(lse)
    return {"out": torch.cat(outs).transpose(1, 2), "stats": torch.cat(stats)[..., None]}


def _backward(given, options, tensors):
    leaves = {name: given[name].clone().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        made = _forward(leaves, options, tensors)
        gradients = torch.autograd.grad(made["out"], list(leaves.values()), given["dO"])
    assert torch.equal(made["stats"], given["stats"])
    assert torch.equal(made["out"], given["o"])
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


#: as the library spells them
data_type, heur_mode, diagonal_alignment, pygraph = DataType, HeurMode, DiagonalAlignment, Graph
cudnnGraphNotSupportedError = GraphNotSupportedError  # noqa: N816
