"""Gradual pruning during a training: the shares of the schedule, exact cuts of weights, optimizer state and averages, resumption, refusals."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_finetune import digits_net, same_bits, weights_of

import whet
from whet.cli import group
from whet.errors import PruneError, TrainingError, UsageError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.pruning import apply_recipe, count_flops, cut, load_recipe, zero_channels
from whet.pruning.order import read_history
from whet.training import FinetuneConfig, NetworkModule, TrainingData, finetune, train_quantization_aware
from whet.training.batch_norms import insert_batch_norms
from whet.training.gradual import GradualPruning, compute_removed_share, get_optimizer_state
from whet.training.loop import make_optimizer
from whet.training.module import with_weights
from whet.training.tuning import select_device

CPU = torch.device("cpu")
SHORT = {"batch": 16, "epochs": 7, "lr": 0.05, "device": "cpu", "holdout": 0.3, "prune_to": "flops=0.5x", "prune_steps": 4}


def folded_net(channels=16, seed=0):
    """x[N,1,8,8] -> a convolution, a residual block, pooling, ten probabilities; biases and no batch norms, as exporters write it."""
    rng = np.random.default_rng(seed)
    net = Network("folded")

    def conv(x, name, inputs):
        w = rng.standard_normal((channels, inputs, 3, 3)) * np.sqrt(2 / (9 * inputs))
        b = rng.standard_normal(channels) / 10
        return net.add("Conv", x, net.constant(w.astype(np.float32), f"{name}.weight"), net.constant(b.astype(np.float32), f"{name}.bias"),
                       pads=(1, 1, 1, 1), name=name)  # fmt: skip

    x = net.add("Relu", conv(net.add_input("x", parse_type("f32[N,1,8,8]")), "stem", 1))
    y = net.add("Add", conv(net.add("Relu", conv(x, "inner", channels)), "outer", channels), x)
    y = net.add("Flatten", net.add("GlobalAveragePool", y))
    w = net.constant((rng.standard_normal((10, channels)) / 2).astype(np.float32), "fc.weight")
    net.mark_output(net.add("Softmax", net.add("Gemm", y, w, net.constant(np.zeros(10, np.float32), "fc.bias"), transB=1)), "out")
    return net


@pytest.fixture(scope="module")
def data():
    """160 noisy copies of ten random images."""
    rng = np.random.default_rng(1)
    labels = np.arange(160) % 10
    x = rng.standard_normal((10, 1, 8, 8))[labels] + 0.3 * rng.standard_normal((160, 1, 8, 8))
    return TrainingData({"x": x.astype(np.float32)}, labels.astype(np.int64))


def test_the_schedules():
    assert [compute_removed_share("cubic", k, 4) for k in range(5)] == [0, 1 - 27 / 64, 1 - 8 / 64, 1 - 1 / 64, 1]  # s_f + (s_i - s_f) (1 - t)^3
    assert [compute_removed_share("linear", k, 4) for k in range(5)] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(("optimizer", "inserted"), [("sgd", True), ("adamw", False)])
def test_a_cut_network_equals_the_zeroed_one(data, optimizer, inserted):
    """At the moment of each cut: outputs, momenta and further states, against the zeroed network and against cuts of networks with these values."""
    net = folded_net()
    config = FinetuneConfig(**{**SHORT, "lr": 0.002}, optimizer=optimizer, prune_schedule="linear")
    student, norms = insert_batch_norms(net, data, batch=16, device=CPU) if inserted else (net, [])
    assert len(norms) == (3 if inserted else 0)
    gradual = GradualPruning(net, student, norms, data, config, CPU)
    module = NetworkModule(student)
    moments = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq"]}[optimizer]
    x = torch.from_numpy(data.inputs["x"][:32])
    cuts = 0
    for done in range(1, 5):
        optimizer_now = make_optimizer(module, config)
        for _ in range(2):  # weights and momenta that differ from those of the start
            optimizer_now.zero_grad()
            torch.log(module(x)).sum().neg().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer_now.step()
        module.eval()
        present = with_weights(module.network, {n: t.detach().numpy() for n, t in module.weights().items()})
        old = get_optimizer_state(module, optimizer_now)
        full = {n: value.clone() for n, value in module.state_dict().items()}
        before = {n: at.copy() for n, at in gradual.kept.items()}
        change = gradual.cut_next(module)
        assert count_flops(gradual.cut_network()) / count_flops(net) <= 1 - 0.5 * done / 4
        if change is None:  # the previous cut was rounded to a width that is small enough for this step
            assert all(np.array_equal(at, before[n]) for n, at in gradual.kept.items())
            continue
        cuts += 1
        whole = {g.name: g.size for g in gradual.groups}
        step = {n: np.searchsorted(before.get(n, np.arange(whole[n])), at) for n, at in gradual.kept.items()}
        zeroed = run_network(zero_channels(present, step), {"x": x.numpy()})["out"]
        with torch.no_grad():
            np.testing.assert_allclose(module(x).numpy(), zeroed, rtol=1e-4, atol=1e-6)
        expected = weights_of(cut(present, step))
        for name, value in module.weights().items():
            assert np.array_equal(value.detach().numpy(), expected[name]), name  # exactly the remaining values
        assert {n: t.shape for n, t in change.cut_state(full).items()} == {n: t.shape for n, t in module.state_dict().items()}
        assert all(torch.equal(t, module.state_dict()[n]) for n, t in change.cut_state(full).items())
        fresh = make_optimizer(module, config)
        change.carry_optimizer(old, fresh, module)
        names = module.weight_names()
        for key in moments:
            moved = weights_of(cut(with_weights(present, {names[n]: state[key].numpy() for n, state in old.items()}), step))
            for n, p in module.named_parameters():
                assert np.array_equal(fresh.state[p][key].numpy(), moved[names[n]]), (n, key)
    assert cuts >= 2
    assert gradual.ended
    assert count_flops(gradual.cut_network()) / count_flops(net) > 0.35


@pytest.mark.parametrize("net", [folded_net(), digits_net(16)], ids=["folded", "batch norms"])
def test_a_training_reaches_the_share_and_still_learns(net, data, tmp_path):
    """The last cut comes so late that wrong rows could not be learned again: with the inputs' rows off by one the folded network ends at 0.25."""
    config = FinetuneConfig(**{**SHORT, "epochs": 10}, prune_end=0.8, ema=0.5, log=str(tmp_path / "log.csv"))
    done = finetune(net, data, config, test=data)
    assert 0.35 < count_flops(done.network) / count_flops(net) <= 0.5
    assert done.accuracy > 0.8  # chance: 0.1
    assert [s["step"] for s in read_history(done.network)] == ["prune", "finetune"]
    assert {n: t.shape for n, t in done.network.constants.items()} == {n: t.shape for n, t in apply_recipe(net, done.cuts).constants.items()}
    assert done.kept_epoch is None or done.kept_epoch >= 8  # no state from before the last cut, which is at the end of epoch 8
    right = run_network(done.network, {"x": data.inputs["x"]})["out"].argmax(1) == data.labels
    assert right.mean() == pytest.approx(done.accuracy, abs=0.02)
    again = finetune(net, data, replace(config, log=""))
    assert same_bits(again.network, done.network)


