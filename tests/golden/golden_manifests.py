"""What the operator makes of every example, as files that a reviewer reads.

`python -m tests.golden.golden_manifests --update` writes them anew; without `--update` it says which differ.
"""

import argparse
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ppojob_operator.plan import Claim, FetchJob, JobKey, Observed, Plan, Pod, Ray, Surroundings
from ppojob_operator.reading import read_cluster, read_job
from ppojob_operator.reconcile import decide
from tests.examples import EXAMPLES, name_of, template_of

GOLDEN = Path("tests/golden")
UID = "00000000-0000-4000-8000-000000000000"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def render(example: Path) -> dict[str, str]:
    """Return the name of each golden file of an example, and its text."""
    raw, template = yaml.safe_load(example.read_text()), template_of(example)
    key = JobKey(raw["metadata"].setdefault("namespace", "default"), raw["metadata"]["name"])
    raw["metadata"] |= {"uid": UID, "generation": 1}
    observed = Observed(
        surroundings=Surroundings(
            report_url=f"https://ppojob-operator.ppojob-system.svc:443/v1alpha1/namespaces/{key.namespace}/ppojobs/{key.name}/progress",
            ca_bundle="-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
            dashboard_key=b"0" * 32,
        ),
        claim=Claim("any", "Bound"),
    )
    first = decide(read_job(raw, template), observed, NOW)
    fetched = {manifest["kind"]: manifest for manifest in first.apply}
    if "Job" in fetched:
        # Before the RayCluster come the models and data.
        observed = replace(observed, config=fetched["ConfigMap"]["data"], fetch_job=FetchJob(is_complete=True))
        raw = {**raw, "status": first.status}
        first = decide(read_job(raw), observed, NOW)
    made = {**fetched, **{manifest["kind"]: manifest for manifest in first.apply}}
    files = {f"{_file_name(kind)}.yaml": _dump(manifest) for kind, manifest in made.items()}
    return {**files, "submission.yaml": _dump(_submission(raw, observed, first))}


def _submission(raw: dict[str, Any], observed: Observed, first: Plan) -> dict[str, Any]:
    """Return what is sent to Ray once all pods are ready."""
    config, cluster = first.apply[2], first.apply[3]
    name = cluster["metadata"]["name"]
    groups = [(group["groupName"], group["replicas"]) for group in cluster["spec"]["workerGroupSpecs"]]
    pods = [Pod(f"{name}-head", name, None, is_ready=True)]
    pods += [Pod(f"{name}-{pool}-{i}", name, pool, is_ready=True) for pool, count in groups for i in range(count)]
    ready = Observed(
        surroundings=observed.surroundings,
        clusters=(read_cluster({**cluster, "status": {"head": {"serviceName": f"{name}-head-svc"}}}),),
        pods=tuple(pods),
        config=config["data"],
        ray=Ray(),
    )
    plan = decide(read_job({**raw, "status": first.status}), ready, NOW)
    assert plan.submission is not None, plan
    sent = plan.submission
    return {
        "submission_id": sent.submission_id,
        "entrypoint": sent.entrypoint,
        "environment": dict(sent.environment),
        "metadata": dict(sent.metadata),
    }


def golden_files(example: Path) -> dict[str, str]:
    """Return the golden files of an example as they are."""
    folder = GOLDEN / name_of(example)
    return {path.name: path.read_text() for path in sorted(folder.glob("*.yaml"))}


def _file_name(kind: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in kind).strip("-")


class _Dumper(yaml.SafeDumper):
    """Writes each value out, and texts of many lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(manifest: Any) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120)


def main() -> None:
    """Compare or, with --update, write the golden files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the files anew")
    is_update, differing = parser.parse_args().update, []
    for example in EXAMPLES:
        wanted = render(example)
        if wanted == golden_files(example):
            continue
        differing.append(name_of(example))
        if is_update:
            folder = GOLDEN / name_of(example)
            folder.mkdir(exist_ok=True)
            for path in folder.glob("*.yaml"):
                path.unlink()
            for name, text in wanted.items():
                (folder / name).write_text(text)
    if differing and not is_update:
        sys.exit(f"differ: {', '.join(differing)}; see `git diff` after --update")


if __name__ == "__main__":
    main()
