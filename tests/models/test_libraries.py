"""Small models of timm and transformers with random weights, served by name, folder or exported program."""

import base64
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from boxcal.models import BackboneError
from boxcal.models.inputs.saved_configs import image_preprocessing
from boxcal.models.loading.specifications import load_backbone
from tests.app.running import running
from tests.models.files import CLASS_NAMES as CLASSES
from tests.models.files import TEXTS, WORDS, declare, word_tokenizer
from tests.models.posting import Export, check_answers, check_fit

SQUARE = {"size": {"height": 32, "width": 32}}
CROPPED = {"size": {"shortest_edge": 32}, "crop_size": 32, "do_center_crop": True}
DEIT = {
    "size": 256, "crop_size": 224, "do_center_crop": True, "feature_extractor_type": "DeiTFeatureExtractor"
}  # fmt: skip
"""As its processor was published, before sizes had names."""
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def noise_images(side: int, count: int = 3) -> list[Image.Image]:
    noise = np.random.default_rng(5).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def posted(images: list[Image.Image]) -> list[dict[str, Any]]:
    inputs = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "png")
        inputs.append({"image": base64.b64encode(file.getvalue()).decode()})
    return inputs


def probabilities(logits: torch.Tensor) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = logits.detach().double().softmax(1).numpy()
    return rows


def of_timm(folder: Path) -> tuple[str, Export]:
    import timm

    torch.manual_seed(2)
    network = timm.create_model("test_resnet", num_classes=3).eval()
    path = folder / "three.safetensors"
    save_file(network.state_dict(), path)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    images = noise_images(168)  # the size before the crop, so that nothing is resampled
    expected = probabilities(network(torch.stack([transform(image) for image in images])))
    return f"timm:test_resnet?checkpoint={path}", Export(posted(images), ("0", "1", "2"), expected)


def vision_transformer() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    config = ViTConfig(image_size=32, patch_size=8, id2label=dict(enumerate(CLASSES)), **SIZES)
    return ViTForImageClassification(config).eval()


def of_vision_transformer(folder: Path) -> tuple[str, Export]:
    from transformers import ViTImageProcessor

    network, processor = vision_transformer(), ViTImageProcessor(size={"height": 32, "width": 32})
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    images = noise_images(32)
    logits = network(**processor(images=images, return_tensors="pt")).logits
    return f"transformers:{folder}", Export(posted(images), CLASSES, probabilities(logits))


def of_text(folder: Path) -> tuple[str, Export]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(4)
    config = BertConfig(vocab_size=len(WORDS), id2label=dict(enumerate(CLASSES)), **SIZES)
    network = BertForSequenceClassification(config).eval()
    network.save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = [network(torch.tensor([tokenizer.encode(text).ids])).logits for text in TEXTS]
    return f"transformers:{folder}", Export(
        [{"text": text} for text in TEXTS], CLASSES, probabilities(torch.cat(rows))
    )