def test_a_device_is_a_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto").type == "cpu"


def test_a_single_cut_before_the_training(data):
    """prune_steps=1 cuts once, at the start; the rest is plain fine-tuning of the cut network."""
    config = FinetuneConfig(**{**SHORT, "prune_steps": 1}, batch_norms="keep")
    done = finetune(folded_net(), data, config)
    plain = finetune(apply_recipe(folded_net(), done.cuts), data, replace(config, prune_to=""))
    for name, value in weights_of(plain.network).items():
        np.testing.assert_allclose(done.network.constants[name].array(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_an_interrupted_training_resumes_with_the_same_bits(optimizer, data, tmp_path):
    """Interrupted after 20 of 49 steps, between the cuts."""
    config = FinetuneConfig(**{**SHORT, "lr": 0.01}, optimizer=optimizer, ema=0.5)
    path = str(tmp_path / "c.safetensors")

    def interrupt(step, total, text):
        assert total == 49
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(folded_net(), data, replace(config, checkpoint=path, checkpoint_seconds=0), progress=interrupt)
    whole = finetune(folded_net(), data, config)
    from whet.training.checkpoint import read_state

    assert read_state(path)["gradual"]["done"] == 3
    rest = finetune(folded_net(), data, replace(config, checkpoint=path))
    assert rest.resumed_at == 19
    assert same_bits(rest.network, whole.network)
    assert {n: e.kept for n, e in rest.cuts.groups.items()} == {n: e.kept for n, e in whole.cuts.groups.items()}
    with pytest.raises(TrainingError, match="was made with prune_steps=4, now it is 5"):
        finetune(folded_net(), data, replace(config, checkpoint=path, prune_steps=5))


def test_a_checkpoint_with_damaged_cuts_is_refused(data, tmp_path, monkeypatch):
    from whet.training import checkpoint, loop

    path = str(tmp_path / "c.safetensors")
    config = FinetuneConfig(**{**SHORT, "epochs": 1}, checkpoint=path)
    finetune(folded_net(), data, config)
    state = checkpoint.read_state(path)
    for damaged in (None, {"done": 9, "kept": {}}, {"done": 1, "kept": {"stem.weight": [99]}}, {"done": 1, "kept": {"no such group": [0]}}):
        monkeypatch.setattr(loop, "read_state", lambda _, damaged=damaged: {**state, "gradual": damaged})
        with pytest.raises(TrainingError, match="is damaged"):
            finetune(folded_net(), data, config)


def test_a_time_limit_leaves_no_cut_undone(data):
    done = finetune(folded_net(), data, FinetuneConfig(**SHORT, seconds=1e-9))
    assert count_flops(done.network) / count_flops(folded_net()) <= 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prune_to": "latency=0.5x"}, "whet prune --latency"),
        ({"prune_to": "flops=2x"}, "no effect"),
        ({"prune_to": "flops"}, "is not a target"),
        ({"masks": "2:4"}, "prune first"),
        ({"prune_steps": 0}, "1 or more"),
        ({"prune_begin": 0.6}, "prune_begin"),
        ({"prune_end": 1.0}, "prune_end"),
        ({"prune_importance": "taylor"}, "taylor1, taylor2"),
        ({"prune_schedule": "cosine"}, "cubic, linear"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        FinetuneConfig(**{**SHORT, **settings})


def test_trainings_that_cannot_be_cut_are_refused(data):
    config = FinetuneConfig(**SHORT)
    with pytest.raises(UsageError, match="whet's own loop"):
        finetune(folded_net(), data, config, train=lambda module, data, config: None)
    with pytest.raises(UsageError, match="floating point"):
        train_quantization_aware(folded_net(), data, config)
    with pytest.raises(PruneError, match="unreachable"):
        finetune(folded_net(), data, replace(config, prune_to="flops=0.0001x"))


def test_the_command_cuts_and_writes_a_recipe(data, tmp_path):
    np.savez(tmp_path / "train.npz", x=data.inputs["x"], y=data.labels)
    whet.save_onnx(folded_net(), tmp_path / "m.onnx")
    flags = ["--device=cpu", "--batch=16", "--epochs=2", "--pruneTo=params=0.5x", "--pruneSteps=3", "--pruneSchedule=linear"]
    done = CliRunner().invoke(group, ["finetune", str(tmp_path / "m.onnx"), f"--data={tmp_path / 'train.npz'}", *flags,
                                      "-o", str(tmp_path / "small.onnx"), f"--recipe={tmp_path / 'r.json'}"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "cut in 3 steps to params=0.5x: 4" in done.output
    small = whet.network_from_onnx(tmp_path / "small.onnx")
    again = apply_recipe(whet.network_from_onnx(tmp_path / "m.onnx"), load_recipe(tmp_path / "r.json"))
    assert {n: t.shape for n, t in small.constants.items()} == {n: t.shape for n, t in again.constants.items()}


def test_the_search_keeps_a_smaller_network_although_it_scores_worse(data, monkeypatch):
    from whet.search.stages import finetune as stage

    def train(net, original, recipe, c, folder, *, say, notes):
        return SimpleNamespace(network=smaller if recipe.finetune else net)

    net = folded_net()
    smaller = finetune(net, data, FinetuneConfig(**{**SHORT, "epochs": 0.2})).network
    monkeypatch.setattr(stage, "train_network", train)
    recipe = SimpleNamespace(finetune={"prune_to": "flops=0.5x"}, data=SimpleNamespace(train="x.npz"), higher_is_better=True)
    prepared = stage.Prepared(net)
    candidate = SimpleNamespace(pruned=False, two_four=False)

    def rate(n):
        return {"value": 0.9 if n is net else 0.8}

    prepared.add_step("original", 0.0, rate)
    stage.fine_tune(prepared, net, recipe, candidate, None, say=print, rate=rate)
    assert prepared.network is smaller
    assert prepared.steps[-1]["used"]
