"""A progress bar where a person is looking."""

from __future__ import annotations

from tqdm import tqdm


def progress_bar(show: bool | None, title: str, total: int) -> tqdm:
    """A bar of ``total`` updates; ``show=None`` shows it where standard error is a terminal."""
    # tqdm's own rule for None is exactly that.
    return tqdm(total=total, desc=title, disable=None if show is None else not show, leave=True)
