"""ONNX graphs of a decoder with its weights as *inputs*, so that one session serves every layer.

Dimensions that vary between runs are symbols: ``B`` rows, ``S`` tokens of this pass, ``C`` capacity of the KV bucket,
``V`` rows of the head in this chunk. A projection is stored as [outputs, inputs], as files hold it, and multiplied
transposed: its rows are contiguous, so the head can be cut into vocabulary chunks anywhere, and several
batch rows share one pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from engine.model.spec import ModelSpec

_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32


def layer_graph(spec: ModelSpec) -> bytes:
    """One decoder layer.

    Inputs: ``x`` [B, S, hidden]; the nine weights of :meth:`ModelSpec.layer_shapes` by name; ``past_key`` and
    ``past_value`` [B, kv_heads, C, head_dim]; ``seqlens_k`` [B], each row's length after this pass minus one;
    ``total_sequence_length`` [1], the longest of them; ``cos`` and ``sin`` [context, head_dim / 2].
    Outputs: ``out`` [B, S, hidden] and ``present_key``, ``present_value``, to be bound to the pasts' own memory.
    """
    cache: list[str | int] = ["B", spec.kv_heads, "C", spec.head_dim]
    inputs = [
        _value("x", ["B", "S", spec.hidden]),
        *(_value(name, list(shape)) for name, shape in spec.layer_shapes().items()),
        _value("past_key", cache),
        _value("past_value", cache),
        _value("seqlens_k", ["B"], _INT32),
        _value("total_sequence_length", [1], _INT32),
        _value("cos", ["R", spec.head_dim // 2]),
        _value("sin", ["R", spec.head_dim // 2]),
    ]
    outputs = [
        _value("out", ["B", "S", spec.hidden]),
        _value("present_key", cache),
        _value("present_value", cache),
    ]
    attention = helper.make_node(
        "GroupQueryAttention",
        [
            "q",
            "k",
            "v",
            "past_key",
            "past_value",
            "seqlens_k",
            "total_sequence_length",
            "cos",
            "sin",
        ],
        ["attended", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=spec.heads,
        kv_num_heads=spec.kv_heads,
        do_rotary=1,
        rotary_interleaved=1,  # llama files store Q and K permuted for interleaved rotary
    )
    skip_norm = helper.make_node(
        "SkipSimplifiedLayerNormalization",
        ["x", "projected", "ffn_norm"],
        ["normed_2", "", "", "residual"],
        domain="com.microsoft",
        epsilon=spec.norm_epsilon,
    )
    nodes = [
        _norm("x", "attn_norm", "normed_1", spec.norm_epsilon),
        _project("normed_1", "attn_q", "q"),
        _project("normed_1", "attn_k", "k"),
        _project("normed_1", "attn_v", "v"),
        attention,
        _project("attended", "attn_output", "projected"),
        skip_norm,
        _project("normed_2", "ffn_gate", "gate"),
        _project("normed_2", "ffn_up", "up"),
        helper.make_node("Sigmoid", ["gate"], ["gate_sigmoid"]),
        helper.make_node("Mul", ["gate", "gate_sigmoid"], ["gate_silu"]),
        helper.make_node("Mul", ["gate_silu", "up"], ["inner"]),
        _project("inner", "ffn_down", "down"),
        helper.make_node("Add", ["residual", "down"], ["out"]),
    ]
    return _model("layer", nodes, inputs, outputs)


def final_norm_graph(spec: ModelSpec) -> bytes:
    """``x`` [B, 1, hidden] and ``output_norm`` [hidden] to ``normed`` [B, 1, hidden]."""
    shape: list[str | int] = ["B", 1, spec.hidden]
    nodes = [_norm("x", "output_norm", "normed", spec.norm_epsilon)]
    return _model("final_norm", nodes, [_value("x", shape), _value("output_norm", [spec.hidden])], [
        _value("normed", shape)
    ])  # fmt: skip


def head_graph(spec: ModelSpec) -> bytes:
    """``normed`` [B, 1, hidden] and ``head`` [V, hidden], a run of vocabulary rows, to ``logits`` [B, 1, V]."""
    inputs = [
        _value("normed", ["B", 1, spec.hidden]),
        _value("head", ["V", spec.hidden]),
    ]
    return _model(
        "head",
        [_project("normed", "head", "logits")],
        inputs,
        [_value("logits", ["B", 1, "V"])],
    )


def _norm(x: str, weight: str, out: str, epsilon: float) -> NodeProto:
    return helper.make_node("SimplifiedLayerNormalization", [x, weight], [out], axis=-1, epsilon=epsilon)


def _project(x: str, weight: str, out: str) -> NodeProto:
    return helper.make_node("FusedMatMul", [x, weight], [out], domain="com.microsoft", transB=1)


def _value(name: str, shape: Sequence[str | int], kind: int = _FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _model(
    name: str,
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
) -> bytes:
    graph = helper.make_graph(nodes, name, inputs, outputs)
    model: ModelProto = helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)
    return bytes(model.SerializeToString())
