"""A stand-in for cudnn 1.32's pygraph: it records sdpa and sdpa_backward and computes them with torch at execute."""

from enum import Enum

import torch

from fakes.attention import attention

#: streams that set_stream was given
streams = []
#: (name of the operation, its arguments) of every graph that was built
built = []


class DataType(Enum):
    HALF = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT = "float32"
    INT32 = "int32"


class HeurMode(Enum):
    A = 0
    FALLBACK = 1


class DiagonalAlignment(Enum):
    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class GraphNotSupportedError(RuntimeError):
    pass


def create_handle():
    return object()


def set_stream(handle, stream):
    streams.append(stream)


class _Tensor:
    def __init__(self, dim=None, stride=None, data_type=None, is_output=False):
        self.dim, self.stride, self.data_type, self.is_output = dim, stride, data_type, is_output

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, value):
        self.dim = value
        return self

    def set_stride(self, value):
        self.stride = value
        return self

    def set_data_type(self, value):
        self.data_type = value
        return self


class Graph:
    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type is compute_data_type is DataType.FLOAT
        self._is_checked = self._is_built = False

    def tensor(self, dim, stride=None, data_type=None, name=""):
        return _Tensor(dim, stride, data_type)

    def sdpa(self, q, k, v, attn_scale=1.0, generate_stats=None, **options):
        self._operation, self._inputs, self._options = "sdpa", {"q": q, "k": k, "v": v}, _Options(attn_scale, **options)
        self._outputs = {"out": _Tensor(), **({"stats": _Tensor()} if generate_stats else {})}
        return [self._outputs["out"], self._outputs.get("stats")]

    def sdpa_backward(self, q, k, v, o, dO, stats, attn_scale=1.0, **options):
        self._operation, self._options = "sdpa_backward", _Options(attn_scale, **options)
        self._inputs = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        self._outputs = {"dq": _Tensor(), "dk": _Tensor(), "dv": _Tensor()}
        return list(self._outputs.values())

    def validate(self):
        self._options.validate(*self._inputs["q"].dim[2:], *self._inputs["v"].dim[2:])
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


class _Options:
    def __init__(
        self,
        attn_scale,
        bias=None,
        use_padding_mask=False,
        seq_len_q=None,
        seq_len_kv=None,
        diagonal_alignment=DiagonalAlignment.TOP_LEFT,
        diagonal_band_left_bound=None,
        diagonal_band_right_bound=None,
    ):
        self.scale, self.bias, self.padded = attn_scale, bias, use_padding_mask
        self.lens_q, self.lens_kv = seq_len_q, seq_len_kv
        self.bottom_right = diagonal_alignment is DiagonalAlignment.BOTTOM_RIGHT
        self.left, self.right = diagonal_band_left_bound, diagonal_band_right_bound

    def validate(self, rows, dim, keys, value_dim):
        if dim % 8 or value_dim % 8:
            raise GraphNotSupportedError("hidden_dim should be multiple of 8")
        if self.bottom_right and self.right is not None and not self.padded and rows > keys:
            raise GraphNotSupportedError("Bottom right causal mask does not support max_s_q > max_s_kv.")
        if self.bottom_right and self.right is not None and self.bias is not None:
            raise GraphNotSupportedError("Bottom right causal mask is only supported with is_bias=False.")
        if self.left is not None and not self.padded and rows > keys:
            raise GraphNotSupportedError("Sliding window attention is only supported with max_s_q <= max_s_kv.")

    def visible(self, rows, keys, length):
        i, j = torch.arange(rows)[:, None], torch.arange(keys)[None]
        diagonal = i + (length - rows if self.bottom_right else 0)
        seen = (j < length).expand(rows, keys)
        if self.right is not None:
            seen = seen & ~(j > diagonal + self.right)  # columns beyond row + right_bound are masked
        if self.left is not None:
            seen = seen & ~(j <= diagonal - self.left)  # columns at or before row - left_bound are masked
        return seen


def _forward(given, options, tensors):
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    lens = tensors[options.lens_kv].flatten().tolist() if options.padded else [k.shape[1]] * len(k)
    if options.padded:
        assert tensors[options.lens_q].flatten().tolist() == [q.shape[1]] * len(q)
    outs, stats = [], []
    for b, length in enumerate(lens):
        bias = tensors[options.bias][b % tensors[options.bias].shape[0]] if options.bias else None
        seen = options.visible(q.shape[1], k.shape[1], length)
        out, lse = attention(*(t[b : b + 1] for t in (q, k, v)), scale=options.scale, bias=bias, visible=seen)
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
