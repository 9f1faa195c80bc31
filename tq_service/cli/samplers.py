"""`tq-service samplers`: the samplers that a running service knows."""

from __future__ import annotations

from typing import Any

from tq_service.cli.addresses import Address, Timeout, open_client
from tq_service.cli.options import with_client_options
from tq_service.cli.output import AsJson, print_json, print_table

EXAMPLES = """\
  tq-service samplers
  tq-service samplers controller:50051 --json"""


@with_client_options
def command(
    address: Address = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
    **credentials: Any,
) -> None:
    """List the samplers that get_meta may name, with their options."""
    with open_client(address, timeout, **credentials) as client:
        samplers = client.list_samplers(timeout=timeout)
    if as_json:
        print_json(samplers)
        return
    rows = [(sampler.name, sampler.summary, ", ".join(sampler.options)) for sampler in samplers]
    print_table("sampler, what it does, options", rows)
