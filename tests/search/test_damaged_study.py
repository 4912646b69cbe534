"""A study file that is damaged, of another program, locked or of another version of Optuna: whet's error names the file and the remedy."""

import os
import sqlite3

import pytest

pytest.importorskip("optuna", reason="the search needs Optuna: pip install 'whet[search]'")

from whet.errors import BuildError
from whet.search.recipe.space import Dimension, SearchSpace
from whet.search.study.study import Study

SPACE = SearchSpace((Dimension("share", most=0.5), Dimension("kind", ("a", "b"))), {}, {}, {}, {})


def use(path, space=SPACE):
    study = Study(path, space, higher_is_better=True, sampler="random", seed=0, startup=2)
    list(study.list_unfinished())
    for _ in range(2):
        number, _params = study.ask()
        study.tell(number, (1.0, 2.0), {"misses": [0.1]})
        study.params(number)
        study.attributes(number)
    return study.numbers()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.sqlite3"
    use(path)
    return path.read_bytes()


CONTENTS = {
    "text": lambda data: b"no database" * 900,
    "half": lambda data: data[: len(data) // 2],
    "noise": lambda data: data[:40000] + bytes(range(256)) * 80 + data[60480:],
}
STATEMENTS = {
    "another version": "UPDATE alembic_version SET version_num = 'v9.9.9'",
    "a distribution without a type": "UPDATE trial_params SET distribution_json = '{}'",
    "a distribution that is no JSON": "UPDATE trial_params SET distribution_json = 'x'",
    "an unknown state": "UPDATE trials SET state = 'HAPPY'",
    "an attribute that is no JSON": "UPDATE trial_user_attributes SET value_json = '{'",
    "an unknown direction": "UPDATE study_directions SET direction = 'X'",
    "a date that is none": "UPDATE trials SET datetime_start = 'yesterday'",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_no_database_is_refused(name, written, tmp_path):
    path = tmp_path / "study.sqlite3"
    path.write_bytes(CONTENTS[name](written))
    with pytest.raises(BuildError, match=r"the study .*study\.sqlite3 cannot be read or written: .* .--fresh restarts"):
        use(path)


@pytest.mark.parametrize("name", STATEMENTS)
def test_values_of_others_are_refused(name, written, tmp_path):
    path = tmp_path / "study.sqlite3"
    path.write_bytes(written)
    with sqlite3.connect(path) as db:
        db.execute(STATEMENTS[name])
    db.close()
    with pytest.raises(BuildError, match=r"the study .*study\.sqlite3 holds values that Optuna .* does not write: .* --fresh"):
        use(path)


def test_a_folder_or_a_pipe_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(BuildError, match=f"the study .*{name} cannot be read or written"):
            use(tmp_path / name)
