"""Fine-tuning on real digits: recovers a pruned network, resumes after a kill with the same bits, keeps masks, refuses mistakes."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

import whet
from whet.errors import TrainingError, UsageError
from whet.network import Network, parse_type
from whet.precision import Preprocessing
from whet.sparsity import is_two_four, list_eligible_layers
from whet.training import FinetuneConfig, TrainingData, accuracy, finetune, hold, read_training_data
from whet.training.checkpoint import read_state
from whet.training.loop import rate


def digits_net(channels=8, seed=0, softmax=False):
    """x[N,1,8,8] -> two convolutions with batch norms, pooling, ten logits."""
    rng = np.random.default_rng(seed)

    def weight(name, *shape):
        return net.constant((rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32), name)

    def norm(x, name):
        values = {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}
        return net.add("BatchNormalization", x, *(net.constant(np.full(channels, v, np.float32), f"{name}.{n}") for n, v in values.items()))

    net = Network("digits")
    x = net.add_input("x", parse_type("f32[N,1,8,8]"))
    y = net.add("Relu", norm(net.add("Conv", x, weight("conv1.weight", channels, 1, 3, 3), pads=(1, 1, 1, 1)), "bn1"))
    y = net.add("Relu", norm(net.add("Conv", y, weight("conv2.weight", channels, channels, 3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), "bn2"))
    y = net.add("Flatten", y)
    y = net.add("Gemm", y, weight("fc.weight", 10, channels * 16), net.constant(np.zeros(10, np.float32), "fc.bias"), transB=1)
    net.mark_output(net.add("Softmax", y) if softmax else y, "out")
    return net


FAST = {"epochs": 4, "batch": 60, "lr": 0.1, "device": "cpu"}


def weights_of(net):
    return {n: t.array() for n, t in net.constants.items()}


def same_bits(a, b):
    left, right = weights_of(a), weights_of(b)
    return left.keys() == right.keys() and all(np.array_equal(left[n], right[n]) for n in left)


def test_labels_teach_a_network(learned, digits):
    assert accuracy(digits_net(), digits[1]) < 0.3
    assert learned.accuracy > 0.9
    assert learned.kept_epoch == 4
    assert [round(h["epoch"]) for h in learned.history] == [1, 2, 3, 4]
    assert learned.history[-1]["loss"] < learned.history[0]["loss"] / 3
    assert accuracy(learned.network, digits[1]) == learned.accuracy  # the returned network is the evaluated one
    assert '"steps": 76' in learned.network.metadata["prop.whet.training"]


def test_a_pruned_network_recovers_by_distillation_alone(learned, digits):
    from whet.pruning import PruneConfig, prune

    small = prune(learned.network, PruneConfig(ratio=0.5, multiple=1)).network
    unlabelled = TrainingData(digits[0].inputs)
    got = finetune(small, unlabelled, FinetuneConfig(**FAST, distill=1.0), teacher=learned.network, test=digits[1])
    assert accuracy(small, digits[1]) < got.accuracy - 0.2
    assert got.accuracy > 0.85


def test_a_users_distance_to_the_teacher_replaces_the_default_one(tmp_path, monkeypatch, learned, digits):
    (tmp_path / "apart.py").write_text("calls = []\ndef apart(mine, theirs):\n    calls.append((mine.shape, theirs.shape))\n"
                                       "    return (mine - theirs).abs().mean()\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    unlabelled = TrainingData(digits[0].inputs)
    config = FinetuneConfig(**{**FAST, "epochs": 2}, distill=1.0, distill_loss="python:apart:apart")
    got = finetune(digits_net(), unlabelled, config, teacher=learned.network, test=digits[1])
    assert got.accuracy > 0.5  # of ten classes
    import apart

    assert apart.calls
    assert all(a == b for a, b in apart.calls)
    with pytest.raises(UsageError, match="distill_loss is auto or python"):
        FinetuneConfig(distill_loss="kl")


def test_a_final_softmax_is_excluded_from_training_and_kept(digits):
    got = finetune(digits_net(softmax=True), digits[0], FinetuneConfig(**FAST), test=digits[1])
    assert got.accuracy > 0.9
    assert got.network.layers[-1].op == "Softmax"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_and_gives_fp32_weights(precision, digits):
    got = finetune(digits_net(), digits[0], FinetuneConfig(**FAST, precision=precision), test=digits[1])
    assert got.accuracy > 0.85
    assert {str(t.dtype) for t in got.network.constants.values()} == {"f32"}


def test_the_same_seed_gives_the_same_bits_and_another_does_not(learned, digits):
    again = finetune(digits_net(), digits[0], FinetuneConfig(**FAST), test=digits[1])
    assert same_bits(again.network, learned.network)
    other = finetune(digits_net(), digits[0], FinetuneConfig(**FAST, seed=1))
    assert not same_bits(other.network, learned.network)


MORE = {"sgd": {}, "adamw": {"optimizer": "adamw", "lr": 0.01, "augment": "crop:1,flip", "precision": "bf16"}}

KILLED = """
import os, sys, numpy as np, torch
torch.set_num_threads({threads})
sys.path.insert(0, {here!r})
from test_finetune import digits_net, FAST, MORE
from whet.training import FinetuneConfig, TrainingData, finetune
with np.load(os.path.join({folder!r}, "digits.npz")) as arrays:
    data = TrainingData({{"x": arrays["x"]}}, arrays["labels"])
