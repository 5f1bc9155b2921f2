"""Texts longer than the positions of a model: what it reads is found, and answers say what was truncated."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from onnx import TensorProto
from tokenizers import Tokenizer, processors

from boxcal.app.client import BoxcalClient
from boxcal.models import BackboneError, UnusableInput
from boxcal.models.inputs.texts import TextInputs
from boxcal.models.loading.specifications import load_backbone
from tests.app.running import running
from tests.models.files import load, node, save_graph, value, word_tokenizer

WORDS = ("<s>", "<pad>", "</s>", "<unk>", "cold", "warm", "rain")
SIZES = {"vocab_size": len(WORDS), "pad_token_id": 1, "num_labels": 3}
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
GPT = {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 2}


def folder_of(folder: Path, family: str, sizes: dict[str, Any], model_max_length: int | None) -> str:
    """Save a small network with random weights, and a tokenizer that adds two tokens."""
    import transformers

    torch.manual_seed(6)
    config = getattr(transformers, f"{family}Config")(**(SIZES | sizes))
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
    tokenizer = word_tokenizer(WORDS, "<unk>")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if model_max_length:
        described = {"model_max_length": model_max_length}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return f"transformers:{folder}"


@pytest.mark.parametrize(
    ("family", "sizes", "model_max_length", "usable"),
    [
        ("Roberta", BERT | {"max_position_embeddings": 34}, None, 32),
        ("XLMRoberta", BERT | {"max_position_embeddings": 34}, int(1e30), 32),
        ("MPNet", BERT | {"max_position_embeddings": 34}, 34, 32),
        ("Camembert", BERT | {"max_position_embeddings": 34}, 20, 20),
        ("Bert", BERT | {"max_position_embeddings": 40}, 1000, 40),
        ("GPT2", GPT | {"n_positions": 600}, None, 600),
        ("Llama", BERT | {"max_position_embeddings": 2000}, None, 2000),
    ],
)
def test_the_positions_of_a_model_are_found(
    family: str, sizes: dict[str, Any], model_max_length: int | None, usable: int, tmp_path: Path
) -> None:
    served = load_backbone(folder_of(tmp_path, family, sizes, model_max_length), device="cpu")
    assert isinstance(served.inputs, TextInputs)
    assert served.inputs.max_length == usable
    texts = [" ".join(["rain"] * count) for count in (usable - 2, usable - 1, 5 * usable)]
    samples = served.inputs.of_texts(texts)
    assert [len(sample[0]) for sample in samples] == [usable] * 3
    assert served.inputs.truncated(samples) == [False, True, True]
    assert np.isfinite(np.asarray(served(served.inputs.batch(samples)))).all()


def test_answers_say_which_texts_were_truncated(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = folder_of(tmp_path / "model", "Roberta", BERT | {"max_position_embeddings": 18}, None)
    long, short = "cold rain " * 50, "warm rain"
    with running(tmp_path / "data", model=spec, device="cpu") as service, BoxcalClient(service.url) as client:
        mixed = client.predict_texts(short, long, short)
        alone = client.predict_texts(short)
        assert [one.truncated for one in mixed.predictions] == [None, True, None]
        assert mixed.predictions[0].probability == pytest.approx(alone.predictions[0].probability, abs=1e-6)
        cut = client.predict_texts(" ".join(long.split()[:14])).predictions[0]
        assert cut.probability == pytest.approx(mixed.predictions[1].probability, abs=1e-6)
        answer = httpx.post(f"{service.url}/predict", json={"inputs": [{"text": short}]}).json()
        assert "truncated" not in answer["predictions"][0]


XLNET = {"d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8, "initializer_range": 0.5}
ENCODER_DECODER = {
    "d_model": 8, "decoder_start_token_id": 2, "eos_token_id": 2, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
    "init_std": 0.5,
}  # fmt: skip
FNET = BERT | {"max_position_embeddings": 20, "initializer_range": 0.5}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("family", "sizes", "read"),
    [
        ("GPT2", GPT | {"n_positions": 20, "pad_token_id": None, "initializer_range": 0.5}, None),
        ("XLNet", XLNET, None),  # its answer is that of the last token
        ("FNet", FNET, ["input_ids", "token_type_ids"]),  # without a mask
        ("Bart", ENCODER_DECODER | {"max_position_embeddings": 20}, None),  # looks for the end of a sample
        ("T5", T5 | {"eos_token_id": 2}, None),
    ],
)
def test_the_answer_to_a_text_is_the_same_beside_longer_ones(
    family: str, sizes: dict[str, Any], read: list[str] | None, tmp_path: Path
) -> None:
    import transformers

    spec = folder_of(tmp_path, family, sizes, 20)
    if read:
        described = {"model_max_length": 20, "model_input_names": read}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    served = load_backbone(spec, device="cpu")
    served.warm_up([2])
    assert isinstance(served.inputs, TextInputs)
    samples = served.inputs.of_texts(["rain", "cold cold rain", "warm " * 30])
    together = np.asarray(served(served.inputs.batch(samples)))
    network = getattr(transformers, f"{family}ForSequenceClassification").from_pretrained(tmp_path).eval()
    alone = [network(torch.from_numpy(sample[0])[None]).logits[0].detach().numpy() for sample in samples]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize("by", ["tokenizer_config.json", "tokenizer.json"])
def test_a_text_is_truncated_on_the_side_that_the_tokenizer_names(by: str, tmp_path: Path) -> None:
    spec = folder_of(tmp_path, "Bert", BERT | {"max_position_embeddings": 5}, None)
    if by == "tokenizer.json":
        tokenizer = Tokenizer.from_file(str(tmp_path / by))
        tokenizer.enable_truncation(9, direction="left")
        tokenizer.save(str(tmp_path / by))
    else:
        (tmp_path / by).write_text(json.dumps({"truncation_side": "left", "model_max_length": 9}))
    served = load_backbone(spec, device="cpu")
    assert isinstance(served.inputs, TextInputs)
    (sample,) = served.inputs.of_texts(["cold cold cold warm rain"])
    assert sample[0].tolist() == [0, 4, 5, 6, 2]


def test_an_unknown_side_of_truncation_is_named(tmp_path: Path) -> None:
    spec = folder_of(tmp_path, "Bert", BERT, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"truncation_side": "both"}))
    with pytest.raises(BackboneError, match=r"truncation_side is 'both'; it may be 'left' or 'right'"):
        load_backbone(spec, device="cpu")


def test_the_positions_of_an_onnx_file_are_found_by_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its logits are p and -p, the sum of the positions of the tokens, counted from 1 without padding (0)."""
    path = save_graph(
        tmp_path / "counted.onnx",
        [
            node("Sign", "input_ids", "is_token"),
            node("CumSum", "is_token axis", "counted"),
            node("Mul", "counted is_token", "positions"),
            node("Gather", "table positions", "found"),
            node("ReduceSum", "found axes", "logits", keepdims=0),
        ],
        [value("input_ids", "n", "length", dtype=TensorProto.INT64)],
        [value("logits", "n", 2)],
        table=np.arange(10, dtype=np.float32)[:, None] * np.array([1, -1], np.float32),
        axis=1,
        axes=[1],
    )
    served = load(path)
    assert "counted.onnx reads at most 9 tokens, not 512" in caplog.text
    samples = served.inputs.blank(2)
    samples[0] = served.inputs.decode("tokens", {"input_ids": [5] * 9}, 0)
    np.testing.assert_array_equal(served(served.inputs.batch(samples)), [[45, -45], [1, -1]])
    with pytest.raises(BackboneError, match="has 10 tokens; it must have 1 to 9"):
        served.inputs.decode("tokens", {"input_ids": [5] * 10}, 0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"input_ids": [6, 7]}, r"tokens.input_ids holds 7; the model reads 0 to 6\."),
        (
            {"input_ids": [6], "token_type_ids": [2]},
            r"tokens.token_type_ids holds 2; the model reads 0 to 1\.",
        ),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused(tokens: Any, message: str, tmp_path: Path) -> None:
    served = load_backbone(folder_of(tmp_path, "Bert", BERT | {"max_position_embeddings": 8}, None))
    served.inputs.decode("tokens", {"input_ids": [6], "token_type_ids": [1]}, 0)
    with pytest.raises(UnusableInput, match=message):
        served.inputs.decode("tokens", tokens, 0)


def test_the_vocabulary_of_the_tokenizer_limits_other_models(tmp_path: Path) -> None:
    word_tokenizer(WORDS, "<unk>").save(str(tmp_path / "tokenizer.json"))
    inputs = TextInputs(
        {"ids": "int64"}, pad={}, max_length=8, fixed_length=None, tokenizer=tmp_path / "tokenizer.json"
    )
    inputs.decode("tokens", {"ids": [6]}, 0)
    with pytest.raises(UnusableInput, match=r"tokens.ids holds 7; the model reads 0 to 6\."):
        inputs.decode("tokens", {"ids": [7]}, 0)


def test_a_model_that_reads_no_sample_is_refused() -> None:
    inputs = TextInputs({"input_ids": "int64"}, pad={}, max_length=8, fixed_length=None, tokenizer=None)

    def run(batch: dict[str, Any]) -> None:
        raise IndexError(f"{batch['input_ids'].shape[1]} is out of range")

    with pytest.raises(BackboneError, match="m fails on a sample of 8 tokens, and on shorter ones: 8 is out"):
        inputs.limit_length("m", run)
