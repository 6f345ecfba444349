"""What to trace a transformers model with, made from its forward's signature and its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensor_parallel.errors import TraceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, LENGTH, DECODER_LENGTH = 2, 7, 5
FRAMES, SAMPLES, GRID = 64, 4000, 4
_SPECIAL_IDS = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start", "image", "video", "audio", "speech")
_SUB_CONFIGS = (
    "vision_config",
    "text_config",
    "audio_config",
    "speech_config",
    "encoder",
    "decoder",
    "backbone_config",
)


def example_inputs(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Keyword arguments for `model`'s forward: what a planner traces it with, each entry one call.

    A text model gets ids of shape (2, 7), once with an attention mask that pads the first row on the left and once
    without; an encoder-decoder gets decoder ids of shape (2, 5) too; vision models get pixels of the config's own size,
    audio models features or samples. A model that finds images or sounds by a token in its text gets text alone. Random
    values come from a generator of their own. Tensors lie on the model's device (on the CPU for a model on the meta
    device), floating ones in its dtype.

    Raises:
        TraceError: the forward requires something that cannot be made from the config.
    """
    facts = _Facts.of(model)
    inputs = _made(facts)
    missing = facts.missing(inputs)
    if not inputs or missing:
        inputs = _own_dummies(model, facts)
        missing = facts.missing(inputs) if inputs else missing
    if not inputs or missing:
        wanted = f"a value for {', '.join(missing)}" if missing else "any of its arguments"
        raise TraceError(
            f"{type(model).__name__}: its forward({', '.join(facts.parameters)}) cannot be called with what its config "
            f"says: no way to make {wanted}. Pass example_inputs=, a dict of keyword arguments that the forward "
            "accepts (or a list of such dicts)"
        )
    return _variants(facts, inputs)


@dataclass(frozen=True)
class _Facts:
    """What is known of a model from the outside."""

    name: str
    main_input: str
    parameters: Mapping[str, inspect.Parameter]
    configs: tuple[Any, ...]
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Facts:
        config = model.config
        parts = [getattr(config, name, None) for name in _SUB_CONFIGS]
        device = model.device if model.device.type != "meta" else torch.device("cpu")
        return cls(
            name=type(model).__name__,
            main_input=str(getattr(model, "main_input_name", "input_ids")),
            parameters=inspect.signature(model.forward).parameters,
            configs=(config, *(part for part in parts if part is not None and not isinstance(part, int | str))),
            device=device,
            dtype=model.dtype if model.dtype.is_floating_point else torch.float32,
            generator=torch.Generator().manual_seed(20),
        )

    def get(self, *names: str, default: int) -> int:
        """The first int found under one of `names`, in the config and then in its parts; of a list its last item."""
        found = self.find(*names)
        return default if found is None else found

    def find(self, *names: str) -> int | None:
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and value:
                    value = value[-1]
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

    def required(self) -> list[str]:
        empty, named = (
            inspect.Parameter.empty,
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY),
        )
        return [name for name, one in self.parameters.items() if one.default is empty and one.kind in named]

    def missing(self, inputs: Mapping[str, Any]) -> list[str]:
        return [name for name in self.required() if name not in inputs]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def ids(self, shape: tuple[int, ...], vocabulary: int) -> Tensor:
        """Ids below `vocabulary` that mean nothing special to the model."""
        special = {0}
        for config in self.configs:
            for name in _SPECIAL_IDS:
                for suffix in ("_token_id", "_token_index"):
                    value = getattr(config, name + suffix, None)
                    special.update(value if isinstance(value, list | tuple) else (value,))
        plain = torch.tensor([i for i in range(min(vocabulary, 4096)) if i not in special] or range(vocabulary))
        return plain[torch.randint(len(plain), shape, generator=self.generator)].to(self.device)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.long, device=self.device)

    def grid(self, batch: int = BATCH) -> Tensor:
        return torch.tensor([[1, GRID, GRID]] * batch, device=self.device)


def _made(facts: _Facts) -> dict[str, Any]:
    """The main input, what belongs to it, and everything else that the forward requires, as far as it can be made."""
    names = [facts.main_input] if facts.main_input in facts.parameters else []
    names += [name for name in facts.required() if name not in names]
    if not names:
        names = [name for name in _MAIN_INPUTS if name in facts.parameters][:1]
    if "input_ids" not in names:
        names += ["grid_thw", "image_grid_thw"]
    elif facts.find(*_PLACEHOLDERS) is None:
        # Two towers whose arguments are optional one by one (CLIP): both are needed. Where a token in the text stands
        # for the picture or the sound, text alone will do.
        names += ["pixel_values", "input_features", "input_values"]
    if getattr(facts.configs[0], "is_encoder_decoder", False) and not facts.name.endswith("ForSequenceClassification"):
        names.append("decoder_input_ids")  # classifiers shift the encoder's ids themselves and want the same length
    makers = {name: _MAKERS[name] for name in names if name in _MAKERS and name in facts.parameters}
    return {name: make(facts) for name, make in makers.items()}


def _own_dummies(model: PreTrainedModel, facts: _Facts) -> dict[str, Any]:
    """`model.dummy_inputs`, where its values can be meant for this forward."""
    try:
        dummies = dict(model.dummy_inputs)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return {}  # a property that transformers lets every model define, some by code that fails on small configs
    ids = dummies.get("input_ids")
    vocabulary = facts.get("vocab_size", default=0)
    if set(dummies) - set(facts.parameters) or (isinstance(ids, Tensor) and vocabulary <= int(ids.max())):
        return {}
    return {name: value.to(facts.device) if isinstance(value, Tensor) else value for name, value in dummies.items()}


