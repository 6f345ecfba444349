"""The READMEs: both languages show the same code, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def test_both_languages_show_the_same_code():
    assert blocks("README.zh-CN.md") == blocks("README.md")
    commands = [re.findall(r"^make \S+", (ROOT / name).read_text(encoding="utf-8"), re.M) for name in
                ("README.md", "README.zh-CN.md")]  # fmt: skip
    assert commands[0] == commands[1]


def test_the_code_runs(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=44, num_hidden_layers=9, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    first, second = (text.replace("cuda:0", "cpu").replace("cuda:1", "cpu") for text in blocks("README.md"))
    ids = torch.arange(8).view(2, 4) + 3
    seen = []
    names = {
        "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "pad_token_id": 0},
        "batch": {"input_ids": ids, "labels": ids},
        "hidden": torch.randn(2, 4, 24),
        "hook": lambda module, args, output: seen.append(output.shape),
    }
    first = first.replace('"path/to/model"', repr(str(tmp_path / "model"))).replace(
        '"out"', repr(str(tmp_path / "out"))
    )
    exec(first, names)
    exec(second, names)
    assert (tmp_path / "out" / "config.json").is_file()
    assert names["logits"].shape == (2, 4, 101)
    assert len(names["model"](ids).logits) == 2
    assert seen == [(2, 4, 24)]