def progress(done, total, stage):
    if done >= 40:
        os.kill(os.getpid(), 9)
for name, more in MORE.items():  # children have the libraries that this process imported; it has trained nothing, so that it has no threads
    child = os.fork()
    if child == 0:
        path = os.path.join({folder!r}, name)
        finetune(digits_net(), data, FinetuneConfig(**{{**FAST, **more}}, checkpoint=path, checkpoint_seconds=0), progress=progress)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory, digits):
    """A folder with the checkpoints of two trainings that were killed at step 40."""
    folder = tmp_path_factory.mktemp("killed")
    np.savez(folder / "digits.npz", x=digits[0].inputs["x"], labels=digits[0].labels)
    code = KILLED.format(here=str(Path(__file__).parent), folder=str(folder), threads=torch.get_num_threads())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["-9", "-9"], done.stderr
    return folder


@pytest.mark.parametrize("name", MORE)
def test_a_killed_training_resumes_with_the_same_bits(name, digits, killed):
    path = str(killed / name)
    config = FinetuneConfig(**{**FAST, **MORE[name]})
    whole = finetune(digits_net(), digits[0], config)
    at = read_state(path)["step"]
    assert 0 < at <= 40
    from dataclasses import replace

    rest = finetune(digits_net(), digits[0], replace(config, checkpoint=path))
    assert rest.resumed_at == at
    assert same_bits(rest.network, whole.network)
    assert [h["loss"] for h in rest.history] == pytest.approx([h["loss"] for h in whole.history], rel=1e-6)
    finished = finetune(digits_net(), digits[0], replace(config, checkpoint=path))  # a finished training is not repeated
    assert finished.resumed_at == whole.steps
    assert same_bits(finished.network, whole.network)


def test_a_checkpoint_of_another_training_is_refused(digits, tmp_path):
    path = tmp_path / "c.safetensors"
    short = {**FAST, "epochs": 0.2}
    finetune(digits_net(), digits[0], FinetuneConfig(**short, checkpoint=str(path)))
    with pytest.raises(TrainingError, match=r"was made with lr=0\.1, now it is 0\.2"):
        finetune(digits_net(), digits[0], FinetuneConfig(**{**short, "lr": 0.2}, checkpoint=str(path)))
    with pytest.raises(TrainingError, match="is of another model"):
        finetune(digits_net(seed=1), digits[0], FinetuneConfig(**short, checkpoint=str(path)))
    with pytest.raises(TrainingError, match="is of other data"):
        finetune(digits_net(), digits[1], FinetuneConfig(**short, checkpoint=str(path)))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(TrainingError, match="cannot be read"):
        finetune(digits_net(), digits[0], FinetuneConfig(**short, checkpoint=str(path)))
    assert not list(tmp_path.glob("*.part"))


def test_a_checkpoint_with_changed_values_is_refused(digits, tmp_path):
    path = tmp_path / "c.safetensors"
    config = FinetuneConfig(**{**FAST, "epochs": 0.1}, checkpoint=str(path))
    finetune(digits_net(), digits[0], config)
    written = path.read_bytes()
    size = int.from_bytes(written[:8], "little")
    header, tensors = json.loads(written[8 : 8 + size]), written[8 + size :]
    state = json.loads(header["__metadata__"]["whet"])
    moment = next(n for n in header if n.startswith("optimizer."))
    changes = [
        {"step": -5}, {"step": "x"}, {"seconds": None}, {"seconds": float("nan")}, {"settings": None}, {"settings": [1]}, {"optimizer": [1]},
        {"optimizer": {"x": {}}}, {"optimizer": {"0": 5}}, {"history": 5}, {"history": [{"epoch": "x"}]}, {"loss": []}, {"loss": ["a", 1]},
    ]  # fmt: skip
    headers = [{**header, "__metadata__": {"whet": json.dumps({**state, **change})}} for change in changes]
    headers += [{(name if n == moment else n): v for n, v in header.items()} for name in ("optimizer.x.y", "optimizer.5")]
    for changed in headers:
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)
        with pytest.raises(TrainingError, match=r"the checkpoint .* is damaged .*\. Delete it to start over"):
            finetune(digits_net(), digits[0], config)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_four_masks_are_kept(optimizer, learned, digits):
    got = finetune(learned.network, digits[0], FinetuneConfig(**{**FAST, "epochs": 1, "lr": 0.01}, optimizer=optimizer, masks="2:4"), test=digits[1])
    yes, no = list_eligible_layers(got.network)
    assert len(yes) == got.masked_weights == 2
    assert set(no) == {learned.network.layers[0].name}  # one input channel
    assert is_two_four(got.network.tensor("conv2.weight").array(), 1)
    assert not np.array_equal(got.network.tensor("conv2.weight").array(), learned.network.tensor("conv2.weight").array())
    assert got.accuracy > 0.85


