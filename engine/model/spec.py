"""What a model is, apart from its bytes: the numbers its metadata declares, checked, and its tensors by their place.

Only the Llama layout so far. Whatever would change the result and is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.model.gguf_file import GgufFile, TensorInfo

PROJECTIONS = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
LAYER_TENSORS = ("attn_norm", *PROJECTIONS, "ffn_norm")
_ARCHITECTURES = ("llama",)


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of a decoder: sizes in elements, ``context`` in tokens. ``tied``: the head is the embedding matrix."""

    name: str
    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    norm_epsilon: float
    tied: bool

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token of one row takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's tensors, row-major: a projection is [outputs, inputs]."""
        q, kv, hidden, inner = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.hidden,
            self.inner,
        )
        return {
            "attn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
            "attn_output": (hidden, q), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }  # fmt: skip


def read_spec(file: GgufFile) -> ModelSpec:
    """The spec of a GGUF file.

    Raises
    ------
    ModelError
        When a number is missing or impossible, a tensor is missing, misshapen or unknown, or a feature is unsupported.
    """
    meta = _Metadata(file)
    architecture = meta.architecture
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported. Supported: {', '.join(_ARCHITECTURES)}."
        )
    heads = meta.integer("attention.head_count")
    kv_heads = meta.integer("attention.head_count_kv", default=heads)
    hidden = meta.integer("embedding_length")
    if heads % kv_heads:
        raise ModelError(f"{file.path}: {heads} heads cannot share {kv_heads} KV heads")
    if "attention.key_length" not in meta and hidden % heads:
        raise ModelError(f"{file.path}: hidden size {hidden} does not divide into {heads} heads")
    head_dim = meta.integer("attention.key_length", default=hidden // heads)
    value_dim = meta.integer("attention.value_length", default=head_dim)
    rope_dim = meta.integer("rope.dimension_count", default=head_dim)
    if value_dim != head_dim or rope_dim != head_dim or head_dim % 2:
        raise ModelError(
            f"{file.path}: key, value and rope sizes {head_dim}, {value_dim}, {rope_dim}: expected equal and even"
        )
    meta.refuse("rope.scaling.type", unless="none")
    meta.refuse("attention.sliding_window", unless=0)
    embedding = _tensor(file, "token_embd.weight")
    spec = ModelSpec(
        name=str(file.metadata.get("general.name", file.path.stem)),
        architecture=architecture,
        layers=meta.integer("block_count"),
        hidden=hidden,
        inner=meta.integer("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=embedding.shape[0],
        context=meta.integer("context_length"),
        rope_base=meta.real("rope.freq_base", default=10000.0),
        norm_epsilon=meta.real("attention.layer_norm_rms_epsilon", default=1e-5),
        tied="output.weight" not in file.tensors,
    )
    _check_tensors(file, spec)
    return spec


class _Metadata:
    """Typed look-ups under the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", "missing"))

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected a positive integer")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected a positive number")
        return float(value)

    def refuse(self, key: str, unless: Any) -> None:
        value = self.file.metadata.get(f"{self.architecture}.{key}", unless)
        if value != unless:
            raise ModelError(f"{self.file.path}: {self.architecture}.{key}={value} is not supported")


def _tensor(file: GgufFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name]


def _check_tensors(file: GgufFile, spec: ModelSpec) -> None:
    expected: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (spec.vocab, spec.hidden),
        "output_norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        expected["output.weight"] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        for kind, shape in spec.layer_shapes().items():
            expected[f"blk.{layer}.{kind}.weight"] = shape
    for name, shape in expected.items():
        found = _tensor(file, name).shape
        if found != shape:
            raise ModelError(f"{file.path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
    unknown = [name for name in file.tensors if name not in expected]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(
            f"{file.path}: tensor {unknown[0]}{more} is not known to this layout ({spec.architecture}, "
            f"{spec.layers} layers); it would change the result, so the model is refused"
        )
