"""Packs the cluster for a machine without a network: programs, sources, the operator's packages, in parts of a size.

Called by the command `pack` here; `unpack.sh`, which it writes beside the parts, joins them there. What it refuses:
to pack what is not built (it builds it) or not installed (it names the package).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tools.cluster import binaries, system_packages
from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.layout import PROJECT, Layout
from tools.cluster.node import CNI_PLUGINS
from tools.cluster.stages import Stages

PART_BYTES = 59_000_000
# Two archives, because one takes minutes to compress and seldom changes, and the other seconds.
PROGRAMS = "cluster-programs"
SOURCES = "cluster-sources"
PACK_LIMIT_SECONDS = 1800.0
# One stream with a large dictionary: the programs have much code in common, and are far apart.
_XZ = "xz -T1 --x86 --lzma2=preset=9e,dict=192MiB"
# module -> its programs that travel; kube-proxy needs iptables, and images come as archives
_PROGRAMS = {
    "helm": ("helm",),
    "pause": ("pause",),
    "etcd": ("etcd",),
    "kuberay": ("ray-operator",),
    "coredns": ("coredns",),
    "kubernetes": ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"),
}
_RUNTIME = ("containerd", "containerd-shim-runc-v2", "runc", "ctr")
_FALLBACK = ("ip",)
_CNI = ("bridge", "host-local", "loopback")
# Every machine has the C library, and another one beside it would break its own programs.
_C_LIBRARY = re.compile(r"^(libc|libm|libdl|libpthread|librt|libresolv)\.so|^ld-linux")
_SOURCES = ("operator", "trainer_image", "tools/cluster", "tests/bench", "charts", "crds")
_UNPACK = """#!/usr/bin/env bash
# unpack.sh DIR: joins the parts that lie beside this file into DIR/ppojob-cluster, whose start.sh goes on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
for first in "$here"/cluster-*-part-00; do
  archive=${first%-part-00}
  case $archive in *.xz) decompress="xz -dT0" ;; *) decompress="gzip -d" ;; esac
  cat "$archive"-part-* | $decompress | tar -x --no-same-owner -C "$1"
done
"""


@dataclass(frozen=True)
class Options:
    """What is packed, and how.

    `python_version`: of the other machine's interpreter, "" if that has the operator's packages already.
    `is_quick`: gzip instead of xz, which is seconds instead of minutes and twice the size.
    `has_programs`: False leaves the parts of an earlier pack as they are.
    """

    python_version: str = "3.12"
    is_quick: bool = False
    has_programs: bool = True


def pack(layout: Layout, output: Path, options: Options, stages: Stages) -> list[Path]:
    """Write the parts and `unpack.sh` into `output`; return the parts.

    Raises:
        StageFailed: a stage failed; it has been reported.
    """
    output.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    with tempfile.TemporaryDirectory(dir=output) as temporary:
        programs, sources = (Path(temporary) / name / "ppojob-cluster" for name in (PROGRAMS, SOURCES))
        if options.has_programs:
            with stages.stage("programs, and the operator's Python packages") as stage:
                copy_programs(layout, programs)
                copy_system(programs / "system")
                _install_packages(programs / "packages", options.python_version)
                parts += compress(programs, output, PROGRAMS, is_quick=options.is_quick)
                stage.note = _sizes(parts)
        with stages.stage("sources") as stage:
            copy_sources(PROJECT, sources)
            written = compress(sources, output, SOURCES, is_quick=options.is_quick)
            stage.note = _sizes(written)
    write_unpack(output)
    return [*parts, *written]


def _sizes(parts: list[Path]) -> str:
    return ", ".join(f"{part.name}: {part.stat().st_size / 1e6:.1f} MB" for part in parts)


def write_unpack(output: Path) -> None:
    """Write the script that joins the parts, beside them."""
    script = output / "unpack.sh"
    script.write_text(_UNPACK)
    script.chmod(0o755)


def copy_programs(layout: Layout, top: Path) -> None:
    """Copy the built programs and the files that their modules hand out, in the cache's own layout."""
    builds, links = top / "cache" / "builds", top / "cache" / "bin"
    links.mkdir(parents=True)
    for module in binaries.MODULES:
        if module.name not in _PROGRAMS:
            continue
        binaries.ensure(layout, module)
        source = binaries.built_folder(layout, module)
        target = builds / source.name
        target.mkdir(parents=True)
        for program in _PROGRAMS[module.name]:
            binary = module.commands[program]
            shutil.copy2(source / binary, target / binary)
            (links / program).symlink_to(f"../builds/{source.name}/{binary}")
        for asset in module.assets:
            shutil.copytree(source / asset, target / asset)


