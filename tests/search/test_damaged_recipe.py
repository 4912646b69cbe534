"""Recipes of whet auto with one missing or wrong value: refused with a UsageError, or read as written."""

from support.damage import damaged
from support.search_case import RECIPE
from whet.errors import UsageError
from whet.search import recipe_from

WHOLE = {
    **RECIPE, "metric": "top1", "device": "cpu", "prefer": "latency", "finetune": {"epochs": 1}, "higher_is_better": True,
    "target": {"latency": "0.5x", "throughput": 200, "memory": "5 MiB", "accuracy_drop": 1},
    "space": {"width": {"step": 0.25, "most": 0.75, "multiple": 4}, "depth": True, "precision": ["fp32", "int8"], "batch": [1, 4]},
}  # fmt: skip


def test_recipes(case):
    recipe_from(WHOLE, case)
    refused = []
    for what, data in damaged(WHOLE):
        try:
            recipe_from(data, case)
        except UsageError:
            refused.append(what)
    assert {"model dropped", "target = []", "target/memory = [[1]]", "space/width = 'x'", "search/trials = nan", "threads = 'x'"} <= set(refused)
    assert {"finetune dropped", "search/seed = 3", "threads dropped", "metric dropped"} & set(refused) == set()
