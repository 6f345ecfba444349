"""What each rank's process does in the tests of make_distributed_shard; its findings go into a file."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import pickle
import sys
import traceback
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tensor_parallel as tp
from tensor_parallel.layout import join
from tensor_parallel.shard.pieces import held_by
from tensor_parallel.testing import noisy
from tensor_parallel.testing.models import Mlp

RANKS = 2
DEADLINE = 20.0
IDS = torch.tensor([[5, 9, 17, 23, 42, 8], [3, 77, 11, 54, 29, 6]])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return noisy(Mlp((6, 11, 7)).double())


def llama(heads: int = 5, kv: int = 1, dropout: float = 0.0, attention: str = "sdpa", tied=False) -> LlamaForCausalLM:
    """Heads that two ranks hold unevenly; one KV head is held by both."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=heads * 4, intermediate_size=15, num_hidden_layers=2, num_attention_heads=heads, head_dim=4,
        num_key_value_heads=kv, vocab_size=101, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=64, attention_dropout=dropout, attn_implementation=attention,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return noisy(LlamaForCausalLM(config).double()).eval()


def joined(model: nn.Module, of) -> dict[str, torch.Tensor]:
    """The whole tensor of every rank's part of each parameter, checking that ranks that hold the same have the same."""
    resolved = model._tp_slot.shards.resolved
    found = {}
    for name, parameter in model.named_parameters():
        own = of(parameter)
        parts = [None] * RANKS
        dist.all_gather_object(parts, own)
        planned = next(t for t in resolved.plan.tensors.values() if name in t.names)
        for first, *others in held_by(planned, resolved.cuts, RANKS):
            assert all(same(parts[first], parts[other]) for other in others), name
        if parts[0] is None:
            continue
        found[name] = join(parts, planned.layout, resolved.cuts) if planned.is_cut else parts[0]
    return found


def same(one, other) -> bool:
    return one is other is None or torch.equal(one, other)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if hasattr(model, "_tp_slot"):
        return joined(model, lambda p: None if p.grad is None else p.grad.clone())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    if hasattr(model, "_tp_slot"):
        return joined(model, torch.Tensor.detach)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(model: nn.Module, loss, steps: int = 3) -> dict[str, object]:
    """Gradients of one backward, then the parameters after AdamW steps, gradients clipped elementwise."""
    model.zero_grad()
    loss().backward()
    found = {"gradients": gradients(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    return {**found, "trained": values(model)}


def run_mlp(split) -> dict[str, object]:
    module = mlp()
    model = split(module, {"x": torch.randn(3, 6, dtype=torch.float64)})
    x = torch.linspace(-1, 2, 18, dtype=torch.float64).view(3, 6).requires_grad_()
    output = model(x)
    output.square().mean().backward()
    (first,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    found = {"output": output.detach(), "input gradient": x.grad, "second": second}
    return {**found, **trained(model, lambda: model(x.detach()).square().mean())}


def run_by_hand(split) -> dict[str, object]:
    """Rules of version 2.0."""
    actions = tp.state_actions
    rules = tp.Config(
        {
            r"0\.(weight|bias)": actions.Split(RANKS, 0),
            r"1\.weight": actions.Split(RANKS, 1),
            r"1\.bias": actions.Scale(RANKS),
        },
        {},
        {r"layers\.1$": {0: "sum"}},
        {},
    )
    model = split(mlp(), None, rules)
    x = torch.linspace(-1, 2, 18, dtype=torch.float64).view(3, 6).requires_grad_()
    output = model(x)
    output.square().mean().backward()
    return {"output": output.detach(), "input gradient": x.grad}


def run_llama(split, **shape) -> dict[str, object]:
    model = split(llama(**shape), None)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, LlamaForCausalLM)
    tokens = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False)
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    output = model(inputs_embeds=embeds, labels=IDS)
    output.loss.backward()
    found = {"logits": output.logits.detach(), "loss": output.loss.detach(), "input gradient": embeds.grad}
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    steps = trained(model, lambda: model(IDS, attention_mask=mask, labels=IDS).loss)
    return {"tokens": tokens, **found, **steps}


def run_inside(split) -> dict[str, object]:
    """A hook on a module between cut ones, and an inner module called by itself."""
    model = split(llama(3, 3, attention="eager"), None)
    seen, whole = [], []
    projection = model.model.layers[0].self_attn.q_proj
    handle = projection.register_forward_hook(lambda m, args, out: (seen.append(out.detach()), out * 1.5)[1])
    projection.register_full_backward_hook(lambda m, given, taken: whole.append(taken[0].detach()))
    output = model(IDS, output_attentions=True, output_hidden_states=True)
    output.logits.square().mean().backward()
    found = {"gradients": gradients(model), "seen": seen[0], "whole gradient": whole[0]}
    found |= {f"hidden {i}": h.detach() for i, h in enumerate(output.hidden_states)}
    found |= {f"attention {i}": a.detach() for i, a in enumerate(output.attentions)}
    handle.remove()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 2, 12).requires_grad_()
    inner = model.model.layers[0].mlp.down_proj
    y = torch.linspace(-1, 1, 30, dtype=torch.float64).view(1, 2, 15).requires_grad_()
    (inner(y).square().sum() + model.model.layers[1].mlp(x).square().sum()).backward()
    return {**found, "x": x.grad, "y": y.grad, "after": gradients(model)}