def copy_system(target: Path) -> None:
    """Copy the container runtime, the network plugins, `ip`, and the libraries that they are linked with.

    Raises:
        ClusterError: one of them is not installed here.
    """
    system_packages.ensure()
    folders = {"bin": _RUNTIME, "fallback": _FALLBACK}
    programs = [(folder, _found(name)) for folder, names in folders.items() for name in names]
    programs += [("cni", CNI_PLUGINS / name) for name in _CNI]
    for folder, program in programs:
        (target / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy2(program, target / folder)
    (target / "lib").mkdir()
    for library in sorted({path for _, program in programs for path in libraries(run(["ldd", program], limit=30))}):
        shutil.copy2(library, target / "lib")


def libraries(said: str) -> list[Path]:
    """The shared libraries in the output of `ldd`, less the C library's own."""
    found = [Path(match) for match in re.findall(r"=> (/\S+) \(", said)]
    return [path for path in found if not _C_LIBRARY.match(path.name)]


def copy_sources(project: Path, top: Path) -> None:
    """Copy what runs there: the project's own programs, the chart, and this package."""
    for name in _SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(project / name, top / "source" / name, ignore=ignored)
    # The operator asks for its own version, as the packages do that are installed.
    own = distribution("ppojob")
    about = top / "source" / "operator" / f"ppojob-{own.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(own.read_text("METADATA") or "")
    # A package of some wheel may be called `tests` too; a plain folder of that name would lose to it.
    (top / "source" / "tests" / "__init__.py").touch()
    shutil.copy2(Path(__file__).with_name("start.sh"), top)


def _found(program: str) -> Path:
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise ClusterError(f"the program {program} is not installed; `python -m tools.cluster up` installs it")
    return Path(path)


def _install_packages(target: Path, python_version: str) -> None:
    target.mkdir()
    if not python_version:
        return
    uv = shutil.which("uv") or PROJECT / ".build" / "uv" / "bin" / "uv"
    run(
        [
            *(uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"),
            *(f"--python-version={python_version}", "--python-platform=x86_64-manylinux_2_28"),
            *(f"--target={target}", f"--requirement={PROJECT / 'requirements' / 'operator.txt'}"),
        ],
        limit=300,
    )
    shutil.rmtree(target / "bin", ignore_errors=True)


def compress(top: Path, output: Path, name: str, *, is_quick: bool, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the folder `top` into `output` as parts of `part_bytes` each; return them. Earlier ones are removed."""
    for old in output.glob(f"{name}.tar.*"):
        old.unlink()
    pattern, compressor = (f"{name}.tar.gz-part-", "gzip -1") if is_quick else (f"{name}.tar.xz-part-", _XZ)
    members = f"tar --sort=name --owner=0 --group=0 --mtime=@0 -C {top.parent} -c {top.name}"
    split = f"split --numeric-suffixes --bytes={part_bytes} - {output / pattern}"
    command = f"set -o pipefail; {members} | {compressor} | {split}"
    run(["bash", "-c", command], limit=PACK_LIMIT_SECONDS)
    return sorted(output.glob(f"{pattern}*"))
