"""Best state, moving average, accumulated gradients, features and logs of a training; all of them resume from a checkpoint."""

import csv
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_finetune import FAST, digits_net, same_bits

from whet.errors import BackendError, TrainingError, UsageError
from whet.network import Network, parse_type
from whet.training import FinetuneConfig, TrainingData, accuracy, finetune
from whet.training.average import Average
from whet.training.best_state import split_off_held_out


def test_a_training_that_destroys_the_network_returns_the_network_before(learned, digits):
    """The rate is too high by far: every epoch is worse than the beginning."""
    ruined = FinetuneConfig(**{**FAST, "lr": 8.0, "epochs": 2})
    got = finetune(learned.network, digits[0], ruined, test=digits[1])
    assert got.kept_epoch == 0
    assert same_bits(got.network, learned.network)
    assert min(h["held_out"] for h in got.history) > 0.2
    last = finetune(learned.network, digits[0], replace(ruined, holdout=0.0), test=digits[1])
    assert last.kept_epoch is None
    assert last.accuracy < got.accuracy - 0.2


def test_the_held_out_part_is_no_training_data(digits):
    training, held = split_off_held_out(digits[0], FinetuneConfig())
    assert (len(training), len(held)) == (1140, 60)
    every = {x.tobytes() for x in digits[0].inputs["x"]}
    first, second = ({x.tobytes() for x in part.inputs["x"]} for part in (training, held))
    assert first | second == every
    assert split_off_held_out(digits[0].part(np.arange(500)), FinetuneConfig())[1] is None  # 25 samples say nothing
    assert split_off_held_out(digits[0], FinetuneConfig(holdout=0))[1] is None
    with pytest.raises(TrainingError, match="leaves none of the 1200 samples"):
        finetune(digits_net(), digits[0], FinetuneConfig(**FAST, holdout=1.0))


def test_without_labels_the_distance_to_the_teacher_selects(learned, digits):
    got = finetune(digits_net(seed=5), TrainingData(digits[0].inputs), FinetuneConfig(**FAST, distill=1.0), teacher=learned.network)
    assert got.kept_epoch == 4
    errors = [h["held_out"] for h in got.history]
    assert errors[-1] < errors[0] / 2


def test_an_average_is_the_recursion_it_says():
    module = torch.nn.Linear(2, 2)
    average = Average(module, 0.5)
    want = module.weight.detach().clone()
    for step in range(1, 4):
        with torch.no_grad():
            module.weight.add_(1.0)
        average.update(step)
        d = min(0.5, (1 + step) / (10 + step))
        want = d * want + (1 - d) * module.weight.detach()
    torch.testing.assert_close(average.state["weight"], want)
    own = module.weight.detach().clone()
    with average.apply_average():
        torch.testing.assert_close(module.weight.detach(), want)
    torch.testing.assert_close(module.weight.detach(), own)


def test_the_result_with_an_average_is_the_average(digits):
    plain, averaged = (finetune(digits_net(), digits[0], FinetuneConfig(**FAST, ema=e, holdout=0), test=digits[1]) for e in (0.0, 0.9))
    assert not same_bits(plain.network, averaged.network)
    assert averaged.accuracy > 0.88
    assert averaged.history[-1]["loss"] == plain.history[-1]["loss"]  # the trained weights are the same


def test_accumulated_gradients_are_those_of_a_larger_batch():
    """Without batch norms two batches of 32 give the step of one batch of 64."""
    rng = np.random.default_rng(0)
    net = Network("linear")
    x = net.add_input("x", parse_type("f32[N,6]"))
    net.mark_output(net.add("Gemm", x, net.constant(rng.standard_normal((3, 6)).astype(np.float32), "w"), transB=1), "y")
    data = TrainingData({"x": rng.standard_normal((64, 6)).astype(np.float32)}, rng.integers(0, 3, 64))
    how = {"epochs": 3, "lr": 0.1, "device": "cpu", "warmup": 0.0}
    one = finetune(net, data, FinetuneConfig(**how, batch=64))
    two = finetune(net, data, FinetuneConfig(**how, batch=32, accumulate=2))
    # the schedule of the smaller batches is finer: compare the first step only
    first = [finetune(net, data, FinetuneConfig(**{**how, "epochs": 1, "last_lr": 1.0}, batch=b, accumulate=a)) for b, a in ((64, 1), (32, 2))]
    np.testing.assert_allclose(*(f.network.constants["w"].array() for f in first), rtol=1e-5, atol=1e-6)
    assert (one.steps, two.steps) == (3, 6)


