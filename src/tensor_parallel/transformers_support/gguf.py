"""GGUF files as ordinary models."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch


def load_gguf(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load a GGUF file through transformers: `(model, tokenizer)`.

    The model comes back on the CPU with its weights unpacked to `dtype`, and without any mark of the quantisation, so
    that casting, saving and splitting treat it as an ordinary model.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: a package is missing; the message names the extra to install.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"load_gguf: there is no GGUF file {str(file)!r}")
    for package in ("transformers", "gguf", "accelerate"):  # transformers reads GGUF through both others
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"load_gguf needs the package {package!r}: install tensor-parallel with its extra `gguf` "
                '(from a checkout: pip install -e ".[gguf]")'
            )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        # Where the package `kernels` is installed the weights would stay packed, and packed layers cannot be cut.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    _forget_quantization(model)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    return model.to(dtype), tokenizer


def _forget_quantization(model: Any) -> None:
    """Take away what transformers leaves on a model whose weights are unpacked: with it, `half` and saving refuse."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    if "quantization_config" in model.config.__dict__:
        del model.config.quantization_config