def test_masks_are_enforced_on_a_users_training_function(learned, digits):
    def mine(module, data, config):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        x, y = torch.from_numpy(data.inputs["x"]), torch.from_numpy(data.labels)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            assert is_two_four(module.weights()["conv2.weight"].detach().numpy(), 1)  # at every step, not only at the end

    got = finetune(learned.network, digits[0], FinetuneConfig(device="cpu", masks="2:4"), train=mine)
    assert is_two_four(got.network.tensor("conv2.weight").array(), 1)
    assert not same_bits(got.network, learned.network)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(TrainingError, match=r"the mask of 'conv2.weight' is \[8, 4\], the weight \[8, 8, 3, 3\]"):
        hold(digits_net().to_torch(), {"conv2.weight": np.ones((8, 4), bool)})


def test_unstructured_zeros_are_kept(learned, digits):
    from whet.pruning import compute_zero_fraction, zero_smallest

    sparse = zero_smallest(learned.network, 0.6)
    got = finetune(sparse, digits[0], FinetuneConfig(**{**FAST, "epochs": 1}, masks="zeros"))
    assert compute_zero_fraction(got.network) == pytest.approx(compute_zero_fraction(sparse), abs=1e-6)
    with pytest.raises(TrainingError, match="no zeros to keep"):
        finetune(learned.network, digits[0], FinetuneConfig(**FAST, masks="zeros"))


def test_the_schedule_warms_up_and_falls_as_a_cosine():
    config = FinetuneConfig(lr=1.0, warmup=0.1, last_lr=0.01)
    assert [rate(config, s) for s in (0, 0.05, 0.1, 0.55, 1)] == pytest.approx([0, 0.5, 1, 0.505, 0.01])


def test_a_time_limit_ends_the_training(digits, monkeypatch):
    clock = SimpleNamespace(perf_counter=count(0, 0.01).__next__)  # each reading is 0.01 s after the one before
    for module in ("loop", "tuning"):
        monkeypatch.setattr(f"whet.training.{module}.time", clock)
    got = finetune(digits_net(), digits[0], FinetuneConfig(**{**FAST, "epochs": 10_000}, seconds=0.5))
    assert 5 < got.steps < 50
    assert 0.5 <= got.seconds < 0.6


def test_data_come_from_files_folders_and_functions(tmp_path, monkeypatch, digits):
    net = digits_net()
    x, y = digits[0].inputs["x"][:40], digits[0].labels[:40]
    np.savez(tmp_path / "d.npz", images=x, y=y)
    got = read_training_data(str(tmp_path / "d.npz"), net)
    np.testing.assert_array_equal(got.inputs["x"], x)
    np.testing.assert_array_equal(got.labels, y)
    image = pytest.importorskip("PIL.Image")
    for i in range(40):
        folder = tmp_path / "images" / str(y[i])
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray((x[i, 0] * 255).astype(np.uint8)).save(folder / f"{i}.png")
    found = read_training_data(str(tmp_path / "images"), net, Preprocessing.parse("scale:1/255"))
    assert found.classes == tuple(sorted(set(map(str, y))))
    assert len(found) == 40
    assert sorted(found.labels) == sorted(np.searchsorted(found.classes, y.astype(str)))
    plain = tmp_path / "unlabelled"
    plain.mkdir()
    for f in sorted((tmp_path / "images").glob("*/*.png"))[:5]:
        f.rename(plain / f.name)
    unlabelled = read_training_data(str(plain), net, Preprocessing.parse("scale:1/255"))
    assert len(unlabelled) == 5
    assert unlabelled.labels is None
    (plain / f.name).rename(tmp_path / "images" / f.name)
    with pytest.raises(TrainingError, match="both in subfolders"):
        read_training_data(str(tmp_path / "images"), net)
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def arrays():\n    return np.zeros((8, 1, 8, 8), np.float32), np.zeros(8, np.int64)\n"
        "def batches():\n    return [(np.ones((4, 1, 8, 8), np.float32), np.arange(4)) for _ in range(3)]\n"
        "def endless():\n    yield 1\n"
        "def loss(outputs, labels):\n    return (outputs ** 2).mean()\n"
        "def nothing(module, data, config):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    assert len(read_training_data("python:mine:arrays", net)) == 8
    stream = read_training_data("python:mine:batches", net)
    assert finetune(net, stream, FinetuneConfig(epochs=2, device="cpu")).steps == 6
    assert finetune(net, stream, FinetuneConfig(epochs=2, device="cpu", loss="python:mine:loss")).history[-1]["loss"] < 5
    assert same_bits(finetune(net, stream, FinetuneConfig(device="cpu"), train="python:mine:nothing").network, net)
    with pytest.raises(TrainingError, match="an iterable of batches with a length"):
        read_training_data("python:mine:endless", net)
    with pytest.raises(UsageError, match=r"nowhere does not exist"):
        read_training_data(str(tmp_path / "nowhere"), net)


