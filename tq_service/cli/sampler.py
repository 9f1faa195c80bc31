"""`tq-service sampler`: the samplers that a running service knows."""

from __future__ import annotations

from typing import Any

from tq_service.cli.addresses import open_client
from tq_service.cli.options import make_group, verb
from tq_service.cli.output import AsJson, print_json, print_table

EXAMPLES = """\
  tq-service sampler ls
  tq-service sampler ls --address controller:50051 --json"""

group = make_group("List the samplers of a service, with their options.", EXAMPLES)


@group.callback()
def _group() -> None:
    """Have verbs, also where there is one only."""


@verb(group, "ls")
def ls(as_json: AsJson = False, **service: Any) -> None:
    """List the samplers that get_meta may name, with their options."""
    with open_client(**service) as client:
        samplers = client.list_samplers()
    if as_json:
        print_json(samplers)
        return
    rows: list[tuple[str, ...]] = []
    for sampler in samplers:
        rows.append((sampler.name, "", "", "", sampler.summary))
        for option in sampler.options:
            default = "required" if option.default_json is None else option.default_json
            rows.append(("", option.name, option.type, default, option.summary))
    print_table("sampler, option, takes, default, meaning", rows)
