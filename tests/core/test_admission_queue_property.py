"""Random puts, claims, clears, retries and cancellations at a bounded partition, against a plain model of it."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from domain_support import BOOT, claim_rows, clear, new_id, reset, task_of, turns, write_to
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples

from tq_service.errors import CallCancelledError, ResourceExhaustedError
from tq_service.machine.samples import SampleWrite
from tq_service.schema import Admission, FieldSpec, Layout, SampleState
from tq_service.serving.admission import AdmissionQueue
from tq_service.state.cells import ColumnWrite, Put
from tq_service.state.partition import Partition, PartitionSettings

MAX_BYTES, MAX_SAMPLES = 100, 12
SETTINGS = PartitionSettings(
    max_bytes=MAX_BYTES,
    admissions=(Admission("t", MAX_SAMPLES),),
)
SPEC = FieldSpec("x", dtype="uint8", layout=Layout.DENSE, row_shape=(1,))


@dataclass(eq=False)
class ModelPut:
    """A put, wherever it stands: waiting, let in, written or gone."""

    write: SampleWrite
    request_id: bytes
    size: int
    call: asyncio.Task = None
    rows_left: dict = field(default_factory=dict)  # global index -> whether the task has it left to consume


class Driver:
    def __init__(self):
        self.partition = Partition("p", SETTINGS)
        self.line = AdmissionQueue(self.partition)
        self.waiting, self.let_in, self.written = [], [], []

    async def put(self, count, size):
        column = ColumnWrite(spec=SPEC, value_bytes=size)
        write = SampleWrite(
            row_count=count,
            put=Put("s", BOOT, new_id()),
            columns=[column],
        )
        put = ModelPut(write=write, request_id=new_id(), size=size)
        put.call = asyncio.create_task(self.line.enter(put.request_id, write, size, None))
        self.waiting.append(put)
        await turns()
        if size > MAX_BYTES or count > MAX_SAMPLES:
            self.waiting.remove(put)
            error = put.call.exception()
            assert isinstance(error, ResourceExhaustedError)
            assert error.retry_after_seconds is None

    async def cancel(self, which):
        if self.waiting:
            put = self.waiting.pop(which % len(self.waiting))
            put.call.cancel()

    async def retry(self, which):
        if not self.waiting:
            return
        put = self.waiting[which % len(self.waiting)]
        earlier, put.call = put.call, asyncio.create_task(self.line.enter(put.request_id, put.write, put.size, None))
        await turns()
        assert isinstance(earlier.exception(), CallCancelledError)

    async def finish(self, which):
        if not self.let_in:
            return
        put = self.let_in.pop(which % len(self.let_in))
        with put.call.result():
            written = write_to(self.partition, put.write)
        put.rows_left = dict.fromkeys(list(written.global_indexes), True)
        self.written.append(put)

    async def give_up(self, which):
        if self.let_in:
            with self.let_in.pop(which % len(self.let_in)).call.result():
                pass

    def _rows(self, count):
        return [row for put in self.written for row, left in put.rows_left.items() if left][:count]

    async def consume(self, count):
        rows = np.array(self._rows(count + 1), np.int64)
        if rows.size:
            claim_rows(self.partition, task_of(self.partition, "t"), rows)
            self._leave(rows)

    async def fail(self, count):
        rows = np.array(self._rows(count + 1), np.int64)
        if rows.size:
            write = SampleWrite(row_count=rows.size, global_indexes=rows, state=SampleState.FAILED)
            write_to(self.partition, write)
            self._leave(rows)
            self._free(rows)

    async def clear(self, which):
        if self.written:  # whole, since bytes of parts are shares
            put = self.written.pop(which % len(self.written))
            clear(self.partition, np.array(list(put.rows_left), np.int64))

    async def reset(self, _):
        if "t" in self.partition.tasks:
            reset(self.partition, self.partition.tasks["t"], keep_consumed=False)
            for put in self.written:
                for row in put.rows_left:
                    put.rows_left[row] = self.partition.state.data[self.partition.table.find(np.array([row]))[0]] != 3

    def _leave(self, rows):
        for put in self.written:
            put.rows_left.update((row, False) for row in rows.tolist() if row in put.rows_left)

    def _free(self, rows):
        for put in self.written:
            if any(row in put.rows_left for row in rows.tolist()):
                put.size = None  # in part or whole: from here on the partition's own count is taken

    # What must hold

    def is_short(self, put):
        """Say whether the model has no capacity for a put."""
        used = self.partition.cells.used_bytes + sum(each.size for each in self.let_in) + put.size
        left = sum(sum(each.rows_left.values()) for each in self.written)
        left += sum(each.write.row_count for each in self.let_in) + put.write.row_count
        return used > MAX_BYTES or left > MAX_SAMPLES

    def check(self):
        for put in [
            each for each in self.waiting if each.call.done()
        ]:  # in order of arrival, but for those that are short
            assert not self.is_short(put)
            self.waiting.remove(put)
            self.let_in.append(put)
        assert all(map(self.is_short, self.waiting))  # else a wake-up was lost
        assert self.line.waiting_count == len(self.waiting)
        if all(put.size is not None for put in self.written):
            assert self.partition.cells.used_bytes == sum(put.size for put in self.written)


ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 14), st.integers(0, 110)),
    st.tuples(st.sampled_from(["put"]), st.integers(1, 4), st.integers(0, 30)),
    st.tuples(st.sampled_from(["cancel", "retry", "finish", "finish", "give_up", "consume", "consume", "fail", "clear",
                               "reset"]), st.integers(0, 9)),
)  # fmt: skip


@examples(100)
@given(st.lists(ACTIONS, max_size=40))
def test_the_line_lets_in_what_fits_in_order_and_nothing_else(actions):
    async def run():
        driver = Driver()
        for name, *arguments in actions:
            await getattr(driver, name)(*arguments)
            await turns()
            driver.check()
        for put in (*driver.waiting, *driver.let_in):
            put.call.cancel()
        await turns()

    asyncio.run(run())
