"""Bundled recipes: text and TOML files in this folder; the demo model; a calibration text."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SUFFIXES = (".txt", ".toml")
BUNDLED_MODEL = "demo"  # names the small model where one is asked for
BUNDLED = "bundled"  # names the calibration text where a text is asked for


def bundled(path: str | Path) -> Path:
    """The path itself if it exists or leads nowhere in this folder, else the bundled model or text of that name: `demo`,
    `demo/calibration.txt`."""
    given = Path(path)
    if given.exists() or given.is_absolute() or ".." in given.parts or given.parts[:1] != (BUNDLED_MODEL,):
        return given
    return FOLDER / given if (FOLDER / given).exists() else given


def bundled_text() -> Path:
    """The calibration text that comes with the program, a .jsonl file of 0.5 MB: prose, documentation, code, mathematics,
    conversations, in 35 languages. Each stretch of it has all of these."""
    return FOLDER / "text" / "bundled.jsonl"


def find_text(name: str | Path, folder: Path | None = None) -> Path:
    """The path of a text, in that folder if it is relative; of the bundled one for its name, unless there is a file of that
    name."""
    path = Path(folder or "", name)
    return bundled_text() if str(name) == BUNDLED and not path.exists() else path


def names() -> list[str]:
    return sorted(p.name for p in FOLDER.iterdir() if p.suffix in SUFFIXES)


def find(name: str | Path) -> Path:
    """The path itself if there is such a file, else the bundled recipe of that name (with or without suffix)."""
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    shipped = [FOLDER / path.name, *(FOLDER / (path.name + suffix) for suffix in SUFFIXES)]
    return next((p for p in shipped if p.is_file()), path)
