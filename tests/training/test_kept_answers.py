"""Views: a fixed number of augmented forms per sample is cycled through, and a teacher computes each once."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_graphed import data, small

from whet.errors import UsageError
from whet.training import FinetuneConfig, finetune
from whet.training.answers import Answers
from whet.training.data import Batches
from whet.training.feeding import Feeder

HOW = {"epochs": 5, "batch": 48, "lr": 0.02, "device": "cpu", "distill": 0.5, "augment": "crop:2,flip", "seed": 3}


def weights(done):
    return {n: t.array() for n, t in done.network.constants.items() if t.weight is not None}


def alike(a, b, **how):
    return all(np.allclose(x, weights(b)[n], **how) for n, x in weights(a).items())


def pictures(views, epoch):
    """The forms of each sample that an epoch shows, by sample index."""
    feeder = Feeder(small(), data(), batch=48, device=torch.device("cpu"), augment="crop:2,flip", seed=3, views=views)
    shown = {}
    for feeds, labels, at in feeder.epoch(epoch):
        assert labels.tolist() == data().labels[at].tolist()
        shown |= dict(zip(at.tolist(), feeds["x"].numpy(), strict=True))
    return shown


def test_epochs_cycle_through_the_views():
    first, other, again, fresh = pictures(2, 0), pictures(2, 1), pictures(2, 2), pictures(0, 2)
    both = sorted(first.keys() & again.keys() & other.keys() & fresh.keys())
    assert len(both) > 100
    assert all(np.array_equal(first[i], again[i]) for i in both)
    assert sum(np.array_equal(first[i], other[i]) for i in both) < len(both) / 4
    assert sum(np.array_equal(first[i], fresh[i]) for i in both) < len(both) / 4


def test_a_view_in_order_equals_that_of_its_epochs():
    feeder = Feeder(small(), data(), batch=48, device=torch.device("cpu"), augment="crop:2,flip", seed=3, views=3)
    inorder = np.concatenate([feeds["x"].numpy() for feeds in feeder.view(1, 100)])
    assert len(inorder) == len(data())
    assert all(np.array_equal(inorder[i], x) for i, x in pictures(3, 4).items())


def test_cached_teacher_outputs_train_like_computed_ones(monkeypatch):
    views = []
    view = Feeder.view
    monkeypatch.setattr(Feeder, "view", lambda self, number, batch: (views.append(number), view(self, number, batch))[1])
    kept = finetune(small(), data(), FinetuneConfig(**HOW, views=2), teacher=small(1))
    assert views == [0, 1]
    monkeypatch.setattr(Answers, "get_outputs", lambda self, epoch, samples: ())
    each = finetune(small(), data(), FinetuneConfig(**HOW, views=2), teacher=small(1))
    assert alike(kept, each, rtol=1e-4, atol=1e-5)
    assert not alike(kept, finetune(small(), data(), FinetuneConfig(**HOW), teacher=small(1)), rtol=1e-4, atol=1e-5)


def test_a_killed_training_resumes_with_the_same_views(tmp_path):
    class Killed(Exception):
        """During the third epoch."""

    def killing(done, total, stage):
        if done == 20:
            raise Killed

    how = {**HOW, "epochs": 6, "batch": 32, "views": 2}
    whole = finetune(small(), data(), FinetuneConfig(**how), teacher=small(1))
    kept = FinetuneConfig(**how, checkpoint=str(tmp_path / "c.safetensors"), checkpoint_seconds=0)
    with pytest.raises(Killed):
        finetune(small(), data(), kept, teacher=small(1), progress=killing)
    on = finetune(small(), data(), kept, teacher=small(1))
    assert 0 < on.resumed_at <= 20
    assert alike(whole, on, rtol=0, atol=0)


def test_user_batches_have_no_views():
    some = Batches([(data().inputs["x"][:8], data().labels[:8])], ("x",))
    with pytest.raises(UsageError, match="have no sample indices"):
        finetune(small(), some, FinetuneConfig(device="cpu", views=4))
    with pytest.raises(UsageError, match="views is 0 or more"):
        FinetuneConfig(views=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for PyTorch")
def test_cached_teacher_outputs_are_used_in_the_recorded_step():
    torch.backends.cudnn.allow_tf32 = False
    how = {**HOW, "device": "cuda", "views": 2}
    plain, graphed = (finetune(small(), data(), FinetuneConfig(**how, graph=g), teacher=small(1)) for g in (False, True))
    assert alike(plain, graphed, rtol=2e-3, atol=2e-4)


def test_rectangles_of_other_samples_are_pasted():
    from whet.training.augment import Augment

    x = torch.arange(40, dtype=torch.uint8).reshape(40, 1, 1, 1).expand(40, 3, 16, 16)
    shares = []
    for seed in range(30):
        y = Augment(cutmix=50)(x, torch.Generator().manual_seed(seed))
        for n in range(40):
            strange = (y[n] != n)[0]
            assert len(torch.unique(y[n])) <= 2  # from one other sample
            assert torch.equal(y[n, 0], y[n, 1])
            if strange.any():  # a rectangle
                rows, columns = strange.any(1), strange.any(0)
                assert torch.equal(strange, rows[:, None] & columns[None, :])
            shares.append(float(strange.float().mean()))
    assert 0.4 < np.mean([s > 0 for s in shares]) < 0.52
    assert max(shares) > 0.7
    assert 0.2 < np.mean([s for s in shares if s]) < 0.5


def test_views_paste_the_same_view_of_the_other_sample():
    """In a view, the pasted part is that of the other sample in the same view."""
    how = {"batch": 48, "device": torch.device("cpu"), "seed": 3, "views": 2}
    plain = Feeder(small(), data(), augment="", **how)
    mixed = Feeder(small(), data(), augment="cutmix:100", **how)
    alone, both = (np.concatenate([f["x"].numpy() for f in feeder.view(1, 64)]) for feeder in (plain, mixed))
    drawn = mixed.draw(1)
    changed = 0
    for i, other in enumerate(drawn.other.tolist()):
        mine, theirs = both[i] == alone[i], both[i] == alone[other]
        assert (mine | theirs).all()
        changed += not mine.all()
    assert changed > 150


def test_pasted_images_have_no_labels():
    with pytest.raises(UsageError, match="cutmix needs distill=1"):
        FinetuneConfig(augment="crop:4,cutmix:50", distill=0.9)
