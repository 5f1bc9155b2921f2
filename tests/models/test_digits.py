"""The digits backbone: its data, its images, its weights, and that it is overconfident."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import softmax
from sklearn import datasets

from boxcal.models.backends.backbone import Backbone, OpenBackbone
from boxcal.models.backends.digits import load_digits
from boxcal.models.digits_data import DigitsSplit, load_digits_split
from boxcal.models.inputs.images import DigitLevels
from boxcal.models.loading.specifications import load_backbone


@pytest.fixture(scope="module")
def split() -> DigitsSplit:
    return load_digits_split()


@pytest.fixture(scope="module")
def digits() -> Backbone:
    return load_backbone("digits", device="cpu")


def test_the_split_is_the_whole_data_set_without_overlap(split: DigitsSplit) -> None:
    parts = (split.train, split.validation, split.test)
    assert [len(part) for part in parts] == [719, 539, 539]
    samples = np.concatenate([part.levels for part in parts]).reshape(1797, -1)
    assert np.array_equal(np.sort(samples, axis=0), np.sort(datasets.load_digits().data, axis=0))
    for part in parts:
        assert set(part.labels) == set(range(10))


def test_a_png_of_the_data_set_comes_back_as_its_levels_also_larger_and_wider(
    split: DigitsSplit,
) -> None:
    preprocessing = DigitLevels()
    for index in range(len(split.test)):
        image = split.test.image(index).convert("RGB")
        assert np.array_equal(preprocessing(image), split.test.levels[index])
    small = split.test.image(3)
    large = small.resize((80, 80), Image.Resampling.NEAREST).convert("RGB")
    assert np.array_equal(preprocessing(large), split.test.levels[3])
    wide = Image.new("RGB", (24, 8))
    wide.paste(small.convert("RGB"), (8, 0))
    padded = preprocessing(wide)
    assert padded.shape == (1, 8, 8)
    # A third of the width is the digit, so the 24 × 24 square holds it in its middle third.
    assert padded[0, :2].max() == padded[0, :, :2].max() == padded[0, 6:].max() == 0
    assert padded[0, 3:5, 3:5].max() > 0


def test_the_network_is_decent_and_overconfident(digits: Backbone, split: DigitsSplit) -> None:
    for part in (split.validation, split.test):
        probabilities = softmax(digits(part.levels), axis=1)
        accuracy = (probabilities.argmax(1) == part.labels).mean()
        assert accuracy > 0.92
        assert probabilities.max(1).mean() > accuracy + 0.03


@pytest.mark.long
def test_training_reproduces_a_network_of_the_same_quality(split: DigitsSplit) -> None:
    """To the last bit on one kind of processor, as `tools.train_digits --check` tells; here: as good."""
    from tools.train_digits import train

    threads = torch.get_num_threads()
    try:
        network = train(split.train)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        predicted = network(torch.from_numpy(split.test.levels)).argmax(1)
    assert (predicted.numpy() == split.test.labels).mean() > 0.9


def test_the_graph_and_the_network_are_the_same_model() -> None:
    with_torch = load_digits(labels=None, device="cpu", precision="float32")
    graph = load_backbone("digits", device="cpu")
    levels = load_digits_split().test.levels
    logits = np.asarray(with_torch(levels))
    assert np.abs(graph(levels) - logits).max() < 1e-6 * np.abs(logits).max()
    assert isinstance(graph, OpenBackbone)  # torch is installed
    assert graph.head is not None
    # Both features are within 5e-6 of those in float64.
    features = np.asarray(with_torch.features(levels))
    apart = graph.features(levels) - features
    assert apart.shape == (539, 64)
    assert np.sqrt((apart**2).mean()) < 1e-6
    assert np.abs(apart).max() < 2e-6 * np.abs(features).max()
    weight, bias = graph.head
    np.testing.assert_allclose(graph.features(levels[:3]) @ weight.T + bias, logits[:3], atol=1e-4)
    for name in ("name", "labels", "fingerprint", "input_shape", "num_classes"):
        assert getattr(graph, name) == getattr(with_torch, name)
    assert graph.inputs.members == with_torch.inputs.members
    sample = load_digits_split().test.png(0)
    decoded = [one.inputs.decode("image", sample, 10**6) for one in (with_torch, graph)]
    assert np.array_equal(decoded[0], decoded[1])
