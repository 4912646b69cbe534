"""Recipes: accepted values, and the error messages for mistakes."""

from __future__ import annotations

import pytest

from support.search_case import RECIPE, recipe_with
from whet.errors import UsageError
from whet.search import load_recipe, recipe_from
from whet.search.recipe.fields import Amount
from whet.search.stages.training_options import make_qat_settings


def test_a_recipe_round_trips_through_plain_data(case, tmp_path):
    recipe = recipe_with(case, tmp_path, target={"latency": "0.5x", "memory": "3 MiB", "energy": 2.5, "throughput": "2x", "accuracy_drop": 0.5},
                         space__fusion=["all", "-fuse_gemm_add"], shapes={"x": "1x64"}, search__timeout="2 min")  # fmt: skip
    assert recipe.target.latency == Amount(0.5, relative=True)
    assert recipe.target.memory == Amount(3 * 2**20)
    assert recipe.target.energy == Amount(2.5)
    assert recipe.search.timeout == 120
    assert recipe.shapes == {"x": (1, 64)}
    assert recipe_from(recipe.to_plain()) == recipe
    assert recipe_from(recipe.to_plain()).identity() == recipe.identity()


def test_paths_are_relative_to_the_recipes_folder(case):
    recipe = load_recipe(case / "recipe.yaml")
    assert recipe.model == str(case / "model.onnx")
    assert recipe.data.score == str(case / "score.npz")
    assert recipe.out == str(case / "recipe.auto")


def test_the_identity_of_a_search_depends_on_file_contents(case, tmp_path):
    before = recipe_with(case, tmp_path).identity()
    assert recipe_with(case, tmp_path, search__trials=99, target={"latency": "0.9x"}).identity() == before
    assert recipe_with(case, tmp_path, space__batch=[2]).identity() != before
    other = tmp_path / "calibrate.npz"
    other.write_bytes((case / "calibrate.npz").read_bytes())
    assert recipe_with(case, tmp_path, data__calibrate=str(other)).identity() == before, "the same bytes elsewhere"
    other.write_bytes((case / "judge.npz").read_bytes())
    assert changed(before, recipe_with(case, tmp_path, data__calibrate=str(other)).identity()) == ["data.calibrate"]


def changed(before: dict, after: dict) -> list[str]:
    return [k for k in {**before, **after} if before.get(k) != after.get(k)]


def test_folders_functions_and_external_weights_are_part_of_the_identity(case, tmp_path):
    import onnx

    for name in ("calibrate.npz", "score.npz", "judge.npz"):
        (tmp_path / name).write_bytes((case / name).read_bytes())
    (tmp_path / "mine.py").write_text("def metric(predict):\n    return 1.0\n")
    (tmp_path / "prep.txt").write_text("scale: 1/255\n")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    onnx.save(onnx.load(case / "model.onnx"), tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)

    def identity() -> dict:
        return recipe_with(tmp_path, tmp_path / "w", metric="python:mine:metric", data__train="images", data__preprocess="prep.txt").identity()

    before = identity()
    for path, key in (("mine.py", "metric"), ("prep.txt", "data.preprocess"), ("images/cat/1.png", "data.train"), ("w.bin", "model")):
        with (tmp_path / path).open("ab") as f:
            f.write(b"\n")
        after = identity()
        assert changed(before, after) == [key]
        before = after