def run_checkpointed(split, reentrant: bool) -> dict[str, object]:
    """Activation checkpointing with dropout; ranks start from different seeds, the unsplit model from rank 0's."""
    model = split(llama(3, 3, dropout=0.3), None).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach(), "input gradient": embeds.grad, "gradients": gradients(model)}


def run_frozen(split) -> dict[str, object]:
    """One head, which rank 0 holds alone; what lies before it is frozen, and one module is not used."""
    model = split(llama(1, 1), None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("o_proj" in name or "lm_head" in name)
    model(IDS, labels=IDS).loss.backward()
    return {"gradients": gradients(model)}


SCENARIOS = {
    "mlp": run_mlp,
    "llama 5 heads 1 kv": run_llama,
    "llama 3 heads tied": lambda split: run_llama(split, heads=3, kv=3, tied=True),
    "by hand": run_by_hand,
    "inside": run_inside,
    "checkpointed": lambda split: run_checkpointed(split, False),
    "checkpointed reentrant": lambda split: run_checkpointed(split, True),
    "frozen": run_frozen,
}


class Odd(nn.Module):
    """Fails on the rank that it is told, between collectives."""

    failing = -1

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = Mlp((6, 8, 6)).double(), 2
        self.tail = Mlp((6, 8, 6)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if dist.is_initialized() and dist.get_rank() == self.failing:
            raise ValueError("something odd")
        return self.tail(F.gelu(self.scale * x))


def _said(work) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors() -> dict[str, str]:
    rank = dist.get_rank()
    x = {"x": torch.zeros(1, 6, dtype=torch.float64)}

    def make(module, device="cpu", config=None, **kwargs):
        return lambda: tp.make_distributed_shard(module, device, config, example_inputs=x, **kwargs)

    def seeded(seed):
        torch.manual_seed(seed)
        return Mlp((6, 11, 7)).double()

    whole = tp.make_plan(mlp(), 2, x)
    found = {
        "unknown device": _said(make(mlp(), "abacus" if rank == 0 else "cpu")),
        "no such device": _said(make(mlp(), "meta")),
        "several devices": _said(make(mlp(), ["cpu", "cpu"])),
        "unknown keyword": _said(make(mlp(), proces_group=None)),
        "foreign group": _said(make(mlp(), process_group="world")),
        "other values": _said(make(seeded(rank))),
        "other modules": _said(make(seeded(0) if rank == 0 else mlp().float().double())),
        "other plans": _said(make(mlp(), config=whole if rank == 0 else tp.make_plan(mlp(), 2))),
        "one rank": _said(make(mlp() if rank == 0 else nn.ReLU())),
    }
    made = [make(mlp())()]
    found["twice"] = _said(make(made[0]))
    found["state"] = _said(lambda: tp.full_state_dict(made[0]))
    found["copied"] = _said(lambda: copy.deepcopy(made[0]))
    found["pickled"] = _said(lambda: pickle.dumps(made[0].layers[0]))
    made[0].layers[0].register_parameter("extra", nn.Parameter(torch.zeros(2)))
    found["changed"] = _said(lambda: made[0](torch.zeros(1, 6, dtype=torch.float64)))
    quick = dist.new_group(timeout=datetime.timedelta(seconds=1))
    alone = make(mlp(), process_group=quick)()
    found["alone"] = _said(lambda: alone(torch.zeros(1, 6, dtype=torch.float64))) if rank == 0 else "nothing"
    found["after"] = _said(lambda: alone(torch.zeros(1, 6, dtype=torch.float64))) if rank == 0 else "nothing"
    gone = weakref.ref(made[0])
    gc.collect()
    gc.disable()
    made.clear()
    found["freed"] = str(gone() is None)
    gc.enable()
    odd = make(Odd())()
    odd.scale = 3
    found["attribute"] = _said(lambda: odd(torch.zeros(1, 6, dtype=torch.float64)))
    odd.scale = 2
    found["attribute back"] = _said(lambda: odd(torch.zeros(1, 6, dtype=torch.float64)))
    Odd.failing = 1
    found["failing"] = _said(lambda: odd(torch.zeros(1, 6, dtype=torch.float64)))
    return found


def main(rank: int, folder: str, only: tuple[str, ...] | None = None) -> None:
    """One rank, in a process of its own."""
    torch.set_num_threads(1)
    path = Path(folder)
    found = {"no group": _said(lambda: tp.make_distributed_shard(mlp()))}
    timeout = datetime.timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", f"file://{path / 'store'}", world_size=RANKS, rank=rank, timeout=timeout)

    def split(module, inputs, config=None):
        return tp.make_distributed_shard(module, "cpu", config, example_inputs=inputs)

    try:
        for name, scenario in SCENARIOS.items():
            if only is None or name in only:
                found[name] = scenario(split)
        if only is None or "errors" in only:
            found["errors"] = errors()
    except BaseException:
        found["failed"] = traceback.format_exc()
        torch.save(found, path / f"rank{rank}")
        os._exit(1)  # its threads may wait for the other rank
    torch.save(found, path / f"rank{rank}")
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]) or None)
