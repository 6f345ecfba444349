"""A split model that was changed against the unsplit one, changed alike."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

import tensor_parallel as tp


def assert_equal_tensors(found, wanted, tolerance):
    """Two mappings of names to tensors: the same names in the same order, and values."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal_models(split, reference, call, steps=2):
    """Outputs, gradients, and what AdamW makes of them in `steps` steps. call: model -> tensor."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, split)]
    for _ in range(steps):
        outputs = []
        for model, optimizer in zip((reference, split), optimizers, strict=True):
            optimizer.zero_grad()
            output = call(model)
            output.pow(2).mean().backward()
            outputs.append(output.detach())
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-11, rtol=1e-11)
        gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        found = tp.full_gradients(split)
        assert sorted(found) == sorted(gradients)
        assert_equal_tensors({name: found[name] for name in gradients}, gradients, 1e-11)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_tensors(split.state_dict(), reference.state_dict(), 1e-8)


def assert_equal_files(split, reference, folder, tolerance=1e-8):
    """What `save_pretrained` writes: the same files with the same tensors, the same config."""
    for model, name in ((reference, "reference"), (split, "split")):
        model.save_pretrained(folder / name)
    wanted, found = (sorted((folder / name).iterdir()) for name in ("reference", "split"))
    assert [path.name for path in found] == [path.name for path in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs.suffix == ".safetensors":
            assert_equal_tensors(load_file(mine), load_file(theirs), tolerance)
        else:
            assert mine.read_text() == theirs.read_text()
