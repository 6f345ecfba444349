"""transformers' Trainer and accelerate on a split model in threads: the unsplit run."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from families import build

import tensor_parallel as tp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=12):
        generator = torch.Generator().manual_seed(2)
        self.rows = torch.randint(3, 101, (count, 9), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(folder, **more):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=3,
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )


def trained(model, folder, gpus=None, **more):
    settings = arguments(folder, **more)
    if gpus is not None:
        settings._setup_devices  # noqa: B018
        settings._n_gpu = gpus
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=Rows())
    trainer.train()
    logs = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
    return trainer, torch.tensor(logs, dtype=torch.float64)


def pair(family="llama", ranks=2, dtype=torch.float64, **changes):
    reference = build(family, **changes).to(dtype)
    return reference, tp.tensor_parallel(copy.deepcopy(reference), ["cpu"] * ranks)


def assert_states_equal(split, reference, tolerance):
    for (name, mine), theirs in zip(split.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(
            mine, theirs, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "how",
    [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}],
    ids=lambda how: next(iter(how), "plain"),
)
def test_three_steps(family, how, tmp_path):
    reference, split = pair(family, 3)
    _, theirs = trained(reference, tmp_path / "a", **how)
    _, mine = trained(split, tmp_path / "b", **how)
    assert len(theirs) == 3
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)  # the log rounds
    assert_states_equal(split, reference, 1e-8)


def test_mixed_precision(tmp_path):
    reference, split = pair("llama", 2, torch.float32)
    _, theirs = trained(reference, tmp_path / "a", bf16=True)
    _, mine = trained(split, tmp_path / "b", bf16=True)
    torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)


def test_several_visible_gpus_do_not_make_it_data_parallel(tmp_path):
    reference, split = pair("llama", 2)
    trainer, theirs = trained(reference, tmp_path / "a")
    trainer, mine = trained(split, tmp_path / "b", gpus=2)
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_saves_and_resumes(tmp_path):
    reference, split = pair("llama", 2)
    trained(reference, tmp_path / "a")
    settings = {"save_strategy": "steps", "save_steps": 2}
    first = copy.deepcopy(split)
    trainer = transformers.Trainer(model=split, args=arguments_with(tmp_path / "b", **settings), train_dataset=Rows())
    trainer.train()
    assert_states_equal(split, reference, 1e-8)
    again = transformers.Trainer(model=first, args=arguments_with(tmp_path / "b", **settings), train_dataset=Rows())
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_states_equal(first, reference, 1e-8)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b" / "checkpoint-3", dtype=torch.float64)
    assert_states_equal(loaded, reference, 1e-8)


def arguments_with(folder, **changes):
    settings = arguments(folder)
    for name, value in changes.items():
        setattr(settings, name, transformers.trainer_utils.SaveStrategy(value) if name == "save_strategy" else value)
    return settings


def test_accelerate_prepares_it():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    reference, split = pair("llama", 2, torch.float32)
    losses = []
    for model in (reference, split):
        AcceleratorState._reset_state(True)  # one a process: Trainer's tests have left theirs
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        found = []
        for _ in range(2):
            rows = Rows().rows[:2]
            loss = prepared(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    torch.testing.assert_close(losses[1], losses[0], atol=2e-2, rtol=2e-2)
    rows = Rows().rows[:2]
    assert split(input_ids=rows).logits.dtype == torch.float32
