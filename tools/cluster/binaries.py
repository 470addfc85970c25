"""Builds the cluster's programs from the Go modules of tools/cluster/go, once for each content of a module.

Called by `build` and `up`. A module pins every dependency (go.mod, go.sum); the manifests that the upstream modules
carry (CRDs, KWOK's stages) are copied beside the binaries, so that starting a cluster needs no Go.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.layout import GO_MODULES, Layout
from tools.cluster.locks import held

BUILD_LIMIT_SECONDS = 3600.0
KUBERNETES_VERSION = "v1.34.4"
# Static binaries: they also run in an image without a C library.
_GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
# Without these the API server calls itself v0.0.0, and Helm refuses it.
_KUBERNETES_VARIABLES = {
    "k8s.io/component-base/version.gitVersion": KUBERNETES_VERSION,
    "k8s.io/component-base/version.gitMajor": "1",
    "k8s.io/component-base/version.gitMinor": "34",
    "k8s.io/client-go/pkg/version.gitVersion": KUBERNETES_VERSION,
}


@dataclass(frozen=True)
class GoModule:
    """One folder of tools/cluster/go: the commands that it builds and the files that it hands out.

    `commands`: name on PATH -> name that Go gives the binary. `variables`: set by the linker.
    `assets`: folder beside the binaries -> globs inside the upstream module `asset_module`.
    """

    name: str
    commands: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    asset_module: str = ""
    assets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return GO_MODULES / self.name

    @property
    def linker_flags(self) -> str:
        return " ".join(["-s", "-w", *(f"-X={name}={value}" for name, value in self.variables.items())])


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# The quick checks want the first soon; the longest build comes last, so that a broken toolchain shows early.
MODULES = (
    GoModule("helm", _same("helm")),
    GoModule("pause", _same("pause")),
    GoModule("etcd", {"etcd": "server"}),
    GoModule("registry", _same("registry")),
    GoModule(
        "kuberay",
        _same("ray-operator"),
        asset_module="github.com/ray-project/kuberay/ray-operator",
        assets={"crds": ("config/crd/bases/*.yaml",)},
    ),
    GoModule("coredns", _same("coredns")),
    GoModule(
        "kwok",
        _same("kwok"),
        asset_module="sigs.k8s.io/kwok",
        assets={
            "stages": (
                "kustomize/stage/pod/fast/*.yaml",
                "kustomize/stage/node/fast/*.yaml",
                "kustomize/stage/node/heartbeat/*.yaml",
            )
        },
    ),
    GoModule(
        "kubernetes",
        _same("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet"),
        variables=_KUBERNETES_VARIABLES,
    ),
)

# Built where they are asked for by name: a cluster does without them.
KUEUE = GoModule("kueue", _same("kueue"), asset_module="sigs.k8s.io/kueue")
KUBE_ROUTER = GoModule("kube-router", _same("kube-router"))
OPTIONAL = (KUEUE, KUBE_ROUTER)


def ensure(layout: Layout, module: GoModule) -> bool:
    """Build the module unless this content of it was built before, and link its commands; True if it was built.

    Raises:
        ClusterError: Go is missing or too old, or the build fails.
    """
    target = built_folder(layout, module)
    layout.builds.mkdir(parents=True, exist_ok=True)
    with held(layout.builds / f"{module.name}.lock", limit=BUILD_LIMIT_SECONDS):
        was_built = not target.is_dir()
        if was_built:
            _build(layout, module, target)
    layout.bin.mkdir(parents=True, exist_ok=True)
    for command, binary in module.commands.items():
        _link(layout.bin / command, target / binary)
    return was_built


def built_folder(layout: Layout, module: GoModule) -> Path:
    """Where this content of the module is, or will be, built."""
    digest = hashlib.sha256(f"{module.linker_flags} {sorted(module.assets.items())}".encode())
    for path in sorted(module.folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return layout.builds / f"{module.name}-{digest.hexdigest()[:16]}"


def assets(layout: Layout, module_name: str) -> Path:
    """The folder with the files that a built module hands out."""
    return built_folder(layout, next(module for module in (*MODULES, *OPTIONAL) if module.name == module_name))


def upstream_folder(module: GoModule) -> Path:
    """The folder of `asset_module` in Go's module cache, which is read-only."""
    command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module.asset_module]
    return Path(run(command, limit=120, environment=_GO_ENVIRONMENT, folder=module.folder).strip())


def _build(layout: Layout, module: GoModule, target: Path) -> None:
    _require_go(module)
    log = layout.log(f"build-{module.name}")
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=layout.builds))
    try:
        staging.chmod(0o755)
        run(
            [
                *("nice", "-n", "5", "go", "build", "-mod=readonly", "-trimpath", "-buildvcs=false"),
                *("-ldflags", module.linker_flags, "-o", f"{staging}{os.sep}", "tool"),
            ],
            limit=BUILD_LIMIT_SECONDS,
            environment=_GO_ENVIRONMENT,
            folder=module.folder,
            log=log,
        )
        _copy_assets(module, staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _copy_assets(module: GoModule, staging: Path) -> None:
    if not module.assets:
        return
    source = upstream_folder(module)
    for name, globs in module.assets.items():
        (staging / name).mkdir()
        for pattern in globs:
            _copy_matching(source, pattern, staging / name)


def _copy_matching(source: Path, pattern: str, target: Path) -> None:
    found = sorted(source.glob(pattern))
    if not found:
        raise ClusterError(f"{source} has no {pattern}: the module's layout has changed")
    for path in found:
        if path.name != "kustomization.yaml":
            # Go's module cache is read-only; the parent's name keeps the files of several folders apart.
            (target / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())


def _require_go(module: GoModule) -> None:
    if shutil.which("go") is None:
        raise ClusterError("the program `go` is not on PATH; install Go, then run this again")
    wanted = re.search(r"^go (\d+)\.(\d+)", (module.folder / "go.mod").read_text(), re.MULTILINE)
    has = re.search(r"go(\d+)\.(\d+)", run(["go", "env", "GOVERSION"], limit=120))
    if wanted and has and tuple(map(int, has.groups())) < tuple(map(int, wanted.groups())):
        raise ClusterError(f"Go {has[0]} is too old for {module.name}, which needs {wanted[0]}; install a newer Go")


def _link(link: Path, target: Path) -> None:
    if not target.is_file():
        raise ClusterError(f"{target} is missing in a finished build; remove {target.parent} and build again")
    if link.is_symlink() and link.readlink() == target:
        return
    staging = link.with_name(f".{link.name}.{os.getpid()}")
    staging.symlink_to(target)
    staging.replace(link)