def test_image_preprocessing_equals_the_reference(digits):
    from whet.training.feeding import Feeder

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 8, 8, 1), np.uint8)
    data = TrainingData({"x": pixels}, np.arange(5), Preprocessing.parse("scale:1/255,mean:0.5,std:0.25"))
    (feeds, labels), = Feeder(digits_net(), data, batch=8, device=torch.device("cpu")).all()
    np.testing.assert_allclose(feeds["x"], ((pixels / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2), rtol=1e-5, atol=1e-6)
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_augmentation_moves_whole_images():
    from whet.training.augment import Augment

    x = torch.arange(2 * 3 * 6 * 6).reshape(2, 3, 6, 6).to(torch.uint8)
    seen = set()
    for seed in range(60):
        y = Augment(crop=2)(x, torch.Generator().manual_seed(seed))
        for n in range(2):
            padded = torch.nn.functional.pad(x[n], (2, 2, 2, 2))
            places = [(i, j) for i in range(5) for j in range(5) if torch.equal(padded[:, i : i + 6, j : j + 6], y[n])]
            assert places
            seen.update(places)
    assert len(seen) == 25
    flipped = Augment(flip=True)(x, torch.Generator().manual_seed(1))
    assert all(torch.equal(flipped[n], x[n]) or torch.equal(flipped[n], x[n].flip(2)) for n in range(2))


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda d: FinetuneConfig(precision="int8"), UsageError, "precision is one of fp32, bf16, fp16"),
    (lambda d: FinetuneConfig(distill=2), UsageError, "distill is from 0 to 1"),
    (lambda d: finetune(digits_net(), d, FinetuneConfig(distill=0.5)), UsageError, "there is no teacher"),
    (lambda d: finetune(digits_net(), TrainingData(d.inputs), FinetuneConfig(**FAST)), TrainingError, "there are no labels"),
    (lambda d: finetune(digits_net(), TrainingData({"y": d.inputs["x"]}), FinetuneConfig(**FAST)), TrainingError, "no array for the input 'x'"),
    (lambda d: finetune(digits_net(), d, FinetuneConfig(**{**FAST, "lr": 1e12})), TrainingError, "lower lr"),
    (lambda d: finetune(digits_net(), d, FinetuneConfig(**{**FAST, "augment": "blur"})), UsageError, r"none of crop:N, flip, cutmix"),
    (lambda d: finetune(digits_net(), d, FinetuneConfig(**{**FAST, "freeze": ("*",)})), TrainingError, "nothing to train"),
    (lambda d: finetune(digits_net(), d, FinetuneConfig(device="cuda:7")), (TrainingError), "no CUDA device"),
    (lambda d: TrainingData({"x": d.inputs["x"]}, np.zeros(3)), TrainingError, "of one length"),
    (lambda d: TrainingData({"x": np.where(np.arange(len(d))[:, None] == 7, np.nan, d.inputs["x"].reshape(len(d), -1))}), TrainingError,
     "sample 7 of 'x' holds NaN or infinite values"),
    (lambda d: finetune(digits_net(), TrainingData(d.inputs, d.labels + 5), FinetuneConfig(**FAST)), TrainingError,
     r"labels go from 5 to 14, but the first output has 10 classes"),
    (lambda d: finetune(digits_net(), TrainingData(d.inputs, d.labels * 1.0), FinetuneConfig(**FAST)), TrainingError, "labels must be integers"),
])
def test_mistakes_are_explained(call, error, text, digits):
    if "CUDA" in text and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(error, match=text):
        call(digits[0])


def test_importing_whet_imports_no_torch():
    code = "import sys, whet, whet.training, whet.pruning, whet.cli; whet.training.FinetuneConfig(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_error_without_torch_gives_a_remedy():
    code = ("import sys, importlib.util as u; real = u.find_spec; u.find_spec = lambda n, *a: None if n == 'torch' else real(n, *a)\n"
            "import whet.training\ntry:\n    whet.training.finetune\nexcept Exception as e:\n    print(type(e).__name__, e)")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("BackendError")
    assert "pip install 'whet[train]'" in said
    assert whet.WhetError