def _variants(facts: _Facts, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """With a mask of ones and without one; no cache in either, which would leave the forward as an output."""
    if "use_cache" in facts.parameters:
        inputs = {**inputs, "use_cache": False}
    ids = inputs.get("input_ids")
    if ids is None or "attention_mask" not in facts.parameters or "attention_mask" in inputs:
        return [inputs]
    # A mask of ones is the same as none: transformers drops it, and takes other paths through attention.
    mask = torch.ones_like(ids)
    mask[0, ..., : ids.shape[-1] // 3] = 0
    return [{**inputs, "attention_mask": mask}, inputs]


def _input_ids(facts: _Facts) -> Tensor:
    longest = facts.find("max_position_embeddings", "n_positions")
    length = LENGTH if longest is None or longest < 1 else min(LENGTH, longest)
    shape: tuple[int, ...] = (BATCH, length)
    pad = facts.find("pad_token_id")
    if facts.name.endswith("ForMultipleChoice"):
        shape = (BATCH, 2, length)
    elif facts.name.endswith("ForSequenceClassification") and pad is None:
        shape = (1, length)  # the last token of each row is found by its padding, or there is one row only
    ids = facts.ids(shape, facts.get("vocab_size", default=32))
    end = facts.find("eos_token_id")
    if getattr(facts.configs[0], "is_encoder_decoder", False) and end is not None and end >= 0:
        ids[..., -1] = end  # sequence classifiers of encoder-decoders read the hidden state at the end token
    return ids


def _decoder_input_ids(facts: _Facts) -> Tensor:
    vocabulary = getattr(facts.configs[0], "decoder_vocab_size", None) or facts.get("vocab_size", default=32)
    return facts.ids((BATCH, DECODER_LENGTH), int(vocabulary))


def _image_size(facts: _Facts) -> tuple[int, int]:
    for config in facts.configs:
        for name in ("image_size", "img_size", "input_size"):
            size = getattr(config, name, None)
            if isinstance(size, list | tuple) and len(size) >= 2:
                return int(size[-2]), int(size[-1])
            if isinstance(size, int):
                return size, size
    return 64, 64


def _channels(facts: _Facts) -> int:
    return facts.get("num_channels", "in_channels", "in_chans", default=3)


def _pixel_values(facts: _Facts) -> Tensor:
    if "grid_thw" in facts.parameters or "image_grid_thw" in facts.parameters:
        return _patches(facts)
    height, width = _image_size(facts)
    frames = facts.find("num_frames")
    if frames is not None and "pixel_values_videos" not in facts.parameters:
        return facts.noise(BATCH, frames, _channels(facts), height, width)
    return facts.noise(BATCH, _channels(facts), height, width)


def _patches(facts: _Facts) -> Tensor:
    """Flattened patches of two images of `GRID` x `GRID` patches, as the models with a `grid_thw` take them."""
    patch = facts.get("patch_size", default=14)
    depth = facts.get("temporal_patch_size", default=1)
    return facts.noise(BATCH * GRID * GRID, _channels(facts) * depth * patch * patch)


def _pixel_values_videos(facts: _Facts) -> Tensor:
    height, width = _image_size(facts)
    return facts.noise(BATCH, facts.get("num_frames", "frames_per_clip", default=4), _channels(facts), height, width)


def _input_features(facts: _Facts) -> Tensor:
    mel = facts.get(
        "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "feature_projection_input_dim", default=80
    )
    positions = facts.find("max_source_positions")
    if facts.find("num_mel_bins") is not None and positions is not None and facts.find("conv_kernel_sizes") is None:
        return facts.noise(BATCH, mel, 2 * positions)  # Whisper and its like: mel bins first, twice the positions
    return facts.noise(BATCH, FRAMES, mel)


def _input_values(facts: _Facts) -> Tensor:
    if facts.find("num_mel_bins") is not None and facts.find("max_length") is not None and "Conv" not in facts.name:
        return facts.noise(BATCH, facts.get("max_length", default=FRAMES), facts.get("num_mel_bins", default=80))
    if facts.find("audio_channels") is not None or "padding_mask" in facts.parameters:
        return facts.noise(BATCH, facts.get("audio_channels", default=1), SAMPLES)
    return facts.noise(BATCH, SAMPLES)


def _past_values(facts: _Facts) -> Tensor:
    length = facts.get("context_length", default=32)
    channels = facts.find("num_input_channels")
    return facts.noise(BATCH, length) if channels is None else facts.noise(BATCH, length, channels)


_MAKERS: Mapping[str, Callable[[_Facts], Tensor]] = {
    "input_ids": _input_ids,
    "decoder_input_ids": _decoder_input_ids,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _pixel_values_videos,
    "input_features": _input_features,
    "input_values": _input_values,
    "past_values": _past_values,
    "hidden_states": _patches,
    "grid_thw": _Facts.grid,
    "image_grid_thw": _Facts.grid,
    "attention_mask": lambda facts: facts.ones(BATCH, LENGTH),
    "token_type_ids": lambda facts: 0 * facts.ones(BATCH, LENGTH),
}
_PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
_MAIN_INPUTS: Iterable[str] = ("input_ids", "pixel_values", "pixel_values_videos", "input_features", "input_values")
