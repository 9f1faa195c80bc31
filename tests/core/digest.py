"""Everything a partition answers from, as plain values that can be compared.

It goes over what is declared: columns of tables by name, the fields of facts and of records of claims. So one that was
added is compared too, without a line here. Slots are compared by what occupies them, since their numbers may differ.
"""

import dataclasses

import numpy as np

from tq_service.journal import codec
from tq_service.state.cells import slots_and_rows

OF_ONE_RUN = {"answer_count", "deadline", "delivered_at"}  # what a start does not bring back, and need not


def digest(partition, *, with_gaps=False):
    """Return all that the partition knows of its samples; with gaps also what stands where samples were cleared."""
    table = partition.table
    positions = np.arange(table.count) if with_gaps else table.present_positions()
    slots = [table for table in partition.tables.values() if table is not partition.table]
    extents = partition.cells.extents  # are compared as parts of their cells
    return {
        "facts": facts_of(partition.facts),
        "tables": sorted(partition.tables),
        "rows": {name: _row_values(partition, name, column.data[positions]) for name, column in table.columns.items()},
        "slots": [_slot_values(each, partition) for each in slots if each is not extents],
        "tasks": {name: _task(task) for name, task in partition.tasks.items()},
        "rebuilt": {
            "present_count": table.present_count,
            "state_counts": list(partition.state_counts),
            "key_index": keys_of(partition),
            "groups": sorted(partition.groups.slot_of),
            "rollouts": sorted(partition.groups.rollout_slot_of),
            "produced": {name: field.produced_count for name, field in partition.cells.fields.items()},
            "used_bytes": partition.cells.used_bytes,
            "free slots are all there are": [
                sorted(each._free) == np.flatnonzero(each.occupants[: each.count] == None).tolist()  # noqa: E711
                for each in slots
            ],
        },
    }


def keys_of(partition):
    """Return the global index of each key."""
    keys = list(partition.key_index)
    assert len(keys) == len(partition.key_index)
    return dict(zip(keys, partition.table.index.data[partition.key_index.positions_of(keys)].tolist(), strict=True))


def facts_of(value):
    """Return a dataclass as plain values."""
    return {
        each.name: list(known.items()) if isinstance(known := getattr(value, each.name), dict) else known
        for each in dataclasses.fields(value)
    }


def _row_values(partition, name, values):
    if name in {"group", "rollout"}:
        return _names_of_slots(partition.groups, values - (name == "rollout"))
    if name.startswith("cell/"):
        return [_cell(partition, value) for value in values]
    return values.tolist()


def _cell(partition, value):
    """Return the rows of puts that a cell consists of, each with how much of it belongs to the cell."""
    extents = partition.cells.extents.chains.resolve(np.array([value]))
    slots, rows = slots_and_rows(extents.cells)
    puts = partition.cells.puts.occupants[slots]
    lengths = partition.cells.extents.lengths(extents)
    return None if value < 0 else list(zip(puts, rows.tolist(), lengths.tolist(), strict=True))


def _names_of_slots(groups, slots):
    """Return the name of each slot, and whether it is of a rollout: a group may have the same name."""
    return [(groups.slots.occupants[slot], bool(groups.parent[slot] >= 0)) if slot >= 0 else None for slot in slots]


def _slot_values(table, partition):
    groups = partition.groups
    columns = {name: column[: table.count].tolist() for name, column in table.columns.items()}
    for name in [name for name in columns if name.startswith("cell/")]:
        columns[name] = [_cell(partition, value) for value in columns[name]]
    if table is groups.slots:
        columns["parent"] = _names_of_slots(groups, columns["parent"])
    return {
        (occupant, columns["parent"][slot] is not None) if table is groups.slots else occupant: {
            name: values[slot] for name, values in columns.items()
        }
        for slot, occupant in enumerate(table.occupants[: table.count].tolist())
        if occupant is not None
    }


def _task(task):
    return {
        "facts": facts_of(task.facts),
        "batches": [record_of(batch) for batch in task.batches.values()],
        "claims": [record_of(claim) for claim in task.claims.values()],
        "by": {name: [record.serial for record in known.values()] for name, known in _found_by(task)},
        "leased": task.leased_count,
        "ended": list(task.ended.items()),
        "reusing": list(task._reusing),
        "names": [list(task.names.items()), list(task.past_names.items())],
    }


def _found_by(task):
    by_index = {index: batch for index, batch in task.batches.items() if index == batch.batch_index}
    by_id = {request_id: claim for request_id, claim in task.claims.items() if request_id == claim.request_id}
    by_serial = {serial: record for serial, record in sorted(task._by_serial.items()) if serial == record.serial}
    without_rows = {index: task.batches[index] for index in task._without_rows}
    going = {index: batch for index, batch in by_index.items() if not batch.plan.is_reusing}
    assert list(without_rows) == [index for index, batch in going.items() if not batch.remaining]
    assert len(by_serial) == len(going) + sum(claim.goes_with_rows for claim in by_id.values())
    return {"index": by_index, "request_id": by_id, "serial": by_serial}.items()


def record_of(record):
    """Return a record of a claim as plain values."""
    names = {each.name for each in dataclasses.fields(record)} - OF_ONE_RUN
    return {name: _plain(getattr(record, name)) for name in sorted(names)}


def _plain(value):
    return codec.encode(value) if dataclasses.is_dataclass(value) or isinstance(value, np.ndarray) else value
