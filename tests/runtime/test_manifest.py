from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdgen.errors import ArtifactError
from kdgen.runtime import manifest as module
from kdgen.runtime.manifest import parse_manifest, read_binaries, read_manifest
from tests.runtime.builds import CONTRACTS, edit_manifest, write_manifest


@pytest.fixture
def host(built: Path) -> Path:
    return built / "host"


def test_a_manifest_says_what_was_written(host: Path, library: bytes) -> None:
    for place in (host, host / "manifest.json"):
        manifest, images = read_binaries(place)
        assert manifest.spec["name"] == "small"
        assert manifest.target.is_host
        assert manifest.kernels["scale"].contract == CONTRACTS["scale"]
        assert manifest.kernels["scale"].hash == "hash of scale"
        assert images["scale"] == library


def test_every_truncation_is_found(host: Path) -> None:
    content = (host / "manifest.json").read_bytes()
    for length in range(0, len(content), 37):
        with pytest.raises(ArtifactError, match=r"manifest.json: .*kdgen build"):
            parse_manifest(host / "manifest.json", content[:length])


def test_every_changed_value_is_found(host: Path) -> None:
    data = json.loads((host / "manifest.json").read_text())
    data["kernels"]["scale"]["contract"]["launches"][0]["block"] = 64
    (host / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match="do not match its digest"):
        read_manifest(host)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), r"made by a newer kdgen \(0.1.0; manifest schema 2, this one reads up to 1\): upgrade"),
        (lambda d: d.update(schema=0), "schema 0 is too old"),
        (lambda d: d.pop("schema"), "not a kdgen manifest"),
        (lambda d: d.pop("target"), "not what a manifest looks like .*target"),
        (lambda d: d["kernels"]["scale"].pop("contract"), "not what a manifest looks like"),
        (lambda d: d["kernels"]["scale"]["files"].pop("binary"), "files.binary"),
        (lambda d: d["kernels"]["scale"]["contract"].update(more=1, arguments=3), "not what a manifest looks like"),
        (lambda d: d["kernels"]["scale"]["files"]["binary"].update(path="../../etc/passwd"), "leaves the directory"),
        (lambda d: d["kernels"]["scale"]["files"]["binary"].update(path="/etc/passwd"), "leaves the directory"),
        (lambda d: d["kernels"]["scale"]["files"]["binary"].update(bytes=5), "the manifest says 5: truncated or replaced"),
        (lambda d: d["kernels"]["scale"]["files"]["binary"].update(sha256="0" * 64), "SHA-256 is not the manifest's"),
        (
            lambda d: d["kernels"]["scale"]["files"]["binary"].update(path="gone.so"),
            "gone.so: no such binary .of kernel 'scale'.*kdgen build SPEC --arch host",
        ),
    ],
)
def test_a_manifest_that_is_not_right_is_refused(host: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    edit_manifest(host, change)
    with pytest.raises(ArtifactError, match=message):
        read_manifest(host)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": true}', b'{"schema": 1e9}'])
def test_other_files_are_refused(host: Path, content: bytes) -> None:
    (host / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        read_manifest(host)


def test_missing_and_unreadable_manifests(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such manifest; make it with: kdgen build"):
        read_manifest(tmp_path)


def test_a_directory_swapped_between_two_reads_is_read_again(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = module._read_file, []

    def swapped(place: Path, what: str, remedy: str) -> bytes:
        calls.append(place)
        if len(calls) == 2:
            raise ArtifactError("gone")  # the first binary, while a build swaps the directory
        return real(place, what, remedy)

    monkeypatch.setattr(module, "_read_file", swapped)
    manifest, images = read_binaries(host)
    assert len(images) == len(manifest.kernels) == len(CONTRACTS)
    assert len(calls) == 2 + 1 + len(CONTRACTS)


def test_unchecked_files_need_not_be_there(host: Path) -> None:
    (host / "scale.so").unlink()
    assert "scale" in read_manifest(host, check_files=False).kernels
    with pytest.raises(ArtifactError, match=r"scale\.so"):
        read_manifest(host)


def test_files_that_future_kdgens_add_do_no_harm(host: Path) -> None:
    edit_manifest(host, lambda d: d.update(extra={"x": 1}))
    assert read_manifest(host).data["extra"] == {"x": 1}
    data = dict(read_manifest(host).data)
    write_manifest(host, {key: value for key, value in data.items() if key != "digest"})
    assert read_manifest(host).digest == data["digest"]