def test_features_of_the_teacher_pull_those_of_the_student():
    rng = np.random.default_rng(0)

    def residual(seed):
        r = np.random.default_rng(seed)
        net = Network("residual")
        x = net.add_input("x", parse_type("f32[N,4,6,6]"))
        y = net.add("Conv", x, net.constant(0.3 * r.standard_normal((4, 4, 3, 3)).astype(np.float32), "a"), pads=(1, 1, 1, 1))
        s = net.add("Add", net.add("Relu", y), x, name="sum")
        net.mark_output(net.add("Flatten", net.add("GlobalAveragePool", s)), "out")
        return net

    data = TrainingData({"x": rng.standard_normal((256, 4, 6, 6)).astype(np.float32)})
    teacher = residual(1)

    def distance(net):
        made = [n.clone() for n in (net, teacher)]
        for n in made:
            n.outputs = [n.tensor("sum")]
        a, b = (n.to_torch().eval()(torch.from_numpy(data.inputs["x"])) for n in made)
        return float((a - b).square().mean().detach())

    how = {"epochs": 10, "batch": 32, "lr": 0.1, "device": "cpu", "distill": 1.0, "loss": "mse", "holdout": 0.0}
    plain, guided = (finetune(residual(2), data, FinetuneConfig(**how, features=f), teacher=teacher) for f in (0.0, 1.0))
    assert distance(guided.network) < distance(plain.network) / 2
    assert len(guided.network.outputs) == 1
    with pytest.raises(UsageError, match="there is no teacher"):
        finetune(residual(2), data, FinetuneConfig(features=1.0, device="cpu"))


def test_features_need_common_sums(digits, learned):
    with pytest.raises(TrainingError, match="no sum of residual branches in common"):
        finetune(learned.network, digits[0], FinetuneConfig(**FAST, features=1.0), teacher=learned.network)


def test_a_csv_log_has_a_row_per_epoch_and_continues(digits, tmp_path):
    how = {**FAST, "epochs": 2, "log": str(tmp_path / "logs" / "t.csv"), "checkpoint": str(tmp_path / "c.safetensors")}
    got = finetune(digits_net(), digits[0], FinetuneConfig(**how), test=digits[1])
    with open(how["log"], newline="") as f:
        rows = list(csv.DictReader(f))
    assert [float(r["accuracy"]) for r in rows] == [h["accuracy"] for h in got.history]
    assert list(rows[0]) == ["epoch", "step", "loss", "lr", "seconds", "held_out", "accuracy"]
    finetune(digits_net(), digits[0], FinetuneConfig(**{**how, "log": str(tmp_path / "u.csv")}))  # another log is no other training
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be written"):
        finetune(digits_net(), digits[0], FinetuneConfig(**{**FAST, "epochs": 0.1, "log": str(tmp_path / "file" / "t.csv")}))


def test_a_tensorboard_log_without_tensorboard_names_the_remedy(digits, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BackendError, match="pip install tensorboard"):
        finetune(digits_net(), digits[0], FinetuneConfig(**FAST, log=str(tmp_path / "events")))


def test_everything_resumes_with_the_same_bits(digits, tmp_path):
    """Stopped after each epoch by an error in the progress report: average, best state and accumulated batches continue."""
    config = FinetuneConfig(**{**FAST, "epochs": 3}, ema=0.95, accumulate=3, checkpoint_seconds=0.0)
    whole = finetune(digits_net(), digits[0], config)
    stopping = replace(config, checkpoint=str(tmp_path / "c.safetensors"))

    class Stop(Exception):
        pass

    def stop(done, total, stage):
        if done >= 40:
            raise Stop

    with pytest.raises(Stop):
        finetune(digits_net(), digits[0], stopping, progress=stop)
    rest = finetune(digits_net(), digits[0], stopping)
    assert 0 < rest.resumed_at < whole.steps
    assert same_bits(rest.network, whole.network)
    assert rest.kept_epoch == whole.kept_epoch
    assert accuracy(rest.network, digits[1]) == accuracy(whole.network, digits[1])


@pytest.mark.parametrize(("settings", "text"), [
    ({"ema": 1.0}, "ema is from 0 to below 1"), ({"accumulate": 0}, "accumulate is 1 or more"), ({"features": -1.0}, "features is 0 or more"),
    ({"holdout": 2.0}, "holdout is from 0 to 1"), ({"batch_norms": "x"}, "batch_norms is one of insert, keep"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(settings, text):
    with pytest.raises(UsageError, match=text):
        FinetuneConfig(**settings)
