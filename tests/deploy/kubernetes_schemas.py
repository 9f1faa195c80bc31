"""Checks manifests against the schemas of Kubernetes and of the Prometheus operator.

Importing this module takes 2 s of processor time (jsonschema compiles grammars), so only tests that validate import it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

_MONITORING = json.loads(Path(__file__).with_name("monitoring_schemas.json").read_text())
ValidationError = kubernetes_validate.ValidationError

kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)  # 1 MB each


def validate(manifest: Mapping[str, Any], version: str) -> None:
    """Raise if a manifest does not match its schema in a version of Kubernetes, such as "1.36"."""
    if manifest["apiVersion"] == "monitoring.coreos.com/v1":
        jsonschema.validate(manifest, {**_MONITORING[manifest["kind"]], "$defs": _MONITORING["$defs"]})
    else:
        kubernetes_validate.validate(manifest, version, strict=True)
