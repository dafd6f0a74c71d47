"""What generation_config.json says of sampling is checked before anybody asks."""

from __future__ import annotations

import json

import pytest

from jserve.config import Config
from jserve.engine.early import check_early
from jserve.engine.sampling_defaults import sampling_defaults
from jserve.errors import ConfigError
from jserve.weights.checkpoint import Checkpoint


def _defaults(folder, **generation):
    return sampling_defaults(Checkpoint("dummy", folder, {}, generation))


def test_only_what_the_file_sets_of_sampling_is_a_default(tmp_path):
    stated = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_length": 9}
    assert _defaults(tmp_path, **stated) == {"temperature": 0.6, "top_k": 20}
    assert _defaults(tmp_path) == {}


def test_a_top_k_of_zero_is_all(tmp_path):
    assert _defaults(tmp_path, top_k=0) == {"top_k": -1}


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("temperature", "hot", "a number, got 'hot'"),
        ("temperature", [0.6], "a number, got"),
        ("temperature", True, "a number, got True"),
        ("temperature", float("nan"), r"in \[0, "),
        ("top_p", 0, r"in \(0, 1\], got 0"),
        ("top_k", 2.5, "an integer, got 2.5"),
        ("top_k", -5, r"-1 \(all\) or in"),
        ("min_p", 3, r"in \[0, 1\], got 3"),
        ("repetition_penalty", 0, r"in \(0, 2\], got 0"),
    ],
)
def test_a_default_that_every_chat_would_fail_on_is_a_config_error(tmp_path, key, value, rule):
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} must be {rule}"):
        _defaults(tmp_path, **{key: value})


def test_it_is_refused_before_the_server_listens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0}))
    with pytest.raises(ConfigError, match=f"{tmp_path}/generation_config.json: top_p must be in"):
        check_early(Config.from_flags(model_path=str(tmp_path), load_format="dummy"))
