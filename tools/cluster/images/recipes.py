"""What goes into the operator's and the trainer's image, and the tag that follows from it.

A tag is the hash of everything that goes in: the base, the requirements, the Containerfile and the code. So building
what stands already is a no-op, and two clones with the same code share an image.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.errors import ClusterError
from tools.cluster.images import base
from tools.cluster.layout import PROJECT

_IGNORED = "__pycache__"
_CODE_STAGE = "FROM dependencies"


@dataclass(frozen=True)
class Recipe:
    """One image: its repository, base packages, Containerfile, requirements and code (paths in the project)."""

    repository: str
    packages: tuple[str, ...]
    containerfile: str
    requirements: str
    code: tuple[str, ...]
    takes_requirements: bool = False

    def tag(self, project: Path = PROJECT) -> str:
        """The hash of everything that goes in.

        Raises:
            ClusterError: one of the files is missing.
        """
        digest = hashlib.sha256(base.name(self.packages).encode())
        for relative in self.files(project):
            digest.update(f"{relative}\0".encode() + (project / relative).read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    @property
    def dependencies_image(self) -> str:
        """The repository, in buildah's store, of the stage `dependencies`."""
        return f"localhost/{self.repository}-dependencies"

    def dependencies_tag(self, project: Path = PROJECT) -> str:
        """The hash of what goes into the stage `dependencies`: the base, the requirements, the stage's own lines."""
        digest = hashlib.sha256(base.name(self.packages).encode())
        digest.update(self.stages(project)[0].encode() + (project / self.requirements).read_bytes())
        return digest.hexdigest()[:16]

    def stages(self, project: Path = PROJECT) -> tuple[str, str]:
        """The Containerfile's text before and after the line `FROM dependencies`.

        Raises:
            ClusterError: there is no such line, or more than one.
        """
        parts = (project / self.containerfile).read_text().split(f"\n{_CODE_STAGE}\n")
        if len(parts) != 2:
            raise ClusterError(f"{self.containerfile} must have the line `{_CODE_STAGE}` once, before the code's layer")
        return parts[0], parts[1]

    def files(self, project: Path = PROJECT) -> list[Path]:
        """Every file that goes in, relative to the project, in order."""
        found: list[Path] = []
        for name in (self.containerfile, self.requirements, *self.code):
            path = project / name
            if not path.exists():
                raise ClusterError(f"{name} goes into the image {self.repository}, and is missing in {project}")
            found += sorted(_files_below(path)) if path.is_dir() else [path]
        return [path.relative_to(project) for path in found]

    def copy_context(self, target: Path, project: Path = PROJECT) -> None:
        """Copy the files that go in, and no others, to the folder `target`."""
        for relative in self.files(project):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project / relative, target / relative)

    @property
    def build_arguments(self) -> list[str]:
        """The build arguments of the Containerfile, except its base."""
        return [f"--build-arg=REQUIREMENTS={self.requirements}"] if self.takes_requirements else []


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and _IGNORED not in path.parts]


_SHARED_CODE = ("pyproject.toml", "README.md", "LICENSE", "operator/ppojob_api")
OPERATOR = Recipe(
    repository="ppojob/operator",
    packages=base.OPERATOR_PACKAGES,
    containerfile="operator/Containerfile",
    requirements="requirements/operator.txt",
    code=(*_SHARED_CODE, "operator/ppojob_operator"),
)
TRAINER = Recipe(
    repository="ppojob/trainer",
    packages=base.TRAINER_PACKAGES,
    containerfile="trainer_image/Containerfile",
    requirements="requirements/trainer-cpu.txt",
    code=(*_SHARED_CODE, "trainer_image/ppojob_trainer"),
    takes_requirements=True,
)
RECIPES = {"operator": OPERATOR, "trainer": TRAINER}
