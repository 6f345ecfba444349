"""Tiny random models of the transformers families, in float64, with noise on everything learned."""

from __future__ import annotations

import copy

import torch
import transformers

import tensor_parallel as tp
from tensor_parallel.testing import noisy

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_LIKE = {
    **SHAPE,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


def config(family: str, **changes: object) -> transformers.PretrainedConfig:
    """A tiny configuration; heads, hidden units and vocabulary divide by no number of ranks but 1, or 2 and 3."""
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        kind = {
            "llama": transformers.LlamaConfig,
            "mistral": transformers.MistralConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
        }[family]
        more = {"head_dim": 8} if family == "qwen3" else {}
        return kind(**{**LLAMA_LIKE, **more, **changes})
    if family == "gpt2":
        sizes = {"n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 32, "vocab_size": 101}
        still = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return transformers.GPT2Config(**{**sizes, **still, **changes})
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"intermediate_size": 70, "num_attention_heads": 6, "max_position_embeddings": 32}
    return transformers.BertConfig(**{**SHAPE, **sizes, **still, **changes})


CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "bert": transformers.BertForMaskedLM,
    "bert-decoder": transformers.BertLMHeadModel,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bert")
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bert-decoder")


def build(family: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A model in eval mode."""
    torch.manual_seed(seed)
    if family == "bert-decoder":
        changes = {"is_decoder": True, **changes}
    settings = config(family.partition("-")[0], **changes)
    return noisy(CLASSES[family](settings).double().eval(), seed)


def pair(family: str, ranks: int, **changes: object):
    """(unsplit, split) of equal weights."""
    reference = build(family, **changes)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def padded(
    vocab: int = 101, batch: int = 3, length: int = 7, left: bool = True, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Token ids with two rows of the batch padded."""
    ids = torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pads in ((0, 3), (1, 1))[:batch]:
        where = slice(0, pads) if left else slice(length - pads, length)
        ids[row, where] = 0
        mask[row, where] = 0
    return {"input_ids": ids, "attention_mask": mask}
