"""The demo's proof, on a tiny model: it passes for a split model and fails for another one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tensor_parallel as tp

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    module.PROOF_TOKENS = 12
    return module


def _model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


PROMPT = {"input_ids": torch.arange(5, 11)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}


def test_the_proof_passes_for_a_split_model_and_fails_for_another(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model()
    unsplit = demo._answer(model, PROMPT)
    assert unsplit.tokens.shape == (1, 18)
    tolerance = demo._tolerance(model, unsplit)
    assert 1e-4 <= tolerance < 1e-2
    split = demo._answer(tp.tensor_parallel(model, ["cpu"] * 3), PROMPT, text=unsplit.tokens)
    assert demo._proof(unsplit, split, 6, tolerance) == 0

    other = _model()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[0].mul_(1.2)
    wrong = demo._answer(other, PROMPT, text=unsplit.tokens)
    assert demo._proof(unsplit, wrong, 6, tolerance) == 1


def test_another_token_is_named_and_forgiven_only_where_the_two_best_tie(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    unsplit = demo._answer(_model(), PROMPT)
    tokens = unsplit.tokens.clone()
    tokens[0, 6 + 4] += 1
    other = demo.Answer(tokens, unsplit.logits)
    assert demo._proof(unsplit, other, 6, 1e-4) == 1

    tied = unsplit.logits.clone()
    first, second = tied[6 + 4 - 1].topk(2).indices
    tied[6 + 4 - 1, second] = tied[6 + 4 - 1, first] * (1 - 1e-6)
    assert demo._proof(demo.Answer(unsplit.tokens, tied), demo.Answer(tokens, tied), 6, 1e-4) == 0


def test_devices_and_options(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo._devices(3) == ["cpu"] * 3 or torch.cuda.is_available()
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setenv("N", "4")
    monkeypatch.setenv("Q", "")
    options = demo._arguments()
    assert (options.ranks, options.question) == (4, demo.QUESTION)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--ranks", "0"])
    with pytest.raises(SystemExit, match="at least 1, such as 2; given: '0'"):
        demo._arguments()
    monkeypatch.setattr(sys, "argv", ["demo.py"])


@pytest.mark.parametrize("given", ["abc", "0", "\u00b2"])
def test_a_number_of_devices_that_is_none_is_one_line(given: str) -> None:
    environment = {**os.environ, "N": given}
    demo = [sys.executable, str(EXAMPLES / "demo.py")]
    done = subprocess.run(demo, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line == f"demo: N (--ranks) and --tokens are numbers of at least 1, such as 2; given: {given!r}"
