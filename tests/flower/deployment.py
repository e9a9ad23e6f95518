"""A SuperLink and SuperNodes as processes on the loopback interface, with TLS and known nodes."""

import contextlib
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
BIN = Path(sys.executable).parent
# Flower starts its own commands by their names.
_FOUND = {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
STARTED = 90.0  # seconds that a process may take to be there


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def write_certificates(folder):
    """Write ca.crt, and server.pem with server.key for 127.0.0.1."""
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fednorm tests")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    trusted = x509.BasicConstraints(ca=True, path_length=None)
    signed = {
        "ca.crt": _certificate(root, authority, root, authority, trusted),
        "server.pem": _certificate(name, server, root, authority, here),
    }
    for file, certificate in signed.items():
        (folder / file).write_bytes(certificate.public_bytes(Encoding.PEM))
    key = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(key)


def _certificate(subject, key, issuer, signer, extension):
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=2))
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .sign(signer, hashes.SHA256())
    )


def write_node_key(path):
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


class Deployment:
    """Processes that end with the block; each has a process group of its own."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes = {}
        write_certificates(folder)
        home = folder / "cli"
        home.mkdir()
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n[superlink.here]\n'
            f'address = "{self.address}"\nroot-certificates = "{folder / "ca.crt"}"\n'
        )

    def __enter__(self):
        arguments = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem"]
        arguments += ["--ssl-keyfile", "server.key", "--enable-supernode-auth"]
        arguments += ["--disable-runtime-dependency-installation"]
        arguments += ["--host", "127.0.0.1", "--port", str(self.port)]
        try:
            self._start("superlink", ["flower-superlink", *arguments])
            self._wait("superlink", self._healthy)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.kill(name)

    def _healthy(self):
        authority = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"https://{self.address}/health", verify=authority).is_success
        return False

    def _start(self, name, command):
        env = os.environ | QUIET | _FOUND | {"FLWR_HOME": str(self.folder / name)}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait(self, name, ready):
        until = time.monotonic() + STARTED
        while not ready():
            alive = self.processes[name].poll() is None
            assert alive and time.monotonic() < until, self.log(name)  # noqa: PT018
            time.sleep(0.2)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def cli(self, *arguments):
        env = os.environ | QUIET | _FOUND | {"FLWR_HOME": str(self.folder / "cli")}
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def node(self, number, *, register=True):
        """Start a SuperNode that has a partition."""
        name, key = f"node{number}", self.folder / f"key{number}"
        write_node_key(key)
        if register:
            self.cli("supernode", "register", str(key.with_suffix(".pub")), "here")
        arguments = ["--root-certificates", "ca.crt", "--superlink", self.address]
        arguments += ["--host", "127.0.0.1", "--port", str(free_port())]
        arguments += ["--auth-supernode-private-key", key.name]
        arguments += ["--node-config", f"partition-id={number}"]
        self._start(name, ["flower-supernode", *arguments])
        if register:
            self._wait(name, lambda: "SuperNode ID" in self.log(name))
        return self.processes[name]

    def kill(self, name):
        """End a process and all that it has started, which share its home."""
        process = self.processes.pop(name)
        while ours := at_home(self.folder / name):
            for number in ours:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()


def at_home(home):
    """Return the processes that were started with this home."""
    setting = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
