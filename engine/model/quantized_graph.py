"""ONNX graphs of a decoder with block-quantized weights, for providers that hold activations on the device.

As in :mod:`engine.model.graph`, weights are inputs and one session serves every layer; numbers are float16. A matrix is
two inputs: ``NAME`` packed, [outputs, inputs / block, block * bits / 8] bytes, and ``NAME.scales``
[outputs, inputs / block]. Tokens go in and come out as int32, so that they need not leave the device between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from engine.model.shape import Shape

_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
_HALF, _INT32, _BYTE = TensorProto.FLOAT16, TensorProto.INT32, TensorProto.UINT8
_CONTRIB = "com.microsoft"


def embed_graph(shape: Shape) -> bytes:
    """``table`` [vocab, hidden] and ``tokens`` [B, S] to ``x`` [B, S, hidden]. The table may lie in host memory."""
    spec = shape.spec
    inputs = [_value("table", [spec.vocab, spec.hidden]), _value("tokens", ["B", "S"], _INT32)]
    nodes = [helper.make_node("Gather", ["table", "tokens"], ["x"], axis=0)]
    return _model("embed", nodes, inputs, [_value("x", ["B", "S", spec.hidden])])


def layer_graph(shape: Shape) -> bytes:
    """One decoder layer: inputs and outputs as :func:`engine.model.graph.layer_graph` has them, and biases."""
    spec = shape.spec
    cache: list[str | int] = ["B", spec.kv_heads, "C", spec.head_dim]
    nodes: list[NodeProto] = []
    inputs = [_value("x", ["B", "S", spec.hidden])]
    for kind, dimensions in spec.layer_shapes().items():
        if len(dimensions) == 1:
            inputs.append(_value(kind, dimensions))
            continue
        inputs += _matrix(shape, kind, dimensions)
        if kind in shape.biases:
            inputs.append(_value(f"{kind}.bias", [dimensions[0]]))
    inputs += [
        _value("past_key", cache),
        _value("past_value", cache),
        _value("seqlens_k", ["B"], _INT32),
        _value("total_sequence_length", [1], _INT32),
        _value("cos", ["R", spec.head_dim // 2]),
        _value("sin", ["R", spec.head_dim // 2]),
    ]

    def project(x: str, kind: str, out: str) -> None:
        rows, columns = spec.layer_shapes()[kind]
        product = f"{out}.product" if kind in shape.biases else out
        nodes.append(_product(shape, x, kind, product, rows, columns))
        if kind in shape.biases:
            nodes.append(helper.make_node("Add", [product, f"{kind}.bias"], [out]))

    nodes.append(_norm("x", "attn_norm", "normed_1", spec.norm_epsilon))
    for kind, out in (("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v")):
        project("normed_1", kind, out)
    nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos", "sin"],
            ["attended", "present_key", "present_value"],
            domain=_CONTRIB,
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            do_rotary=1,
        )
    )
    project("attended", "attn_output", "projected")
    nodes.append(
        helper.make_node(
            "SkipSimplifiedLayerNormalization",
            ["x", "projected", "ffn_norm"],
            ["normed_2", "", "", "residual"],
            domain=_CONTRIB,
            epsilon=spec.norm_epsilon,
        )
    )
    project("normed_2", "ffn_gate", "gate")
    project("normed_2", "ffn_up", "up")
    nodes += [
        helper.make_node("Sigmoid", ["gate"], ["gate_sigmoid"]),
        helper.make_node("Mul", ["gate", "gate_sigmoid"], ["gate_silu"]),
        helper.make_node("Mul", ["gate_silu", "up"], ["inner"]),
    ]
    project("inner", "ffn_down", "down")
    nodes.append(helper.make_node("Add", ["residual", "down"], ["out"]))
    outputs = [_value("out", ["B", "S", spec.hidden]), _value("present_key", cache), _value("present_value", cache)]
    return _model("layer", nodes, inputs, outputs)


def final_norm_graph(shape: Shape) -> bytes:
    """``x`` [B, 1, hidden] and ``output_norm`` [hidden] to ``normed`` [B, 1, hidden]."""
    spec = shape.spec
    nodes = [_norm("x", "output_norm", "normed", spec.norm_epsilon)]
    inputs = [_value("x", ["B", 1, spec.hidden]), _value("output_norm", [spec.hidden])]
    return _model("final_norm", nodes, inputs, [_value("normed", ["B", 1, spec.hidden])])


def head_graph(shape: Shape, rows: int) -> bytes:
    """``normed`` [B, 1, hidden] and a run of ``rows`` vocabulary rows, ``head``, to ``logits`` [B, 1, rows]."""
    hidden = shape.spec.hidden
    inputs = [_value("normed", ["B", 1, hidden]), *_matrix(shape, "head", (rows, hidden))]
    nodes = [_product(shape, "normed", "head", "logits", rows, hidden)]
    return _model("head", nodes, inputs, [_value("logits", ["B", 1, rows])])


def pick_graph(widths: Sequence[int]) -> bytes:
    """The head's chunks of logits to one token a row, the lowest id first among equals, and every length plus one.

    Inputs: ``logits_0`` [B, 1, widths[0]] and so on; ``ids`` [vocab], 0, 1, 2 ...; ``lengths`` [B].
    Outputs: ``logits`` [B, 1, vocab]; ``tokens`` [B, 1]; ``longer`` [B], which may be the memory of ``lengths``.
    Logits that are not numbers give the last id.
    """
    vocab = sum(widths)
    parts = [f"logits_{number}" for number in range(len(widths))]
    inputs = [_value(name, ["B", 1, width]) for name, width in zip(parts, widths, strict=True)]
    inputs += [_value("ids", [vocab], _INT32), _value("lengths", ["B"], _INT32)]
    nodes = [
        helper.make_node("Concat", parts, ["logits"], axis=-1),
        helper.make_node("ReduceMax", ["logits", "last_axis"], ["top"], keepdims=1),
        helper.make_node("Equal", ["logits", "top"], ["is_top"]),
        helper.make_node("Where", ["is_top", "ids", "last_id"], ["candidates"]),
        helper.make_node("ReduceMin", ["candidates", "last_axis"], ["tokens"], keepdims=0),
        helper.make_node("Add", ["lengths", "one"], ["longer"]),
    ]
    constants: dict[str, np.ndarray] = {
        "last_axis": np.array([-1], np.int64),
        "last_id": np.array([vocab - 1], np.int32),
        "one": np.array([1], np.int32),
    }
    outputs = [
        _value("logits", ["B", 1, vocab]),
        _value("tokens", ["B", 1], _INT32),
        _value("longer", ["B"], _INT32),
    ]
    return _model("pick", nodes, inputs, outputs, constants)


def _matrix(shape: Shape, name: str, dimensions: Sequence[int]) -> list[ValueInfoProto]:
    rows, columns = dimensions
    blocks = columns // shape.block
    packed = [rows, blocks, shape.block * shape.bits // 8]
    return [_value(name, packed, _BYTE), _value(f"{name}.scales", [rows, blocks])]


def _product(shape: Shape, x: str, name: str, out: str, rows: int, columns: int) -> NodeProto:
    return helper.make_node(
        "MatMulNBits",
        [x, name, f"{name}.scales"],
        [out],
        domain=_CONTRIB,
        K=columns,
        N=rows,
        bits=shape.bits,
        block_size=shape.block,
    )


def _norm(x: str, weight: str, out: str, epsilon: float) -> NodeProto:
    return helper.make_node("SimplifiedLayerNormalization", [x, weight], [out], axis=-1, epsilon=epsilon)


def _value(name: str, shape: Sequence[str | int], kind: int = _HALF) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _model(
    name: str,
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
    constants: dict[str, np.ndarray] | None = None,
) -> bytes:
    tensors = [numpy_helper.from_array(array, key) for key, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
    model: ModelProto = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
    return bytes(model.SerializeToString())
