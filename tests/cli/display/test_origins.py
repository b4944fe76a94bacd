"""The settings of a result, in one line."""

from ggufmill.cli.display.origins import settings_text


def test_nothing_and_off_are_settings_too():
    settings = {
        "threads": 2,
        "n_ctx": None,
        "cache_k": "f16",
        "mla": 0,
        "flash": False,
        "repack": True,
        "expert_reduction": None,
    }
    assert settings_text(settings) == "threads 2, cache_k f16, flash off, mla 0, repack on"
    assert settings_text(settings | {"expert_reduction": [6, 0.4]}).endswith("repack on, expert_reduction 6 0.4")
