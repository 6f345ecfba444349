"""A GGUF file comes out as an ordinary model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tensor_parallel.transformers_support import gguf as loader

HIDDEN, HEADS, KV_HEADS, HIDDEN_UNITS, VOCABULARY = 64, 4, 2, 96, 261


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama in Q8_0, with a byte-level vocabulary, written with the package `gguf` itself."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN_UNITS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    _write_tokenizer(writer)
    noise = np.random.default_rng(0)
    kv_size = HIDDEN // HEADS * KV_HEADS
    for name, shape in {
        "token_embd": (VOCABULARY, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (kv_size, HIDDEN),
        "blk.0.attn_v": (kv_size, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (HIDDEN_UNITS, HIDDEN), "blk.0.ffn_up": (HIDDEN_UNITS, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, HIDDEN_UNITS),
    }.items():  # fmt: skip
        packed = gguf.quants.quantize(noise.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", 1 + 0.1 * noise.normal(size=HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(chr(i + 256) for i in range(VOCABULARY - 4)), "Āā"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["Ā ā"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.filterwarnings("default")
def test_it_casts_saves_and_loads_like_any_other(tiny_gguf: Path, tmp_path: Path) -> None:
    model, tokenizer = loader.load_gguf(tiny_gguf)
    assert type(model) is transformers.LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(name in model.__dict__ for name in ("hf_quantizer", "is_quantized", "quantization_method"))
    assert tokenizer.convert_tokens_to_ids("Āā") == VOCABULARY - 1
    ids = torch.arange(3, 10)[None]
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, expected)
    assert model.half().dtype == torch.float16
    assert loader.load_gguf(str(tiny_gguf), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_what_is_missing_is_named(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        loader.load_gguf(tmp_path / "nothing.gguf")
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ImportError, match=r"'gguf'.*\[gguf\]"):
        loader.load_gguf(tiny_gguf)
