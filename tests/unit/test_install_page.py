"""docs/install.md: its job is the example, and all that it names is there."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_operator.manifests.pod import STORAGE_GROUP
from ppojob_trainer.cli import app
from tests.examples import EXAMPLES, FOLDER, name_of, spec_of
from tools.cluster.layout import Layout
from tools.images.recipes import RECIPES, tag

PAGE = Path("docs/install.md").read_text()
SMALLEST = FOLDER / "00-smallest"
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
VALUES = yaml.safe_load(Path("charts/ppojob/values.yaml").read_text())
[DEFINITION] = yaml.safe_load(Path("crds/ppojobs.ppojob.dev.yaml").read_text())["spec"]["versions"]
SPEC = DEFINITION["schema"]["openAPIV3Schema"]["properties"]["spec"]
CODE = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))


def is_value(path: str) -> bool:
    """Return whether the chart has a value of this path."""
    found: Any = VALUES
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


def is_field(path: str) -> bool:
    """Return whether the spec has a field of this path."""
    schema = SPEC
    for name in path.removeprefix("spec.").replace("[]", "").split("."):
        schema = schema.get("items", schema).get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def pin(package: str) -> str:
    match = re.search(rf"^{package}==(\S+)", Path("requirements/trainer.txt").read_text(), re.MULTILINE)
    assert match, package
    return match[1]


def module_version(name: str, module: str) -> str:
    match = re.search(rf"{re.escape(module)} v(\S+)", Path(f"tools/cluster/go/{name}/go.mod").read_text())
    assert match, module
    return match[1]


def test_the_job_comes_first_and_is_the_example() -> None:
    first = re.search(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)

    assert first
    assert first[1] == "yaml"
    comment, _, job = (SMALLEST / "ppojob.yaml").read_text().partition("\n")
    assert comment.startswith("# ")
    assert first[2] == job


@pytest.mark.parametrize("name", ["ppojob.yaml", "cpu.yaml"])
def test_the_job_is_accepted(name: str) -> None:
    done = CliRunner().invoke(app, ["validate", str(SMALLEST / name)])

    assert done.exit_code == 0, done.output
    assert "smallest: valid" in done.output


def test_the_job_is_small() -> None:
    assert (SMALLEST / "ppojob.yaml").read_text().count("\n") <= 26


def test_the_storage_holds_what_both_jobs_name() -> None:
    claim, job = yaml.safe_load_all((SMALLEST / "storage.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [mount] = container["volumeMounts"]
    _, _, gpu = parse_manifest(yaml.safe_load((SMALLEST / "ppojob.yaml").read_text()))
    _, _, cpu = parse_manifest(yaml.safe_load((SMALLEST / "cpu.yaml").read_text()))

    for spec in (gpu, cpu):
        assert spec.storage.claim_name == claim["metadata"]["name"]
        assert spec.storage.mount_path == mount["mountPath"]
        assert spec.model.actor.path == container["command"][-1]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["securityContext"]["fsGroup"] == STORAGE_GROUP
    assert container["image"] == gpu.image
    assert cpu.image == gpu.image.replace("trainer-cuda", "trainer")


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_names_the_image_for_its_device(path: Path) -> None:
    spec = spec_of(path)

    image = RECIPES["trainer-cuda" if spec.device is Device.CUDA else "trainer"]
    assert spec.image.rpartition(":")[0] == image.repository


def test_each_way_takes_five_commands() -> None:
    text = PAGE[PAGE.index("## In five commands") : PAGE.index("Then watch the job")]

    assert [len(block.splitlines()) for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)] == [5, 5, 5]


def test_every_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), re.MULTILINE))
    calls = re.findall(r"\bmake ((?:[a-z]+-?)+(?: image-[a-z-]+)*)", SHELL + "\n".join(CODE))

    named = {target for call in calls for target in call.split()}
    assert {"image-operator", "image-trainer-cuda", "image-check", "push", "cluster-up"} <= named
    assert named <= targets


def test_every_file_is_there() -> None:
    linked = {str(Path("docs") / link.partition("#")[0]) for link in re.findall(r"\]\(([^)]+)\)", PAGE)}
    spoken = set(re.findall(r"(?<![\w/.])(?:charts|crds|docs|examples|requirements)/[\w./-]*\w", PAGE))

    assert spoken
    assert [path for path in linked | spoken if not Path(path).exists()] == []


def test_every_setting_of_the_chart_is_there() -> None:
    lines = [line for line in SHELL.splitlines() if " charts/ppojob " in line]
    settings = {name for line in lines for name in re.findall(r"--set (\S+?)=", line)}

    assert settings
    assert [name for name in settings if not is_value(name)] == []


def test_every_dotted_name_is_a_value_or_a_field() -> None:
    dotted = {word for word in CODE if re.fullmatch(r"[a-z]\w*(?:\[\])?(?:\.[a-z]\w*)+", word) and "/" not in word}
    dotted -= {word for word in dotted if word.endswith((".yaml", ".txt", ".md", ".com"))}

    assert {"webhook.enabled", "model.actor.path", "spec.imagePullSecrets"} <= dotted
    assert [word for word in dotted if not (is_value(word) or is_field(word))] == []


def test_every_flag_of_helm_is_one() -> None:
    helm = shutil.which("helm") or shutil.which(Layout.from_environment().bin / "helm")
    if helm is None:
        pytest.fail("there is no helm: `make tools` builds it")
    commands = re.findall(r"^helm (\w+) (.*)$", SHELL, re.MULTILINE)

    assert {"install", "upgrade", "rollback", "uninstall", "test"} == {name for name, _ in commands}
    for name, rest in commands:
        help_text = subprocess.run([helm, name, "--help"], capture_output=True, text=True, check=True).stdout
        for flag in re.findall(r"--[a-z-]+", rest.split(" && ")[0]):
            assert re.search(rf"{flag}(?![\w-])", help_text), (name, flag)


@pytest.mark.parametrize("reason", ["KubeRayMissing", "OperatorTooOld", "ModelNotFound"])
def test_a_reason_is_one_of_the_product(reason: str) -> None:
    assert f"`{reason}`" in PAGE
    assert reason in {value for value in vars(Reason).values() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("torch, for CUDA 13.0", "torch"),
        ("vLLM", "vllm"),
        ("Ray", "ray"),
        ("transformers", "transformers"),
        ("triton", "triton"),
        ("NCCL", "nvidia-nccl-cu13"),
    ],
)
def test_a_version_is_the_one_that_is_pinned(name: str, package: str) -> None:
    assert f"| {name} | {pin(package)} |" in PAGE


@pytest.mark.parametrize(
    ("row", "version"),
    [
        ("Kubernetes", module_version("kubernetes", "k8s.io/kubernetes")),
        ("KubeRay", module_version("kuberay", "github.com/ray-project/kuberay/ray-operator")),
        ("Helm", module_version("helm", "helm.sh/helm/v3")),
    ],
)
def test_what_was_run_is_what_the_one_node_cluster_has(row: str, version: str) -> None:
    [cells] = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| {row} |") and line.count("|") == 5]

    assert cells[3].strip() == version


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_the_version_of_go_is_enough_for_every_module(page: str) -> None:
    modules = [path.read_text() for path in Path("tools/cluster/go").glob("*/go.mod")]
    wanted = [re.search(r"^go (\d+)\.(\d+)", module, re.MULTILINE) for module in modules]
    newest = max((int(match[1]), int(match[2])) for match in wanted if match)

    assert re.findall(r"\bGo (\S+)\s+or\s+newer", Path(page).read_text()) == [".".join(map(str, newest))]


def test_every_image_has_the_tag_that_is_built() -> None:
    texts = [PAGE, *(path.read_text() for path in SMALLEST.glob("*.yaml"))]

    assert {found for text in texts for found in re.findall(r"\bppojob-[a-z-]+:([\w.-]+)", text)} == {tag({})}


def test_kuberay_is_installed_in_the_version_that_was_run() -> None:
    version = module_version("kuberay", "github.com/ray-project/kuberay/ray-operator")

    assert set(re.findall(r"kuberay-helm --version (\S+)", PAGE)) == {version}


def test_every_variable_of_the_image_commands_is_read() -> None:
    source = "".join(path.read_text() for path in Path("tools/images").glob("*.py"))
    table = PAGE[PAGE.index("| variable | meaning |") : PAGE.index("If a proxy")]
    named = set(re.findall(r"`([A-Z_]{3,})`", table))

    assert {"ENGINE", "REGISTRY", "BASE"} <= named
    assert [name for name in named if f'"{name}"' not in source] == []
