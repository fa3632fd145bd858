"""The options that commands share for choosing a model."""

import argparse
import shutil

import pytest

from kvjax.cli import ArgumentParser, add_model_options, check_model_options, load_chosen_model
from kvjax.cli.models import asked_rate
from kvjax.errors import UserError
from tests.models.tokenizer_builders import tiny_tokenizer
from tests.tiny import TINY


def parse(*arguments, **kind):
    parser = ArgumentParser()
    add_model_options(parser, **kind)
    return parser.parse_args([str(argument) for argument in arguments])


@pytest.mark.parametrize("files_only", [False, True])
def test_weights_are_loaded_in_float32_on_a_cpu(tiny_folder, files_only):
    model, dtype = load_chosen_model(parse("--weights", tiny_folder, files_only=files_only))
    assert dtype == "float32"
    assert model.config.vocab_size == TINY.vocab_size
    assert model.params["embed"][...].dtype == "float32"


def test_a_dtype_that_was_asked_for(tiny_folder):
    model, dtype = load_chosen_model(parse("--weights", tiny_folder, "--dtype", "bfloat16"))
    assert dtype == "bfloat16"
    assert model.params["embed"][...].dtype == "bfloat16"


def test_unknown_models_are_refused_early():
    with pytest.raises(UserError, match="did you mean"):
        check_model_options(parse("--model", "smollm2-136m"))
    with pytest.raises(UserError, match="unrecognized arguments: --dtype"):
        parse("--dtype", "float32", files_only=True)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("none", "no such file or folder"),
        ("empty", "holds no checkpoint"),
        ("other", "its tokenizer differs from the model's"),
    ],
)
def test_a_model_that_cannot_draft_is_refused_before_weights_are_read(
    tiny_folder, tmp_path, monkeypatch, draft, says, random
):
    (tmp_path / "empty").mkdir()
    shutil.copytree(tiny_folder, tmp_path / "other")
    tiny_tokenizer().save(tmp_path / "other")
    for name in ("load_params", "init_params"):
        monkeypatch.setattr(f"kvjax.models.{name}", lambda *_, **__: pytest.fail("too late"))
    options = parse("--weights", tiny_folder, *["--dummy-weights"] * random)
    with pytest.raises(UserError, match=says):
        load_chosen_model(argparse.Namespace(**vars(options), draft=str(tmp_path / draft)))


@pytest.mark.parametrize(
    ("asked", "rate"),
    [
        ({}, 8),
        ({"method": "snapkv"}, 8),
        ({"rate": 2.5}, 2.5),
        ({"rate": 1.0, "method": "full"}, 1),
        ({"method": "full"}, None),
        ({"max_cache_tokens": 64}, None),
        ({"budget_bytes": 1 << 20}, None),
    ],
)
def test_a_cache_without_a_size_has_the_usual_rate(asked, rate):
    nothing = dict.fromkeys(("rate", "max_cache_tokens", "budget_bytes", "method"))
    assert asked_rate(argparse.Namespace(**nothing | asked)) == rate
