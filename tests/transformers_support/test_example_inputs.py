"""The forward accepts what `example_inputs` makes for it, and making it touches nothing global."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn

from tensor_parallel.errors import TraceError
from tensor_parallel.transformers_support.example_inputs import example_inputs

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
BART = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
}  # fmt: skip
WAV2VEC2 = {
    **TEXT, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
CLIP = {
    "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 16,
}  # fmt: skip
PATCHTST = {
    "num_input_channels": 2, "context_length": 32, "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "ffn_dim": 16,
}  # fmt: skip
CONVNEXT = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "image_size": 64}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**{**TEXT, "intermediate_size": 40}, num_key_value_heads=2, num_local_experts=2)
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "gpt2 classifier": lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "bert choice": lambda: hf.BertForMultipleChoice(hf.BertConfig(**TEXT)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "bart classifier": lambda: hf.BartForSequenceClassification(hf.BartConfig(**BART)),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**VISION)),
    "convnext": lambda: hf.ConvNextModel(hf.ConvNextConfig(**CONVNEXT)),
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(**CLIP)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
    "wav2vec2": lambda: hf.Wav2Vec2Model(hf.Wav2Vec2Config(**WAV2VEC2)),
    "patchtst": lambda: hf.PatchTSTForPrediction(hf.PatchTSTConfig(**PATCHTST)),
}
TEXT_MODELS = ("llama", "qwen3", "mixtral", "gpt2", "bert", "bart", "t5")


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_accepts_them(name: str) -> None:
    model = MODELS[name]().eval()
    state = torch.get_rng_state()
    inputs = example_inputs(model)
    assert torch.equal(state, torch.get_rng_state())
    assert inputs
    with torch.no_grad():
        for one in inputs:
            model(**one)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_gets_one_call_with_a_mask_and_one_without(name: str) -> None:
    model = MODELS[name]()
    masked, plain = example_inputs(model)
    assert masked["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert masked["attention_mask"][1].eq(1).all()
    assert "attention_mask" not in plain
    assert masked["input_ids"].shape == (2, 7)
    assert masked.get("use_cache") is (None if name == "bert" and "use_cache" not in masked else False)
    assert not (masked["input_ids"] == 0).any()
    assert masked["input_ids"].max() < 99


def test_they_are_the_same_every_time_and_follow_the_model() -> None:
    model = MODELS["vit"]().double()
    first, second = example_inputs(model)[0]["pixel_values"], example_inputs(model)[0]["pixel_values"]
    assert first.dtype == torch.float64
    assert torch.equal(first, second)
    with torch.device("meta"):
        model = MODELS["llama"]()
    assert example_inputs(model)[0]["input_ids"].device.type == "cpu"


class Odd(hf.PreTrainedModel):
    config_class = hf.LlamaConfig

    def __init__(self, config: hf.LlamaConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(3, 3)

    def forward(self, protein_graph: torch.Tensor) -> torch.Tensor:
        return self.layer(protein_graph)


def test_what_cannot_be_made_is_named_with_the_cure() -> None:
    with pytest.raises(TraceError, match=r"(?s)Odd.*protein_graph.*example_inputs="):
        example_inputs(Odd(hf.LlamaConfig(**TEXT)))
