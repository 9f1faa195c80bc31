"""A map by serial, frozen at a moment while it goes on changing."""

import random

from tq_service.domain.claims.serial_map import SerialMap


def items(frozen):
    return {serial: value for block in frozen for serial, value in block.items()}


def test_any_order_of_changes_gives_what_a_dict_gives_and_what_is_frozen_stays():
    rng = random.Random(7)
    serials, plain, frozen, serial = SerialMap(), {}, [], 1
    for _ in range(20_000):
        action = rng.random()
        if action < 0.6:
            serial += rng.choice([1, 1, 1, 700])
            serials.add(serial, str(serial))
            plain[serial] = str(serial)
        elif action < 0.995:
            some = rng.choice([serial, rng.randint(0, serial + 2)])
            assert serials.pop(some) == plain.pop(some, None)
        elif action < 0.9995:
            frozen.append((serials.freeze(), dict(plain)))
        else:
            serials.clear()
            plain.clear()
        some = rng.randint(0, serial + 2)
        assert (serials.get(some), len(serials)) == (plain.get(some), len(plain))
    assert sorted(serials.values()) == sorted(plain.values())
    assert len(frozen) > 50
    assert all(items(blocks) == expected for blocks, expected in frozen)
