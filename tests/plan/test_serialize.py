"""Plans as files."""

import dataclasses
import json

import pytest
from hand_plans import mlp_plan
from hypothesis import given, settings
from plan_strategies import plans

from tensor_parallel.errors import PlanError
from tensor_parallel.plan import Plan


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_plan_comes_back_equal(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert list(again.factors) == list(plan.factors)
    assert again.to_json() == text


def test_a_saved_plan_loads_and_nothing_else_is_left(tmp_path):
    plan = mlp_plan()
    path = tmp_path / "plan.json"
    path.write_text("an older file")
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    lines = path.read_text().splitlines()
    assert any('"layers.0.up.weight"' in line and '{"layers.0.hidden": 10}' in line for line in lines)


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    broken = dataclasses.replace(mlp_plan(), paths=(object(),))
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def change(path, value):
    """A change of the JSON data at `path`; value ... deletes."""

    def apply(data):
        for key in path[:-1]:
            data = data[key]
        if value is ...:
            del data[path[-1]]
        else:
            data[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["version"], 2, 'plan["version"]: given 2, required version 1'),
        (["version"], ..., 'plan["version"]'),
        (["format"], "other", 'plan["format"]: given "other"'),
        (["tensors"], ..., "field 'tensors' is missing"),
        (["extra"], 1, "unknown field 'extra'"),
        (["world_size"], 0, 'plan["world_size"]: given 0'),
        (["world_size"], True, "given true, required an integer"),
        (["factors", "layers.0.hidden", "units"], 1.5, '["layers.0.hidden"]["units"]: given 1.5'),
        (["factors", "layers.0.hidden", "colour"], 1, "unknown field 'colour'"),
        (["tensors", "layers.1.up.weight", "nbytes"], ..., "[\"layers.1.up.weight\"]: field 'nbytes' is missing"),
        (["tensors", "layers.1.up.weight", "layout"], [[[{"a": 1, "b": 2}]]], '["layout"][0][0][0]: given'),
        (["tensors", "layers.1.up.weight", "layout"], "whole", '["layers.1.up.weight"]["layout"]: given "whole"'),
        (["tensors", "layers.1.up.weight", "layout"], [-3], '["layout"][0]: given -3'),
        (["tensors", "layers.1.up.weight", "rank0_only"], 1, "required true or false"),
        (["modules", "layers.0.down", "outputs", 0, "before", "kind"], "sum", "one of replicate, shard, partial"),
        (["modules", "layers.0.down", "inputs", 0, "before", "dims"], [[1]], "required a dim and its layout"),
        (["traffic", 0, "op"], "broadcast", 'plan["traffic"][0]["op"]: given "broadcast"'),
        (["paths"], [1], 'plan["paths"][0]: given 1, required a string'),
        (["modules"], [], 'plan["modules"]: given [], required an object'),
    ],
)
def test_wrong_fields_are_named_with_their_place(path, value, says):
    data = json.loads(mlp_plan().to_json())
    change(path, value)(data)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert says in str(caught.value)
    assert "make_plan" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_broken_files_are_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"broken\.json"):
        Plan.load(path)
