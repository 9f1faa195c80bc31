"""Everything a partition answers from, as plain values that can be compared."""

import numpy as np


def digest(partition):
    positions = partition.table.present_positions()
    rows = partition.table.index.data[positions].tolist()
    return {
        "incarnation": partition.incarnation,
        "settings": partition.settings,
        "sealed": partition.sealed,
        "inserted": partition.inserted_count,
        "insert_size_gcd": partition.insert_size_gcd,
        "state_counts": list(partition.state_counts),
        "rows": rows,
        "states": partition.state.data[positions].tolist(),
        "keys": partition.key.data[positions].tolist(),
        "key_index": dict(partition.key_index),
        "meta": [
            (column.name, column.values[column.present].tolist(), column.present.tolist())
            for column in partition.meta.read_all(positions)
        ],
        "groups": _groups(partition, positions),
        "fields": {name: _field(partition, name, positions) for name in partition.cells.fields},
        "tasks": {name: _task(task, positions) for name, task in partition.tasks.items()},
    }


def _groups(partition, positions):
    groups = partition.groups
    facts = {}
    for name, slot in groups._slots.items():
        counters = (groups.declared, groups.members, groups.failed, groups.cleared, groups.held, groups.closed)
        facts[name] = [int(counter[slot]) for counter in counters]
    return groups.names_of(positions), facts


def _field(partition, name, positions):
    field = partition.cells.fields[name]
    produced = positions[field.cell.data[positions] >= 0]
    runs = partition.cells.locate([name], produced)
    cells = [
        (run.puts[index], first + offset)
        for run in runs
        for index, first, count in zip(run.put_indexes, run.first_rows, run.row_counts, strict=True)
        for offset in range(count)
    ]
    lengths = None if field.length is None else field.length.data[positions].tolist()
    return (
        field.spec,
        field.produced_count,
        produced.tolist() and partition.table.index.data[produced].tolist(),
        cells,
        lengths,
    )


def _task(task, positions):
    return {
        "epoch": task.epoch,
        "dp_size": task.dp_size,
        "next": task.next_batch_index,
        "end": task.end,
        "consumed": task.consumed_count,
        "open": task.backlog,
        "taken": task.claim.data[positions].tolist(),
        "batches": {
            index: (batch.batch_spec, [_part(part) for part in batch.plan.ranks], batch.size, batch.remaining)
            for index, batch in task.batches.items()
        },
        "claims": {name: (_part(claim.part), claim.remaining) for name, claim in task.claims.items()},
        "leases": [
            (lease.request_id, lease.serial, lease.terms, lease.left_count, lease.delivery_counts.tolist())
            for lease in task.leases.values()
        ],
        "deliveries": _deliveries(task, positions),
        "leased": (task.leased_count, task.dead_lettered_count),
        "released": sorted(task.released.log),
        "expired": sorted(task.expired.log),
    }


def _deliveries(task, positions):
    column = task._deliveries
    return [0] * positions.size if column is None else column.data[positions].tolist()


def _part(part):
    steps = [
        [
            (
                np.asarray(pack.positions).tolist(),
                None if pack.lengths is None else np.asarray(pack.lengths).tolist(),
                pack.padding_tokens,
            )
            for pack in packs
        ]
        for packs in part.steps
    ]
    return part.rows.tolist(), steps
