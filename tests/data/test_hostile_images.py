"""Files that pretend to be images: none runs, hangs or fills the memory, and each is named."""

import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from fednorm.data import decoder, image_files, load_dataset
from fednorm.data.decoder import open_image
from fednorm.errors import DamagedDataError

pytestmark = pytest.mark.usefixtures("home")

POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
0 0 8 8 rectfill
showpage
"""


def make_bomb(side):
    """Return a small PNG file that says it has side x side pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels


@pytest.fixture
def tree(tmp_path, draw):
    """Two classes with six images each."""
    for label in range(2):
        for number in range(6):
            draw(tmp_path / "tree" / f"c{label}" / f"{number}.png", seed=10 * label + number)
    return tmp_path / "tree"


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """Return a file that is written if Pillow starts Ghostscript."""
    mark, program = tmp_path / "mark", tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\n/bin/echo started >> {mark}\n")
    program.chmod(0o755)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return mark


def place(tree, kind):
    """Put a hostile file among the images."""
    path = tree / "c0" / "3.png"
    if kind == "link":
        outside = path.rename(tree.parent / "outside.png")
        path.symlink_to(outside)
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
    else:
        whole = path.read_bytes()
        path.write_bytes(
            {
                "postscript": POSTSCRIPT, "bomb": make_bomb(9500), "large bomb": make_bomb(60000),
                "cut": whole[: len(whole) // 2], "text": b"no image", "empty": b"",
            }[kind]
        )  # fmt: skip
    return path


KINDS = ["postscript", "bomb", "large bomb", "cut", "text", "empty", "pipe", "device", "link"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_hostile_file_is_named_and_refused(tree, ghostscript, kind):
    path = place(tree, kind)
    with pytest.raises(DamagedDataError, match=str(path)) as found:
        load_dataset("folder", 0, root=str(tree), size=8)
    assert str(found.value).count("remove it") <= 1
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_hostile_file_is_named_and_skipped_if_asked(tree, kind, caplog):
    path = place(tree, kind)
    data = load_dataset("folder", 0, root=str(tree), size=None, damaged="skip", test_share=0.34)
    assert len(data.y) + len(data.y_test) == 11
    assert str(path) in caplog.text
    # The images that are left keep their labels.
    pixels = {
        np.asarray(Image.open(file)).tobytes(): int(file.parent.name[1])
        for file in tree.glob("*/*.png")
        if file != path
    }
    for x, y in [*zip(data.x, data.y, strict=True), *zip(data.x_test, data.y_test, strict=True)]:
        assert pixels[x.numpy().transpose(1, 2, 0).tobytes()] == y


def test_a_folder_that_is_a_link_out_of_the_root_is_refused(tree, tmp_path):
    (tree / "c1").rename(tmp_path / "other")
    (tree / "c1").symlink_to(tmp_path / "other")
    with pytest.raises(DamagedDataError, match=r"c1 is a link out of .*tree"):
        load_dataset("folder", 0, root=str(tree))


def test_links_within_the_root_and_to_the_root_are_followed(tree, tmp_path):
    (tree / "c1" / "6.png").symlink_to(tree / "c0" / "0.png")
    (tmp_path / "there").symlink_to(tree)
    data = load_dataset("folder", 0, root=str(tmp_path / "there"))
    assert len(data.y) + len(data.y_test) == 13


def test_nothing_is_left_if_all_images_are_damaged(tree):
    for path in tree.glob("*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DamagedDataError, match="none of 10 images can be read"):
        load_dataset("folder", 0, root=str(tree), damaged="skip")


LARGE = """
import resource, sys
from fednorm.data import decoder, image_files, load_dataset
from fednorm.system import count_cores
image_files.count_cores = lambda: 12
load_dataset("folder", 0, root=sys.argv[1], size=8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_many_large_images_at_once_stay_within_the_announced_memory(tree):
    first, *others = tree.glob("*/*.png")
    Image.new("RGB", (6000, 5000)).save(first, compress_level=1)
    for path in others:
        path.write_bytes(first.read_bytes())

    def measure(*code):
        command = [sys.executable, "-c", *code, str(tree)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    before = measure("import resource, fednorm.data.image_files as m; m.count_cores(); "
                     "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")  # fmt: skip
    assert (measure(LARGE) - before) * 1024 < 12 * decoder.MOST_PIXELS


def test_all_suffixes_can_be_read(tmp_path):
    for suffix in image_files.SUFFIXES:
        path = tmp_path / f"image{suffix}"
        Image.new("RGB", (8, 8)).save(path)
        with open_image(path) as image:
            assert image.size == (8, 8)
