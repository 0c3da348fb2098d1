"""Presets, evaluation steps, learning rate, and the output folder's rules."""

import math

import pytest

from mhar.demo.folder import CONFIG, new_folder, resumed_settings
from mhar.demo.settings import PRESETS, DemoSettings, preset
from mhar.errors import ConfigurationError, InputError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_run_file(name, tmp_path):
    settings = preset(name)
    new_folder(tmp_path / "run", settings)
    assert resumed_settings(tmp_path / "run", {}) == settings


def test_options_override_a_preset():
    settings = preset("tiny", steps=7, seed=None)
    assert (settings.preset, settings.steps, settings.seed) == ("tiny", 7, 0)


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="unknown preset 'smal'; did you mean 'small'"):
        preset("smal")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("steps", 0, "steps must be a positive integer, got 0"),
        ("steps", -3, "steps must be a positive integer, got -3"),
        ("seed", -1, "seed must be an integer from 0 to 4294967295, got -1"),
        ("learning_rate", math.nan, "learning_rate must be a positive number, got nan"),
    ],
)
def test_values_without_meaning_are_refused(field, value, message):
    with pytest.raises(ConfigurationError, match=message):
        preset("tiny", **{field: value})


def test_the_last_evaluation_is_at_the_last_step():
    assert DemoSettings(steps=100, num_evaluations=4).evaluation_steps() == (25, 50, 75, 100)
    assert DemoSettings(steps=3, num_evaluations=5).evaluation_steps() == (1, 2, 3)
    assert DemoSettings(steps=1, num_evaluations=5).evaluation_steps() == (1,)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth():
    settings = DemoSettings(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [settings.learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_folder_with_another_run_is_refused_unless_told(tmp_path):
    folder = tmp_path / "run"
    new_folder(folder, preset("tiny"))
    (folder / "report.html").write_text("results")
    with pytest.raises(InputError, match=r"already holds another run.*--resume.*--overwrite"):
        new_folder(folder, preset("tiny"))
    assert (folder / "report.html").exists()
    new_folder(folder, preset("tiny", seed=5), overwrite=True)
    assert not (folder / "report.html").exists()
    assert resumed_settings(folder, {}).seed == 5


def test_a_folder_of_something_else_is_never_removed(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="not empty and holds no demo run"):
        new_folder(tmp_path, preset("tiny"), overwrite=True)
    (tmp_path / CONFIG).write_text("optimizer: {lr: 1}\n")
    with pytest.raises(ConfigurationError, match="unknown key 'optimizer'"):
        new_folder(tmp_path, preset("tiny"), overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_as_output_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="must be a folder, got the file"):
        new_folder(tmp_path / "file", preset("tiny"))


def test_resuming_needs_a_run_and_the_same_options(tmp_path):
    with pytest.raises(InputError, match="nothing to resume"):
        resumed_settings(tmp_path, {})
    new_folder(tmp_path / "run", preset("tiny", steps=9))
    assert resumed_settings(tmp_path / "run", {"steps": 9}).steps == 9
    with pytest.raises(InputError, match="its steps is 9, got 12"):
        resumed_settings(tmp_path / "run", {"steps": 12})
