"""What the package promises about itself: a light import, a sorted and complete list of public names."""

from __future__ import annotations

import subprocess
import sys

import tensor_parallel as tp

HEAVY = ("transformers", "peft", "torch.distributed.tensor", "torch.distributed.fsdp", "gguf", "accelerate")


def _modules_after(code: str) -> set[str]:
    code = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(run.stdout.split())


def test_the_import_brings_nothing_heavy() -> None:
    torch_alone, ours = _modules_after("import torch"), _modules_after("import tensor_parallel")
    assert "tensor_parallel" in ours
    assert not [name for name in ours if name.startswith(HEAVY) and name not in torch_alone]
    assert not [name for name in ours - torch_alone if name.startswith("torch.distributed")]


def test_public_names_are_sorted_and_each_is_there() -> None:
    names = list(tp.__all__)
    assert names == sorted(set(names))
    for name in names:
        assert getattr(tp, name) is not None
    assert set(names) <= set(dir(tp))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(tp, "no_such_name")