@pytest.mark.parametrize(("change", "text"), [
    ({"targte": {"latency": 1}}, r"unknown key 'targte'\. Did you mean 'target'\?"),
    ({"target__latancy": "0.5x"}, r"unknown key 'target\.latancy'\. Did you mean 'latency'\? Known keys: latency, throughput"),
    ({"space__width__stepp": 0.1}, r"unknown key 'space\.width\.stepp'\. Did you mean 'step'\?"),
    ({"target__latency": "0.5 parsec"}, r"'target\.latency' is a time such as 3 ms, or a multiple .* such as 0\.5x, not '0\.5 parsec'"),
    ({"target__latency": 0}, r"'target\.latency' is above zero, not 0"),
    ({"target": {}}, r"'target' is empty: give at least one of latency, throughput, memory, energy, net_energy, engine_size, accuracy_drop"),
    ({"space__precision": ["fp32", "int9"]}, r"'space\.precision\[1\]' is one of fp32, bf16, fp16, int8, fp8, not 'int9'\. Did you mean 'int8'\?"),
    ({"space__precision": ["fp8"]}, r"no kernel of the backend 'cpu' computes in fp8"),
    ({"baselines": ["fp8"]}, r"'baselines': no kernel of the backend 'cpu' computes in fp8"),
    ({"space__importance": ["tailor2"]}, r"'space\.importance' is one of l1, .* or python:MODULE:FUNCTION, not 'tailor2'\. Did you mean 'taylor2'"),
    ({"search__trials": 0}, r"'search\.trials' is an integer of at least 1, not 0"),
    ({"search__trials": True}, r"'search\.trials' is an integer of at least 1, not True"),
    ({"search__timeout": "soon"}, r"'search\.timeout' is a time such as 90 s, 15 min or 2 h, not 'soon'"),
    ({"device": "gpu"}, r"'device' is one of cpu, cuda or cuda:N, null, not 'gpu'"),
    ({"model": "nothing.onnx"}, r"'model': no such file: .*nothing\.onnx"),
    ({"data__score": "score\0.npz"}, r"'data\.score' has a null character"),
    ({"model": "\0"}, r"'model' has a null character"),
    ({"data__score": "nothing.npz"}, r"'data\.score': no such file or folder: .*nothing\.npz"),
    ({"data": {"calibrate": "calibrate.npz"}}, r"'data\.score' is missing: top1 needs labelled data"),
    ({"data": {}}, r"the key 'data\.calibrate' is missing"),
    ({"metric": max}, r"'metric': a function is given as python:MODULE:FUNCTION"),
    ({"metric": "top5"}, r"'metric' is top1 or python:MODULE:FUNCTION, not 'top5'"),
    ({"shapes": {"x": "1xN"}}, r"'shapes\.x' is a shape such as 1x3x224x224, not '1xN'"),
    ({"space": [1]}, r"space: expected keys with values, not \[1\]"),
    ({"finetune": {"epoch": 3}}, r"unknown key 'finetune\.epoch'\. Did you mean 'epochs'\?"),
    ({"finetune": {"distill": 3}}, r"'finetune': distill is from 0 to 1, not 3"),
    ({"qat": "sometimes"}, r"'qat' is one of auto, always, never, not 'sometimes'"),
    ({"qat": {"when": "allways"}}, r"'qat' is one of auto, always, never, not 'allways'\. Did you mean 'always'\?"),
    ({"qat": {"epoch": 3}}, r"unknown key 'qat\.epoch'\. Did you mean 'epochs'\?"),
    ({"qat": {"threshold": -1}}, r"'qat\.threshold' is a number of at least 0, not -1"),
    ({"qat": {"lr": 0}}, r"'qat': lr is above 0, not 0"),
    ({"qat": 3}, r"'qat' is one of auto, always, never, not 3"),
    ({"prefer": "speed"}, r"'prefer' is one of latency, accuracy, not 'speed'"),
    ({"space__fusion": ["all", "-fuse_gem_add"]}, r"'space\.fusion': there is no pass 'fuse_gem_add'\. Did you mean"),
    ({"space__batch": [1, 1]}, r"'space\.batch' is a list of different values"),
])  # fmt: skip
def test_mistakes_are_named(case, tmp_path, change, text):
    with pytest.raises(UsageError, match=text):
        recipe_with(case, tmp_path, **change)


@pytest.mark.parametrize(("written", "text"), [
    ("model: a\nmodel: b\n", r"r\.yaml: the key 'model' is given twice"),
    ("target:\n  latency: 1\n  latency: 2\n", r"r\.yaml: the key 'latency' is given twice \(line 2"),
    ("model: [", r"r\.yaml: malformed YAML"),
    ("- a\n", r"r\.yaml: the recipe: expected keys with values"),
    ("", r"r\.yaml: the recipe: expected keys with values, not nothing"),
    ("model: !!python/object:os.system x\n", r"r\.yaml: malformed YAML"),
    ("model: [&a0 [x, x]" + "".join(f", &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 12)) + "]\n", r"r\.yaml: its aliases expand to more than"),
    ("model: " + "[" * 5000 + "]" * 5000, r"r\.yaml: its lists and mappings are nested too deeply"),
])  # fmt: skip
def test_invalid_recipe_files(tmp_path, written, text):
    (tmp_path / "r.yaml").write_text(written)
    with pytest.raises(UsageError, match=text):
        load_recipe(tmp_path / "r.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"the recipe .*none\.yaml cannot be read"):
        load_recipe(tmp_path / "none.yaml")


def test_width_and_finetuning_can_be_switched_off(case, tmp_path):
    recipe = recipe_with(case, tmp_path, space__width=False)
    assert recipe.space.width is None
    assert recipe_from(recipe.to_plain()).space.width is None
    assert recipe.finetune is None
    assert recipe_from({**RECIPE, "finetune": True}, case).finetune == {"epochs": 10.0, "distill": 0.5}


def test_training_for_int8_is_a_word_or_settings(case, tmp_path):
    assert recipe_with(case, tmp_path).qat["when"] == "auto"
    for off in ("never", False, {"when": "never", "epochs": 3}):
        recipe = recipe_with(case, tmp_path, qat=off)
        assert recipe.qat is None
        assert recipe_from(recipe.to_plain()).qat is None
    recipe = recipe_with(case, tmp_path, qat={"epochs": 4, "threshold": 0.2}, finetune={"epochs": 7, "batch": 32, "augment": "flip"})
    assert recipe_from(recipe.to_plain()) == recipe
    assert (recipe.qat["when"], recipe.qat["threshold"], recipe.qat["epochs"]) == ("auto", 0.2, 4)
    settings = make_qat_settings(recipe.qat, recipe.finetune)
    assert (settings["batch"], settings["augment"], settings["epochs"], settings["lr"]) == (32, "flip", 4, 1e-4), "the data are finetune's"
    assert "threshold" not in settings