def of_exported_program(folder: Path) -> tuple[str, Export]:
    network, path = vision_transformer(), folder / "vit.pt2"
    shapes = {"pixel_values": {0: torch.export.Dim("n")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(network, (torch.zeros(2, 3, 32, 32),), dynamic_shapes=shapes)
        torch.export.save(program, path)
    preprocessing = {"resize": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    images = noise_images(32)
    batch = torch.stack(
        [torch.from_numpy(np.asarray(image) / 127.5 - 1).float().movedim(2, 0) for image in images]
    )
    spec = declare(path, labels=CLASSES, preprocessing=preprocessing)
    return spec, Export(posted(images), CLASSES, probabilities(network(batch).logits))


MODELS = {
    "timm": of_timm,
    "transformers, image": of_vision_transformer,
    "transformers, text": of_text,
    "transformers, torch.export": of_exported_program,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Export]]:
    folder = tmp_path / "model"
    folder.mkdir()
    spec, made = MODELS[request.param](folder)
    with running(tmp_path / "data", model=spec, device="cpu") as service:
        yield service.url, made


def test_posted_inputs_give_the_librarys_probabilities_inside_bounds(model: tuple[str, Export]) -> None:
    check_answers(*model)


@pytest.mark.long
def test_a_fit_changes_the_answers_of_the_model(model: tuple[str, Export]) -> None:
    check_fit(*model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm:test_resnett", r"no model 'test_resnett'. Did you mean test_resnet"),
        ("timm:test_resnet", r"needs weights: timm:test_resnet\?checkpoint=PATH"),
        ("timm:test_resnet?weights=x.pth", r"expected `\?checkpoint=PATH`"),
        ("timm:test_resnet?checkpoint=none.pth", "none.pth does not exist"),
        ("transformers:none", "none has no config.json"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(spec: str, message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(spec, device="cpu")


def test_a_timm_model_with_two_heads_takes_own_classes(tmp_path: Path) -> None:
    import timm

    name = "deit_tiny_distilled_patch16_224"
    save_file(timm.create_model(name, num_classes=6).state_dict(), tmp_path / "six.safetensors")
    served = load_backbone(f"timm:{name}?checkpoint={tmp_path / 'six.safetensors'}", device="cpu")
    assert served.labels == tuple("012345")


def test_the_configuration_of_an_image_processor_may_be_part_of_another(tmp_path: Path) -> None:
    of_vision_transformer(tmp_path)
    alone = tmp_path / "preprocessor_config.json"
    part = {"processor_class": "CLIPProcessor", "image_processor": json.loads(alone.read_text())}
    (tmp_path / "processor_config.json").write_text(json.dumps(part))
    expected = load_backbone(f"transformers:{tmp_path}", device="cpu").preprocessing
    alone.unlink()
    assert load_backbone(f"transformers:{tmp_path}", device="cpu").preprocessing == expected
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(
        BackboneError, match=r"a classifier of texts, as it has no preprocessor_config\.json: "
    ):
        load_backbone(f"transformers:{tmp_path}", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "multi_label_classification"}, "exactly one is true"),
        ({"id2label": {"0": "score"}, "num_labels": 1}, "returns one number, a regression|cannot be loaded"),
        ({"model_type": "unheard-of"}, "cannot be loaded as a classifier"),
    ],
)
def test_a_folder_that_is_no_classifier_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    of_vision_transformer(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(BackboneError, match=message):
        load_backbone(f"transformers:{tmp_path}", device="cpu")


@pytest.mark.parametrize(
    ("members", "made"),
    [
        ({"size": {"height": 24, "width": 32}}, ((24, 32), None)),
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, (256, 224)),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (256, 224)),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, ((384, 384), None)),
        (
            {"size": {"longest_edge": 384}},
            r"json: the size \{'longest_edge': 384\} with the crop None is unknown\.$",
        ),
        ({"size": 224, "do_normalize": False}, "do_normalize is false"),
        ({"size": 224, "rescale_factor": 1.0}, "rescale_factor must be 1/255"),
        (SQUARE | {"include_top": False, "rescale_offset": False}, ((32, 32), None)),
        (SQUARE | {"include_top": True}, "include_top is true"),
        (SQUARE | {"image_processor_type": "EfficientNetImageProcessor"}, "include_top is true"),
        (SQUARE | {"rescale_offset": True}, "rescale_offset is true"),
        (SQUARE | {"do_flip_channel_order": True}, "do_flip_channel_order is true"),
        (CROPPED, (32, 32)),
        (CROPPED | {"crop_pct": 0.9}, "crop_pct together with do_center_crop"),
        (CROPPED | {"image_processor_type": "LevitImageProcessorFast"}, "a LevitImageProcessorFast resizes"),
        (CROPPED | {"feature_extractor_type": "MobileViTFeatureExtractor"}, "a MobileViTFeatureExtractor"),
        ({"size": 32, "crop_pct": 0.9, "image_processor_type": "PoolFormerImageProcessor"}, "a PoolFormer"),
        (DEIT, ((256, 256), 224)),
        (DEIT | {"feature_extractor_type": "CLIPFeatureExtractor"}, (256, 224)),
        (DEIT | {"feature_extractor_type": None}, "the size 256 is of the short side or of both"),
        ({"size": 224, "feature_extractor_type": "ViTFeatureExtractor"}, ((224, 224), None)),
        (SQUARE | {"rescale_factor": "1/255"}, "is no configuration of an image processor"),
    ],
)
def test_the_configuration_of_an_image_processor_is_converted_or_refused(
    members: dict[str, Any], made: Any, tmp_path: Path
) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2} | members))
    if isinstance(made, str):
        with pytest.raises(BackboneError, match=made):
            image_preprocessing(path)
    else:
        converted = image_preprocessing(path)
        assert (converted.resize, converted.crop) == made


BIT = DEIT | {"size": {"shortest_edge": 256}, "feature_extractor_type": "BitFeatureExtractor"}


@pytest.mark.parametrize(
    ("members", "size", "levels"),
    [(DEIT, (613, 371), 0), (BIT, (343, 256), 0), (BIT, (401, 300), 1)],
    ids=["DeiT", "its crop is half a pixel off the centre", "resized before"],
)
def test_images_are_processed_as_the_library_does(
    members: dict[str, Any], size: tuple[int, int], levels: int, tmp_path: Path
) -> None:
    """To so many of 255 levels: a crop of a resized image is computed without what lies around it."""
    from transformers import AutoImageProcessor

    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(members | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}))
    image = noise_images(40)[0].resize(size, Image.Resampling.BICUBIC)
    expected = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image)["pixel_values"][0]
    np.testing.assert_allclose(image_preprocessing(path)(image), expected, atol=1e-5 + levels * 2 / 255)
