"""The header reader against gguf-py, and damaged files: one clear error each, nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.model.dequantize import dequantize_into
from engine.model.gguf_file import open_gguf
from engine.model.spec import read_spec
from engine.model.tokenizer import read_tokenizer
from tests.tiny_model import Tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_it_reads_what_gguf_py_reads(path: Path) -> None:
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert ours.read(info) == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (0, "not a GGUF"),
        (10, "truncated"),
        (300, "truncated"),
        (0.5, "truncated"),
        (-1, "truncated: tensor output_norm.weight"),
    ],
)
def test_a_cut_file_is_refused_at_open(path: Path, tmp_path: Path, kept: float, words: str) -> None:
    data = path.read_bytes()
    length = int(len(data) * kept) if isinstance(kept, float) else (kept if kept >= 0 else len(data) + kept)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:length])
    with pytest.raises(ModelError, match=words) as caught:
        open_gguf(cut)
    assert str(cut) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_after_open_is_an_error(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shrinks.gguf"
    copy.write_bytes(path.read_bytes())
    file = open_gguf(copy)
    os.truncate(copy, copy.stat().st_size - 100)
    with pytest.raises(ModelError, match="shrunk"):
        for tensor in file.tensors.values():
            file.read(tensor)


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        open_gguf(pointer)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_headers_give_clear_errors_only(path: Path, data: st.DataObject) -> None:
    original = path.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 6000) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    target = path.parent / "damaged.gguf"
    target.write_bytes(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    try:
        file = open_gguf(target)
        read_spec(file)
        read_tokenizer(file)
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metadata": {"general.architecture": "mamba"}}, "architecture 'mamba' is not supported"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "4 heads cannot share 3 KV heads"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type=yarn is not supported"),
        ({"metadata": {"llama.attention.sliding_window": 8}}, "sliding_window=8 is not supported"),
        ({"metadata": {"llama.block_count": 3}}, "blk.3.attn_norm.weight and 8 more is not known"),
        ({"metadata": {"llama.block_count": 5}}, "blk.4.attn_norm.weight is missing"),
        ({"tensors": {"blk.0.extra.weight": np.zeros(8, np.float32)}}, "blk.0.extra.weight is not known"),
        ({"tensors": {"blk.1.attn_q.bias": np.zeros(64, np.float32)}}, "blk.1.attn_q.bias is not known"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs.weight is not known"),
        (
            {"tensors": {"blk.2.ffn_up.weight": np.zeros((64, 64), np.float32)}},
            r"shape \[64, 64\], expected \[128, 64\]",
        ),
        ({"tensors": {"output_norm.weight": None}}, "output_norm.weight is missing"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = open_gguf(Tiny(**change).write(tmp_path / "odd.gguf"))
    with pytest.raises(ModelError, match=words):
        read_spec(file)


def test_tied_and_untied_heads_are_told_apart(tmp_path: Path, path: Path) -> None:
    head = np.zeros((96, 64), np.float32)
    assert read_spec(open_gguf(path)).tied
    assert not read_spec(open_gguf(Tiny(tensors={"output.weight": head}).write(tmp_path / "untied.gguf"))).tied


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q4_K"])
def test_dequantized_numbers_are_those_of_gguf_py(kind: str) -> None:
    rng = np.random.default_rng(3)
    numbers = rng.standard_normal((8, 512)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    try:
        raw = gguf.quantize(numbers, quant)
    except NotImplementedError:  # no quantizer for K-quants there: any finite blocks will do
        _, nbytes = gguf.GGML_QUANT_SIZES[quant]
        raw = rng.integers(0, 60, (8, 512 // 256 * nbytes), dtype=np.uint8)
    out = np.empty((8, 512), np.float32)
    dequantize_into(out, raw.tobytes(), kind)
    np.testing.assert_array_equal(out, gguf.dequantize(raw, quant).reshape(8, 512))
