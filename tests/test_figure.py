"""The figure for a paper: its file, its size, what is in it."""

import builtins

import pytest

from clearhead.view import figure

TOKENS = ["The", " dog", " $x^2$", " 🐕", "\x00", " " + "long" * 9]


def maps(T=6):
    return [[1.0 / (i + 1) if j <= i else 0.0 for j in range(T)] for i in range(T)]


SHAPES = [
    ((2, 2, 2), [(0, 1), (2, 0)]),
    ((3, 5), []),
    ((1,), [(0, 0)]),
    ((4, 4), [(0, n) for n in range(4)]),
]


@pytest.mark.parametrize(("heads", "chosen"), SHAPES)
@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_it_is_drawn(tmp_path, heads, chosen, kind):
    file = tmp_path / f"heads.{kind}"
    size = figure.draw(
        file, "a $model$", TOKENS, heads, [maps()] * sum(heads), dict.fromkeys(chosen, maps())
    )
    data = file.read_bytes()
    assert size == len(data) > 1000
    assert data.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
    if kind == "svg":
        text = data.decode()
        assert "a $model$" in text and ("head 0.0" in text) == ((0, 0) in chosen)
        assert ("$x^2$" in text) == bool(chosen)


def test_pixels_are_the_weights(tmp_path):
    from matplotlib.image import imread

    file = tmp_path / "heads.png"
    figure.draw(file, "m", TOKENS, (2, 1), [maps(), [[0.0] * 6] * 6, [[1.0] * 6] * 6], {})
    pixels = (imread(file)[:, :, :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    seen = {tuple(pixel) for pixel in pixels}
    assert (0x18, 0x0F, 0x3D) in seen and (0xF6, 0xF5, 0xF1) in seen


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"its name must end in \.png, \.pdf or \.svg"):
        figure.draw(tmp_path / "heads.jpg", "m", TOKENS, (1,), [maps()], {})


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "clearhead\[plot\]" brings it'):
        figure.draw(tmp_path / "heads.png", "m", TOKENS, (1,), [maps()], {})
