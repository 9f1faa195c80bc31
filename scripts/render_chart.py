"""Write the derived parts of the chart: the table of values in its README, and setting names in its schema.

    scripts/render_chart.py               # both
    scripts/render_chart.py --check       # fail if they are stale
    scripts/render_chart.py --manifests   # render the profiles for users of kustomize into deploy/kubernetes

Rendering needs helm, either on PATH or next to this Python (scripts/get_helm.py). The rendered files are not committed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tq_service.config import ServeSettings

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/tq-service"
RENDERED = ROOT / "deploy/kubernetes"
NAMESPACE = "tq"
# Directory -> arguments of helm. The pod of `helm test` and monitoring, which needs CRDs, are in the chart only.
RENDERINGS = {
    "single": ["--set", "insecure=true"],
    "storage": ["--values", "values-storage.yaml", "--set", "insecure=true"],
    "ha": ["--values", "values-ha.yaml", "--set", "insecure=true"],
    "storage-secured": ["--values", "values-storage.yaml", "--values", "values-secured.yaml"],
}


README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
BEGIN, END = "<!-- values: begin, by scripts/render_chart.py -->\n", "<!-- values: end -->"
VALUE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?P<value> [^#]*?| *\"[^\"]*\"[^#]*?)?(?: +# (?P<meaning>.*))?")


def values_table() -> str:
    """Return the values of the chart as a Markdown table, one row per value, with the comments of values.yaml."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    path: list[str] = []
    above: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.lstrip().removeprefix("# "))
        elif not line:
            above = []
        elif (found := VALUE.fullmatch(line)) is not None:
            path = [*path[: len(found["indent"]) // 2], found["name"]]
            default = (found["value"] or "").strip()
            meaning = " ".join([*above, found["meaning"] or ""]).strip()
            if meaning:
                shown = f"`{default}`" if default else ""
                lines.append(f"| `{'.'.join(path)}` | {shown} | {meaning} |")
            above = []
    return "\n".join([*lines, ""])


def readme() -> str:
    """Return the chart's README with a current table."""
    before, _, rest = README.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{values_table()}{END}{rest.partition(END)[2]}"


def schema() -> str:
    """Return the schema of values with the names of all settings, so that helm rejects misspelled names."""
    parsed = json.loads(SCHEMA.read_text())
    parsed["$defs"]["settings"]["propertyNames"] = {"enum": sorted(ServeSettings.model_fields)}
    return json.dumps(parsed, indent=2) + "\n"


def find_helm() -> str | None:
    """Return the path of helm, or None if it is not installed."""
    return shutil.which(str(Path(sys.executable).parent / "helm")) or shutil.which("helm")


def render(helm: str, arguments: list[str]) -> str:
    """Return the manifests that helm renders from the chart.

    Raises:
        subprocess.CalledProcessError: helm failed; stderr has its message.
    """
    command = [helm, "template", "tq-service", ".", "--namespace", NAMESPACE, "--skip-tests"]
    made = subprocess.run([*command, *arguments], cwd=CHART, check=True, stdout=subprocess.PIPE, text=True)
    head = f"# Made from deploy/helm/tq-service by `make manifests`: helm template {' '.join(arguments)}\n"
    return head + made.stdout.replace("managed-by: Helm", "managed-by: kustomize")


def main(arguments: list[str]) -> int:
    """Update, compare or render; return the exit code."""
    if "--manifests" in arguments:
        helm = find_helm()
        if helm is None:
            print("helm is not installed; install it or run scripts/get_helm.py", file=sys.stderr)
            return 1
        for name, values in RENDERINGS.items():
            (RENDERED / name / "tq-service.yaml").write_text(render(helm, values))
        return 0
    wanted = {README: readme(), SCHEMA: schema()}
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(wanted[path])
    elif stale:
        print(f"stale: {', '.join(path.name for path in stale)}: run 'make generate'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
