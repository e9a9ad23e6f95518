import hashlib
import http.client
import io
import urllib.request

import pytest

from fednorm.data.sources import download
from fednorm.errors import DamagedDataError


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Answer(io.BytesIO):
    def __init__(self, data, length, error=None):
        super().__init__(data)
        self.headers = {"Content-Length": str(length)}
        self.error = error

    def read(self, count):
        if self.error is not None and self.tell():
            raise self.error
        return super().read(count)


def test_a_file_is_downloaded(tmp_path):
    (tmp_path / "there.bin").write_bytes(b"all of it")
    url = (tmp_path / "there.bin").as_uri()
    path = download(url, tmp_path / "here", md5(b"all of it"))
    assert path == tmp_path / "here" / "there.bin"
    assert path.read_bytes() == b"all of it"
    assert list(path.parent.iterdir()) == [path]


def test_a_wrong_checksum_is_refused_and_nothing_stays(tmp_path):
    (tmp_path / "there.bin").write_bytes(b"something else")
    wanted = md5(b"all of it")
    with pytest.raises(DamagedDataError, match=f"MD5 is {md5(b'something else')}.*be {wanted}"):
        download((tmp_path / "there.bin").as_uri(), tmp_path / "here", wanted)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (None, ConnectionError),  # the other side hung up: no error, only fewer bytes
        (TimeoutError("slow"), TimeoutError),
        (http.client.IncompleteRead(b""), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch, error, seen):
    answer = Answer(b"all o", length=9, error=error)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: answer)
    with pytest.raises(seen):
        download("https://example.org/there.bin", tmp_path / "here", md5(b"all o"))
    assert not list((tmp_path / "here").iterdir())


def test_an_older_file_stays_if_the_download_fails(tmp_path, monkeypatch):
    (tmp_path / "there.bin").write_bytes(b"old")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Answer(b"ne", 3))
    with pytest.raises(ConnectionError, match="after 2 of 3 bytes"):
        download("https://example.org/there.bin", tmp_path, md5(b"new"))
    assert (tmp_path / "there.bin").read_bytes() == b"old"


def test_requests_have_a_user_agent_and_a_timeout(tmp_path, monkeypatch):
    asked = []

    def answer(request, timeout):
        asked.append((request.get_header("User-agent"), timeout))
        return Answer(b"new", 3)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    download("https://example.org/there.bin", tmp_path, md5(b"new"))
    ((agent, timeout),) = asked
    assert "fednorm" in agent
    assert 0 < timeout <= 10
