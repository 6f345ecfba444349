"""Every rule against numbers: the operator on slices of cut tensors, rank by rank, beside the operator on whole ones.

A case is a function of tensors. Each leaf of its inputs is cut in turn; where the simulation says that it can be, the
function is run on every rank's slices, and what comes out must be the slice, or the part of the sum, that was promised.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensor_parallel.layout import spread
from tensor_parallel.layout.tensors import take
from tensor_parallel.planner.effects import infer
from tensor_parallel.planner.graph import Graph
from tensor_parallel.planner.index_types import leaves, normal_form
from tensor_parallel.planner.rules import DEFAULT_RULES
from tensor_parallel.planner.simulate import Fails, Simulation
from tensor_parallel.planner.trace import trace

aten = torch.ops.aten
D = torch.float64
IDS = torch.tensor([[0, 3, 2], [5, 1, 1]])

# name -> (function, shapes of its inputs, how many leaves can be cut)
CASES = {
    # contractions
    "linear": (F.linear, [(2, 3, 6), (4, 6)], 4),
    "linear with bias": (F.linear, [(5, 6), (4, 6), (4,)], 3),
    "linear of a vector": (F.linear, [(6,), (4, 6)], 2),
    "linear into segments": (lambda x, w, v: F.linear(F.linear(x, w).chunk(2, -1)[0], v), [(5, 6), (8, 6), (3, 4)], 3),
    "matmul": (lambda a, b: a @ b, [(5, 6), (6, 4)], 3),
    "batched matmul": (lambda a, b: a @ b, [(3, 5, 6), (3, 6, 4)], 4),
    "broadcast matmul": (lambda a, b: a @ b, [(2, 3, 5, 6), (3, 6, 4)], 5),
    "matmul over ones": (lambda a, b: a @ b, [(2, 1, 5, 6), (3, 6, 4)], 5),
    "matmul with a vector": (lambda a, b: a @ b, [(2, 5, 6), (6,)], 3),
    "vector with matmul": (lambda a, b: a @ b, [(6,), (2, 6, 5)], 3),
    "dot": (aten.dot, [(6,), (6,)], 1),
    "mv": (aten.mv, [(5, 6), (6,)], 2),
    "mm": (aten.mm, [(5, 6), (6, 4)], 3),
    "bmm": (aten.bmm, [(3, 5, 6), (3, 6, 4)], 4),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(4,), (5, 6), (6, 4)], 3),
    "addmm of rows": (torch.addmm, [(5, 1), (5, 6), (6, 4)], 3),
    "baddbmm": (torch.baddbmm, [(3, 5, 4), (3, 5, 6), (3, 6, 4)], 4),
    "einsum": (lambda a, b: torch.einsum("bthd,bshd->bhts", a, b), [(2, 3, 4, 5), (2, 6, 4, 5)], 5),
    "embedding": (lambda w: F.embedding(IDS, w), [(6, 4)], 1),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 6, 5), (4, 6, 3), (4,)], 3),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), [(2, 6, 5, 5), (4, 6, 3, 2)], 3),
    "conv without a batch": (F.conv2d, [(6, 5, 5), (4, 6, 3, 2)], 2),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), [(2, 6, 4, 4), (6, 1, 3, 3)], 2),
    "depthwise, doubled": (lambda x, w: F.conv1d(x, w, groups=x.shape[1]), [(2, 6, 4), (12, 1, 3)], 2),
    "grouped": (lambda x, w: F.conv1d(x, w, groups=x.shape[1] // 2), [(2, 6, 4), (9, 2, 3)], 2),
    "transposed": (F.conv_transpose2d, [(2, 6, 4, 4), (6, 4, 2, 2), (4,)], 3),
    "transposed and grouped": (
        lambda x, w: F.conv_transpose1d(x, w, groups=x.shape[1] // 2),
        [(2, 6, 4), (6, 5, 2)],
        2,
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [(2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6)],
        4,
    ),
    "attention of groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 6, 3, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
        5,
    ),
    "attention with a learned mask": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m),
        [(2, 4, 3, 8), (2, 4, 3, 8), (4, 3, 3)],
        3,
    ),
    "attention, one key head": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        [(2, 4, 3, 8), (2, 1, 5, 8)],
        3,
    ),
    "attention, one query": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        [(1, 4, 3, 8), (2, 4, 5, 8)],
        3,
    ),
    # pointwise
    "add": (lambda a, b: a + 2 * b, [(5, 6), (6,)], 2),
    "add over ones": (lambda a, b: torch.sub(a, b, alpha=3), [(5, 1, 6), (4, 6)], 3),
    "add a number": (lambda a: a + 1, [(5, 6)], 2),
    "mul": (lambda a, b: a * b, [(5, 6), (5, 1)], 2),
    "neg": (lambda a: -a * 2, [(5, 6)], 2),
    "div": (lambda a, b: a / b / 3, [(5, 6), (6,)], 2),
    "div with rounding": (lambda a, b: torch.div(a, b, rounding_mode="floor"), [(5, 6), (6,)], 2),
    "gelu": (F.gelu, [(5, 6)], 2),
    "where": (lambda a, b: torch.where(a > 0, a, b), [(5, 6), (6,)], 2),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3).clamp(min=0), [(5, 6), (5, 6)], 2),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 0.0), [(5, 6)], 2),
    "masked_fill with a value": (lambda a, b: a.masked_fill(b > 0, 2.0), [(5, 6), (6,)], 2),
    "dropout": (lambda a: F.dropout(a, 0.5, False), [(5, 6)], 2),
    "zeros_like": (lambda a: torch.zeros_like(a) + torch.ones_like(a) + torch.full_like(a, 3.0), [(5, 6)], 2),
    "empty_like": (lambda a: torch.empty_like(a).fill_(2) * a, [(5, 6)], 0),
    "add_": (lambda a, b: (a * 1).add_(b).mul_(2), [(5, 6), (6,)], 2),
    # views
    "identity": (lambda a: a.detach().clone().contiguous(), [(5, 6)], 2),
    "alias": (aten.alias, [(5, 6)], 2),
    "lift_fresh": (lambda a: aten.lift_fresh(a * 1), [(5, 6)], 2),
    "to float": (lambda a: a.to(torch.float32), [(5, 6)], 2),
    "to integers": (lambda a: (a * 9).to(torch.int64), [(5, 6)], 2),
    "to other bits": (lambda a: a.detach().view(torch.int64), [(5, 6)], 2),
    "to fewer bits": (lambda a: a.detach().view(torch.int32), [(5, 6)], 1),
    "flatten": (lambda a: a.flatten(1), [(5, 6, 4)], 3),
    "unflatten": (lambda a, r: a.unflatten(-1, r.shape) * r, [(5, 12), (3, 4)], 3),
    "reshape through": (lambda a, r: a.reshape(a.shape[0], -1, r.shape[0]) * r, [(5, 4, 6), (2,)], 4),
    "reshape across": (lambda a, r: a.reshape(-1, r.shape[0]) * r, [(5, 6), (3,)], 3),
    "_unsafe_view": (lambda a: aten._unsafe_view(a.contiguous(), [a.shape[0], -1]), [(5, 6, 4)], 3),
    "_reshape_alias": (lambda a: aten._reshape_alias(a, a.shape, a.stride()), [(5, 6)], 2),
    "permute": (lambda a: a.permute(2, 0, 1), [(5, 6, 4)], 3),
    "transpose": (lambda a: a.transpose(0, -1).mT, [(5, 6, 4)], 3),
    "t": (lambda a: a.t(), [(5, 6)], 2),
    "unsqueeze": (lambda a: a.unsqueeze(-1).unsqueeze(0), [(5, 6)], 2),
    "squeeze": (lambda a: a.squeeze(1).squeeze((1, 2)), [(5, 1, 1, 1)], 1),
    "squeeze all": (lambda a: a[:, None].squeeze(), [(5, 6)], 0),
    "expand": (lambda a: a.expand(3, -1, -1, 4), [(5, 6, 1)], 2),
    "repeat": (lambda a: a.repeat(2, 1, 3), [(5, 6)], 2),
    "repeat_interleave": (lambda a: a.repeat_interleave(3, dim=1), [(5, 4)], 2),
    "slice": (lambda a: a[1:3], [(5, 6)], 1),
    "slice of products": (
        lambda a, r: (a.unflatten(0, (r.shape[0], -1)) * r.view(-1, 1, 1))[:, 1:].flatten(0, 1),
        [(12, 6), (3,)],
        2,
    ),
    "slice with steps": (lambda a: a[::2], [(8, 6)], 2),
    "slice with an offset": (lambda a: a[1::2], [(8, 6)], 2),
    "slice with uneven steps": (lambda a: a[::3], [(8, 6)], 1),
    "select": (lambda a: a[:, 2] + a.select(1, -1), [(5, 6, 4)], 2),
    "split": (lambda a: a.split(4, 1)[1], [(5, 8)], 1),
    "split by sizes": (lambda a: a.split([2, 3, 1], 1)[1], [(5, 6)], 1),
    "split of products": (
        lambda a: torch.cat(a.flatten(1).split([a.shape[2], (a.shape[1] - 1) * a.shape[2]], 1)[::-1], 1),
        [(5, 6, 4)],
        2,
    ),
    "split across": (lambda a: torch.cat(a.flatten(1).split([3, 21], 1), 1), [(5, 6, 4)], 1),
    "chunk of products": (lambda a, b: a.flatten(1).chunk(2, 1)[0] * b, [(5, 2, 4), (4,)], 2),
    "unbind": (lambda a: a.unbind(1)[2], [(5, 6)], 1),
    "cat": (lambda a, b: torch.cat([a, b], 1), [(5, 6), (5, 4)], 3),
    "cat of the same": (lambda a: torch.cat([a, a * 2], 1), [(5, 6)], 2),
    "stack": (lambda a, b: torch.stack([a, b], 1), [(5, 6), (5, 6)], 2),
    "complex": (lambda a: torch.view_as_real(torch.view_as_complex(a) * 1j), [(5, 6, 2)], 2),
    "flip": (lambda a: a.flip(1), [(5, 6)], 1),
    "roll": (lambda a: a.roll(1, 0), [(5, 6)], 1),
    "roll of all": (lambda a: a.roll(1), [(5, 6)], 0),
    # mixing
    "sum": (lambda a: a.sum(), [(5, 6)], 2),
    "sum over a dim": (lambda a: a.sum(1), [(5, 6, 4)], 3),
    "sum that keeps": (lambda a: a.sum((0, -1), keepdim=True), [(5, 6, 4)], 3),
    "mean": (lambda a: a.mean(1) + a.mean(1, keepdim=True).mean(1), [(5, 6)], 1),
    "mean of all": (lambda a: a.mean(), [(5, 6)], 0),
    "amax": (lambda a: a.amax(1) + a.amin(1), [(5, 6)], 1),
    "max": (lambda a: a.max(1).values + a.min(1).values, [(5, 6)], 1),
    "max of all": (lambda a: a.max() + a.min(), [(5, 6)], 0),
    "max of two": (torch.max, [(5, 6), (5, 6)], 2),
    "argmax": (lambda a: a.argmax(1) + a.argmin(-1), [(5, 6)], 1),
    "argmax of all": (lambda a: a.argmax(), [(5, 6)], 0),
    "any": (lambda a: (a > 0).any(1) & (a > 0).all(1), [(5, 6)], 1),
    "var": (lambda a: a.var(1) + a.std(1), [(5, 6)], 1),
    "prod": (lambda a: a.prod(1), [(5, 6)], 1),
    "softmax": (lambda a: a.softmax(1) + a.log_softmax(1), [(5, 6)], 1),
    "softmax by name": (lambda a: aten.softmax.int(a, 1) + aten.log_softmax.int(a, 1), [(5, 6)], 1),
    "cumsum": (lambda a: a.cumsum(1) + a.cumprod(1), [(5, 6)], 1),
    "sort": (lambda a: a.sort(1).values + a.argsort(1) + a.sort(dim=1, stable=True).indices, [(5, 6)], 1),
    "topk": (lambda a: a.topk(2, 1).values, [(5, 6)], 1),
    "triangle": (lambda a: a.triu(1) + a.tril(), [(3, 5, 6)], 1),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), [(5, 6), (6,), (6,)], 1),
    "rms_norm": (lambda a, w: F.rms_norm(a, (6,), w), [(5, 6), (6,)], 1),
    "batch_norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True), [(5, 6, 3), (6,), (6,)], 1),
    "batch_norm of numbers": (
        lambda a, w, m, v: F.batch_norm(a, m.detach(), v.detach().square() + 1, w),
        [(5, 6), (6,), (6,), (6,)],
        1,
    ),
    "group_norm": (lambda a, w, b: F.group_norm(a, a.shape[1] // 2, w, b), [(5, 6, 3), (6,), (6,)], 2),
    "group_norm of one": (lambda a, w: F.group_norm(a, 1, w), [(5, 6, 3), (6,)], 1),
    "instance_norm": (F.instance_norm, [(5, 6, 3)], 2),
    "pools": (
        lambda a: F.adaptive_avg_pool2d(a, 1) + F.avg_pool2d(a, 2)[..., :1, :1] + F.max_pool2d(a, 4),
        [(5, 6, 4, 4)],
        2,
    ),
    "pools of one dim": (
        lambda a: F.avg_pool1d(a, 2) + F.adaptive_avg_pool1d(a, 2) + F.max_pool1d(a, 2),
        [(5, 6, 4)],
        2,
    ),
    "pools of three dims": (
        lambda a: F.avg_pool3d(a, 2) + F.adaptive_avg_pool3d(a, 2) + F.max_pool3d(a, 2),
        [(5, 6, 4, 4, 4)],
        2,
    ),
    "adaptive_max_pool2d": (lambda a: F.adaptive_max_pool2d(a, 2), [(5, 6, 4, 4)], 2),
    "upsample": (
        lambda a: (
            F.interpolate(a, scale_factor=2)
            + F.interpolate(a, scale_factor=2, mode="bilinear")
            + F.interpolate(a, scale_factor=2, mode="bicubic")
        ),
        [(5, 6, 2, 2)],
        2,
    ),
    "pad": (lambda a: F.pad(a, (1, 2)), [(5, 6)], 1),
    "pad that shifts": (lambda a: F.pad(a, (1, -1)), [(5, 6)], 1),
    "pad rows": (lambda a: F.pad(a, (0, 0, 1, 0), value=2.0), [(5, 6)], 1),
    "pad by reflection": (lambda a: F.pad(a, (1, -1), mode="reflect"), [(5, 6, 4)], 2),
    "pad by edges": (
        lambda a: F.pad(a, (1, 1, 1, 1), mode="replicate") + F.pad(a, (1, 1, 1, 1), mode="reflect"),
        [(3, 4, 5, 6)],
        2,
    ),
    "index": (lambda a: a[:, torch.tensor([0, 2, 2])], [(5, 6, 4)], 2),
    "index by two": (lambda a: a[torch.tensor([0, 1]), :, torch.tensor([0, 2])], [(5, 6, 4)], 1),
    "index by booleans": (lambda a: a[:, torch.tensor([True, False] * 3)], [(5, 6)], 0),
    "gather": (lambda a, b: a.gather(1, b.argsort(1)), [(5, 6), (5, 6)], 1),
    "gather of some": (lambda a: a.gather(1, torch.zeros(3, 2, dtype=torch.long)), [(5, 6)], 0),
    "index_select": (lambda a: a.index_select(1, torch.tensor([0, 2, 2])), [(5, 6, 4)], 2),
    "index_select of a vector": (lambda a: a.index_select(0, torch.tensor([0, 2, 2])), [(6,)], 0),
    "zeros": (lambda a: a + a.new_zeros(5, 1) + torch.zeros(5, 1) + torch.full((1,), 3), [(5, 6)], 1),
    "made": (
        lambda a: a + a.new_ones(1) + a.new_full((1,), 2) + torch.ones(1) + torch.arange(1) + torch.scalar_tensor(2.0),
        [(5, 6)],
        2,
    ),
    "counted": (lambda a: a + torch.arange(6) + torch.linspace(0, 1, 6) + torch.eye(6)[0], [(5, 6)], 1),
    "item": (lambda a: a * a.detach().sum().item(), [(5, 6)], 0),
    "equal": (lambda a: a * (2 if torch.equal(a, a * 1) else 3), [(5, 6)], 0),
    "is_nonzero": (lambda a: a if bool(a.max() > 0) else -a, [(5, 6)], 0),
    "tolist": (lambda a: a * sum(a.detach().flatten().tolist()), [(5, 6)], 0),
    "len": (lambda a: a * len(a), [(5, 6)], 1),
}

EXEMPT = {
    "pointwise": "the rule that all pointwise operators share, covered by gelu, where, lerp",
    "aten.native_dropout": "draws; tests of the runtime hold it",
    "aten.upsample_bicubic2d": "as bilinear",
    **dict.fromkeys(
        (
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten.cudnn_batch_norm",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_no_training",
            "aten.batch_norm_with_update",
            "aten._batch_norm_with_update",
            "aten._batch_norm_no_update",
            "aten._fused_rms_norm",
        ),
        "another backend's name for an operator that is covered",
    ),
    **dict.fromkeys(
        ("aten.rand", "aten.randn", "aten.randint", "aten.randperm", "aten.empty", "aten.new_empty"),
        "no values to compare; same rule as arange or zeros",
    ),
    **dict.fromkeys(("aten.softmax", "aten.log_softmax"), "decomposed before it is recorded"),
    "aten.div.Scalar": "torch turns numbers into tensors first",
    **dict.fromkeys(
        (
            "aten.contiguous",
            "aten.reshape",
            "aten.adaptive_avg_pool1d",
            "aten.avg_pool1d",
            "aten.item",
            "aten.is_nonzero",
            "aten.argsort",
        ),
        "decomposed before it is recorded",
    ),
    "kept in an attribute": "a record of the trace, covered by KeptAside",
    "kept in a buffer": "a record of the trace, covered by Buffers",
}


class Call(nn.Module):
    """One function of parameters."""

    def __init__(self, function, shapes):
        super().__init__()
        self.function = function
        self.tensors = nn.ParameterList(torch.randn(*shape, dtype=D) for shape in shapes)

    def forward(self):
        return self.function(*self.tensors)


def typed(function, shapes):
    module = Call(function, shapes)
    found = trace(module, [{}])
    effects = infer(found.ops, DEFAULT_RULES)
    return module, Graph.of(found, effects, dict(module.named_modules()))


def slices(tensor, dims, cut, cuts, rank):
    for i, dim in enumerate(dims):
        if any(node in cut for node in leaves(dim)):
            tensor = take(tensor, i, normal_form(dim, cut), cuts, rank)
    return tensor


def check(module, graph, node, ranks):
    """Whether the leaf can be cut; asserts that it is right if so."""
    try:
        island = Simulation(graph, (node,)).run()
    except Fails:
        return False
    except Exception as error:
        raise AssertionError(f"cutting {node}: {error}") from error
    cut, cuts = {node: "f"}, {"f": spread(node.size, ranks)}
    parameters = [graph.trace.parameters[f"tensors.{i}"] for i in range(len(module.tensors))]
    whole = module()
    (output,) = graph.trace.roots()[0].outputs.values()
    parts = []
    for rank in range(ranks):
        local = []
        for value, tensor in zip(parameters, module.tensors, strict=True):
            own = slices(tensor, value.dims, cut, cuts, rank)
            local.append(own * 0 if value.parameter in island.biases and rank else own)
        parts.append(local)
    state = island.states.get(output.index)
    embedding = graph.effects[island.lookups[0].index].lookup if island.lookups else None
    if embedding is not None:
        return True  # ids are shifted by the runtime
    outputs = [module.function(*local) for local in parts]
    if state == "partial":
        torch.testing.assert_close(sum(outputs), whole, rtol=1e-9, atol=1e-9)
    for rank, part in enumerate(outputs):
        if state == "shard":
            torch.testing.assert_close(part, slices(whole, output.dims, cut, cuts, rank), rtol=1e-9, atol=1e-9)
        elif state is None:
            torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-9)
    return True


@pytest.mark.parametrize("name", CASES)
def test_operators_on_slices(name):
    function, shapes, expected = CASES[name]
    for ranks in (2, 3):
        module, graph = typed(function, shapes)
        nodes = [node for node in graph.by_leaf if node.size >= ranks]
        can = [node for node in nodes if check(module, graph, node, ranks)]
        if ranks == 2:
            assert len(can) == expected, f"{can} of {nodes}"


def is_real(value):
    return value.dtype.is_floating_point or value.dtype.is_complex


@pytest.mark.parametrize("name", CASES)
def test_operators_on_sums(name):
    """Where an effect says that partial sums pass, the operator of a sum is the sum of the operators."""
    function, shapes, _ = CASES[name]
    _module, graph = typed(function, shapes)
    for op, effect in zip(graph.trace.ops, graph.effects, strict=True):
        if effect.linear == "none" or op.overload is None or not all(map(is_real, op.inputs() + op.outputs)):
            continue
        inputs = list(dict.fromkeys(op.inputs()))
        groups = {"each": [[v] for v in inputs], "first": [inputs[:1]], "joint": [inputs]}[effect.linear]
        for group in groups:
            if group[0] in effect.bias:
                continue  # the simulation lets no partial bias through
            parts = [{v: torch.randn(v.shape, dtype=v.dtype) for v in inputs} for _ in range(2)]
            for value in inputs:
                if value in group:
                    continue
                parts[1][value] = parts[0][value] * (0 if value in effect.bias else 1)
            both = {v: parts[0][v] + parts[1][v] if v in group else parts[0][v] for v in inputs}
            results = [run(op, values) for values in (*parts, both)]
            for a, b, c in zip(*results, strict=True):
                close = 1e-9 if all(v.dtype == D for v in op.inputs() + op.outputs) else 1e-5
                torch.testing.assert_close(a + b, c, rtol=close, atol=close, msg=lambda m, op=op: f"{op.name}: {m}")


def run(op, values):
    from tensor_parallel.planner.records import Value, replaced

    tree = replaced((op.args, op.kwargs), lambda v: values[v].clone(), Value)
    outputs = op.overload(*tree[0], **tree[1])
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def test_whole_functions_on_sums():
    """linear, matmul: what the trace records as one operator."""
    draw = lambda *shape: torch.randn(*shape, dtype=D)  # noqa: E731
    x, y, w, b = draw(5, 6), draw(5, 6), draw(4, 6), draw(4)
    torch.testing.assert_close(F.linear(x + y, w, b), F.linear(x, w, b) + F.linear(y, w, b * 0))
    torch.testing.assert_close((x + y) @ w.t(), x @ w.t() + y @ w.t())


def rule_of(op):
    base = op.name.rsplit(".", 1)[0]
    for key in (op.name, base, base[:-1] if base.endswith("_") else base):
        if key in DEFAULT_RULES.by_name:
            return key
    return "pointwise" if op.overload is not None and torch.Tag.pointwise in op.overload.tags else None


def test_every_rule_is_covered():
    covered = set()
    for function, shapes, _ in CASES.values():
        module = Call(function, shapes)
        covered |= {rule_of(op) for op in trace(module, [{}]).ops}
    left = set(DEFAULT_RULES.by_name) - covered
    assert left <= set(EXEMPT), sorted(left - set(EXEMPT))
    assert not [key for key in EXEMPT if key not in DEFAULT_RULES.by_name]


def test_user_rules_win():
    called = []

    def rule(op):
        called.append(op.name)
        return DEFAULT_RULES.by_name["pointwise"](op)

    rules = DEFAULT_RULES.with_rule("aten.gelu", rule)
    assert "aten.gelu" not in DEFAULT_RULES.by_name
    module = Call(lambda a: F.gelu(a) * math.pi, [(5, 6)])
    infer(trace(module, [{}]).ops, rules)
    assert called == ["aten.gelu.default"]
