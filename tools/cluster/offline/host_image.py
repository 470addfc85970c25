"""Images that hold almost nothing: a root whose content is mounted from the machine by the container runtime.

The mounts are in the runtime's base specification, so that neither the chart nor a PPOJob says anything about them.
Called by `start`, before containerd runs (the specification) and after (the images).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.cluster.command import run
from tools.cluster.offline.machine import HOME, OPERATOR_USER_ID, PROGRAMS, USER_ID, Machine

PAUSE_IMAGE = "localhost/ppojob-pause:1"
TRAINER_IMAGE = "localhost/ppojob-trainer:1"
OPERATOR_IMAGE = "localhost/ppojob-operator:1"
# The rest of the machine's settings is none of the pods' business, its keys least of all.
_SETTINGS = (
    *("group", "passwd", "nsswitch.conf", "protocols", "services", "localtime"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf"),
)
_OPEN_FOLDERS = ("tmp", "var/tmp", HOME.strip("/"))
_FOLDERS = ("proc", "sys", "dev", "run", "var", "root", "usr", "opt")
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# name -> what it runs
_PROGRAMS = {
    "ray": "python -m ray.scripts.scripts",
    "ppojob": "python -c 'from ppojob_trainer.cli import main; main()'",
    "ppojob-operator": "python -c 'from ppojob_operator.main import main; main()'",
}


def write_specification(machine: Machine) -> Path:
    """Write the specification that the runtime begins each container with; return its file."""
    specification = json.loads(run(["ctr", "oci", "spec"], limit=30))
    specification["mounts"] += [
        {"destination": str(path), "source": str(path), "type": "bind", "options": ["rbind", "ro"]}
        for path in machine.mounts()
    ]
    path = machine.layout.config / "base-specification.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(specification))
    return path


def write_images(machine: Machine) -> list[Path]:
    """Write the archives of all images; return their files."""
    folder = machine.layout.state / "images"
    folder.mkdir(parents=True, exist_ok=True)
    pause = _layer({"pause": (machine.layout.bin / "pause").read_bytes()}, [])
    root = root_layer()
    archives: dict[str, tuple[bytes, dict[str, object]]] = {
        PAUSE_IMAGE: (pause, {"Entrypoint": ["/pause"], "User": "65535"}),
        TRAINER_IMAGE: (root, _config(machine.trainer_environment(), HOME, USER_ID, ["ppojob", "--help"])),
        OPERATOR_IMAGE: (root, _config(machine.operator_environment(), "/tmp", OPERATOR_USER_ID, ["ppojob-operator"])),
    }
    written = []
    for name, (layer, config) in archives.items():
        path = folder / f"{name.rpartition('/')[2].partition(':')[0]}.tar"
        path.write_bytes(image_archive(name, layer, config))
        written.append(path)
    return written


def root_layer(root: Path = Path("/")) -> bytes:
    """The tar file of an image's root: places to mount to, links, some of the machine's settings, and the programs."""
    programs = {
        f"{PROGRAMS.strip('/')}/{name}": f'#!/bin/sh\nexec {command} "$@"\n' for name, command in _PROGRAMS.items()
    }
    links = [root / name for name in _ROOT_LINKS if (root / name).is_symlink()]
    settings = [root / "etc" / name for name in _SETTINGS if (root / "etc" / name).exists()]
    return _layer({name: text.encode() for name, text in programs.items()}, [*links, *settings], root)


def _layer(files: Mapping[str, bytes], copied: Sequence[Path], root: Path = Path("/")) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in (*_FOLDERS, *_OPEN_FOLDERS):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name in _OPEN_FOLDERS else 0o755
            archive.addfile(folder)
        for path in copied:
            archive.add(path, arcname=str(path.relative_to(root)))
        for name, content in files.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(content), 0o755
            archive.addfile(file, io.BytesIO(content))
    return buffer.getvalue()


def _config(environment: Mapping[str, str], home: str, user: int, command: list[str]) -> dict[str, object]:
    # Some programs ask for their user's home by number, and the machine's list of users may not have it.
    variables = {**environment, "HOME": home}
    return {
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "User": str(user),
        "WorkingDir": home,
        "Entrypoint" if command == ["ppojob-operator"] else "Cmd": command,
    }


def image_archive(name: str, layer: bytes, config: Mapping[str, object]) -> bytes:
    """An image of one layer, in the form that `ctr images import` reads."""
    digest = hashlib.sha256(layer).hexdigest()
    root = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    text = json.dumps({"architecture": "amd64", "os": "linux", "config": dict(config), "rootfs": root}).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            (config_name, text),
            ("layer.tar", layer),
        ):
            information = tarfile.TarInfo(member)
            information.size = len(content)
            archive.addfile(information, io.BytesIO(content))
    return buffer.getvalue()
