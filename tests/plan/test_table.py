"""Plans for people."""

from dataclasses import replace

import pytest
from hand_plans import mlp_plan

from tensor_parallel.errors import PlanError
from tensor_parallel.layout import DimLayout, Part, Segment, TensorLayout
from tensor_parallel.plan import Factor, LocalSize, ModulePlan, TensorPlan
from tensor_parallel.plan.table import fold, layout_text


def test_look_alike_rows_fold_into_one():
    rows = [(f"layers.{i}.experts.{e}.w", ("a",)) for i in range(3) for e in range(4)]
    rows += [("layers.3.experts.0.w", ("b",)), ("norm", ("a",)), ("layers.5.experts.0.w", ("a",))]
    assert fold(rows) == [
        ("layers.0-2.experts.0-3.w", ("a",), 12),
        ("layers.3.experts.0.w", ("b",), 1),
        ("norm", ("a",), 1),
        ("layers.5.experts.0.w", ("a",), 1),
    ]


def test_gaps_show_in_a_folded_name():
    assert fold([(f"h.{i}.w", ()) for i in (0, 1, 2, 5, 7, 10)]) == [("h.0-2,5,7,10.w", (), 6)]
    assert fold([("h.0.w", ()), ("h.w", ()), ("h.1.w", ())]) == [("h.0-1.w", (), 2), ("h.w", (), 1)]


def test_the_table_names_every_parameter_once():
    text = str(mlp_plan(layers=30))
    assert "layers.0-29.up.weight" in text
    assert "dim 0 by hidden unit (10 units)" in text
    assert "on rank 0, zeros elsewhere" in text
    assert "added before a sum over the ranks" in text
    assert "all-reduce │ 30 " in text
    assert len(text.splitlines()) < 25


def test_heads_and_packed_segments_in_words():
    head = Factor("h", 9, None, "head")
    q = Segment((Part(9, "h"), Part(64)))
    assert (
        layout_text(TensorLayout((DimLayout((q,)), DimLayout.whole(576))), {"h": head})
        == "dim 0 by head (9 units of 64)"
    )
    packed = DimLayout((q, Segment((Part(64),)), Segment((Part(64),))))
    assert (
        layout_text(TensorLayout((packed,)), {"h": head})
        == "dim 0 in 3 segments, 2 of them whole, by head (9 units of 64)"
    )


def test_explain_says_cuts_borders_sizes_and_reasons():
    plan = mlp_plan()
    text = plan.explain("layers.0.down")
    assert "layers.0.down.weight (6 x 10) is cut: dim 1 by hidden unit (10 units)." in text
    assert "units of layers.0.hidden by rank: 0-4; 5-9" in text
    assert "output is summed over the ranks (all-reduce)" in text
    assert "adds it once (added before a sum over the ranks)" in text
    assert "1 all-reduce of 144 B in one forward" in text
    assert "0-3; 4-6; 7-9" in plan.explain("layers.0.down.weight", world_size=3)
    assert "layers.1" not in text


def test_explain_a_whole_tensor_and_a_local_integer():
    plan = mlp_plan()
    plan = replace(
        plan,
        tensors={
            **plan.tensors,
            "norm.weight": TensorPlan(
                ("norm.weight", "n2.weight"), TensorLayout((DimLayout.whole(6),)), 24, reason="a norm over it"
            ),
        },
        modules={
            "layers.0.up": ModulePlan(
                attributes=(LocalSize("config.hidden", DimLayout((Segment((Part(10, "layers.0.hidden"),)),))),)
            )
        },
    )
    assert "is whole on every rank: a norm over it. It is tied to n2.weight" in plan.explain("norm.weight")
    assert "reads config.hidden (10) as the rank's own: by hidden unit" in plan.explain("layers.0.up")


def test_explain_an_unknown_name():
    with pytest.raises(PlanError, match=r"no module or tensor 'layers.0.donw'.*nearest: 'layers.0.down'"):
        mlp_plan().explain("layers.0.donw")
