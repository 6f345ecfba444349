"""What tests of split models need: tiny models, weights that hide nothing, assert_parity, ranks without a model."""

from tensor_parallel.testing.models import ConvNet, Gpt, Llama, Mlp, TiedEmbedding
from tensor_parallel.testing.noise import noisy
from tensor_parallel.testing.parity import assert_parity
from tensor_parallel.testing.ranks import run_ranks

__all__ = ["ConvNet", "Gpt", "Llama", "Mlp", "TiedEmbedding", "assert_parity", "noisy", "run_ranks"]
