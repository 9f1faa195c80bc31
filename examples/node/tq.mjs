// A client of tq_service: puts, claims, gets and acknowledges, as docs/protocol.md says. Plain tensors, text, bytes; msgpack is read.
import { randomBytes } from "node:crypto";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const INLINE_BYTES = 256 * 1024;
const FRAME_BYTES = 2 * 1024 * 1024;
const ARRAYS = {
  bool: Uint8Array, uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array,
  int32: Int32Array, float32: Float32Array, uint64: BigUint64Array, int64: BigInt64Array, float64: Float64Array,
};
const ENCODINGS = ["ENCODING_UNSPECIFIED", "ENCODING_TEXT", "ENCODING_MSGPACK", "ENCODING_BYTES"];
const OPTIONS = {
  "grpc.max_receive_message_length": 256 << 20,
  "grpc.max_send_message_length": 256 << 20,
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 500,
};

/** What a column is: rows of numbers of one length ("dense"), of any length ("jagged"), text, or bytes. */
export function dense(name, dtype, rows) {
  const spec = { name, dtype, layout: "LAYOUT_DENSE", row_shape: [rows[0].length], row_shape_known: true };
  return column(spec, rows.map((row) => bytesOf(dtype, row)), []);
}

export function jagged(name, dtype, rows) {
  const spec = { name, dtype, layout: "LAYOUT_JAGGED", row_shape: [-1], row_shape_known: true };
  return column(spec, rows.map((row) => bytesOf(dtype, row)), rows.map((row) => row.length));
}

export const text = (name, rows) => object(name, "ENCODING_TEXT", rows.map((row) => Buffer.from(row, "utf8")));
export const bytes = (name, rows) => object(name, "ENCODING_BYTES", rows.map((row) => Buffer.from(row)));

function object(name, encoding, values) {
  const spec = { name, dtype: "", layout: "LAYOUT_OBJECT", row_shape: [], row_shape_known: true, encoding };
  return column(spec, values, values.map((value) => value.length));
}

function column(spec, values, extents) {
  const bytes = Buffer.concat(values);
  const header = { spec, value_bytes: bytes.length, extents: Buffer.from(BigInt64Array.from(extents, BigInt).buffer) };
  return { header, bytes, rowCount: values.length };
}

function bytesOf(dtype, row) {
  const kind = ARRAYS[dtype];
  if (kind === undefined) throw new TypeError(`dtype ${dtype}: expected one of ${Object.keys(ARRAYS)}`);
  // Typed arrays have the order of bytes of the machine; all that Node.js runs on are little-endian.
  return Buffer.from((row instanceof kind ? row : kind.from(row)).slice().buffer);
}

/** The rows of a column: typed arrays, strings or buffers. */
function rowsOf({ spec, value_bytes, extents }, values, rowCount) {
  if (values.length !== value_bytes) throw new Error(`${spec.name}: ${values.length} bytes, expected ${value_bytes}`);
  const numbers = Array.from({ length: extents.length / 8 }, (_, i) => Number(extents.readBigInt64LE(8 * i)));
  const width = numbers.length / rowCount; // of the extents of a row
  const isObject = spec.layout === "LAYOUT_OBJECT";
  const kind = isObject ? Uint8Array : ARRAYS[spec.dtype];
  const fixed = spec.row_shape.map(Number).filter((size) => size >= 0).reduce((a, b) => a * b, kind.BYTES_PER_ELEMENT);
  let start = 0;
  return Array.from({ length: rowCount }, (_, i) => {
    const of = numbers.slice(i * width, (i + 1) * width);
    const size = isObject ? of[0] : of.reduce((a, b) => a * b, fixed);
    const row = values.subarray(start, (start += size));
    if (isObject) return objectOf(of[1] ?? ENCODINGS.indexOf(spec.encoding), row, spec.name);
    return new kind(Uint8Array.prototype.slice.call(row).buffer); // a copy starts at a multiple of the element's size
  });
}

function joined(arrays) {
  const whole = new arrays[0].constructor(arrays.reduce((size, each) => size + each.length, 0));
  let at = 0;
  for (const each of arrays) {
    whole.set(each, at);
    at += each.length;
  }
  return whole;
}

function objectOf(encoding, row, name) {
  if (ENCODINGS[encoding] === "ENCODING_TEXT") return row.toString("utf8");
  if (ENCODINGS[encoding] === "ENCODING_BYTES") return row;
  return decode(row, name);
}

/** msgpack as JSON has it: nil, booleans, numbers, text, bytes, lists, maps with keys of text. */
function decode(row, name) {
  let at = 0;
  const take = (size) => row.subarray(at, (at += size));
  const length = (size) => take(size).readUIntBE(0, size);
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));
  function value() {
    const tag = row[at++];
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 0x0f);
    if (tag < 0xa0) return list(tag & 0x0f);
    if (tag < 0xc0) return take(tag & 0x1f).toString("utf8");
    if (tag >= 0xe0) return tag - 0x100;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: case 0xc3: return tag === 0xc3;
      case 0xc4: case 0xc5: case 0xc6: return take(length(1 << (tag - 0xc4)));
      case 0xca: return take(4).readFloatBE();
      case 0xcb: return take(8).readDoubleBE();
      case 0xcc: case 0xcd: case 0xce: return length(1 << (tag - 0xcc));
      case 0xcf: return Number(take(8).readBigUInt64BE());
      case 0xd0: case 0xd1: case 0xd2: return take(1 << (tag - 0xd0)).readIntBE(0, 1 << (tag - 0xd0));
      case 0xd3: return Number(take(8).readBigInt64BE());
      case 0xd9: case 0xda: case 0xdb: return take(length(1 << (tag - 0xd9))).toString("utf8");
      case 0xdc: case 0xdd: return list(length(tag === 0xdc ? 2 : 4));
      case 0xde: case 0xdf: return map(length(tag === 0xde ? 2 : 4));
      default: throw new Error(`${name}: msgpack of tag 0x${tag?.toString(16)} is not read here`);
    }
  }
  return value();
}

/** The indexes of the samples of a BatchMeta. */
export function indexesOf({ global_indexes, index_ranges: ranges }) {
  if (ranges === null) return global_indexes;
  return ranges.first_indexes.flatMap((first, i) => Array.from({ length: ranges.index_counts[i] }, (_, row) => first + row));
}

/** An error of the service: `code` is that of gRPC. */
export class TqError extends Error {
  constructor(error) {
    super(`${grpc.status[error.code]}: ${error.details}`);
    this.code = error.code;
  }
}

export class Client {
  /**
   * @param address "host:port" of the controller.
   * @param protos the directory `protos` of tq_service.
   * @param timeout seconds until a call fails, retries included.
   */
  constructor(address, { protos, token, credentials = grpc.credentials.createInsecure(), timeout = 30 }) {
    const files = ["controller_service", "storage_service"].map((name) => `tq_service/v1/${name}.proto`);
    const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };
    const definition = loader.loadSync(files, { ...options, includeDirs: [protos] });
    this.services = grpc.loadPackageDefinition(definition).tq_service.v1;
    this.address = address;
    this.credentials = credentials;
    this.timeout = timeout;
    this.metadata = new grpc.Metadata();
    if (token !== undefined) this.metadata.set("authorization", `Bearer ${token}`);
    this.controller = new this.services.ControllerService(address, credentials, OPTIONS);
    this.storages = new Map();
  }

  close() {
    for (const stub of [this.controller, ...this.storages.values()]) stub.close();
  }

  /** Put columns as new samples, or as columns of those in `write.global_indexes`; returns the BatchMeta. */
  async put(partitionId, columns, write = {}) {
    const rowCount = columns[0].rowCount;
    const values = Buffer.concat(columns.map((each) => each.bytes));
    const put_id = randomBytes(16);
    const request_id = randomBytes(16);
    const samples = { ...write, partition_id: partitionId, row_count: rowCount };
    const headers = columns.map((each) => each.header);
    return this.#retried(async (deadline) => {
      const asked = { partition_id: partitionId, size_bytes: values.length };
      const place = await this.#call(this.controller, "PlacePut", asked, deadline);
      const header = {
        put_id, partition_id: partitionId, row_count: rowCount, columns: headers, size_bytes: values.length,
        for_existing_rows: (write.global_indexes ?? []).length > 0, controller_id: place.controller_id,
      };
      if (place.embedded) header.commit = { request_id, write: samples };
      const stub = this.#storage(place.storages[0]);
      const done = values.length <= INLINE_BYTES
        ? (await this.#call(stub, "PutInline", { header, values }, deadline)).put
        : await this.#stream(stub, header, values, deadline);
      if (place.embedded) return done.commit.meta;
      const placement = { storage: done.storage, put_id, receipt: done.receipt };
      const commit = { request_id, write: samples, placement, columns: headers };
      return (await this.#call(this.controller, "Commit", commit, deadline)).meta;
    });
  }

  /** Claim samples as a queue worker; returns the BatchMeta of a batch, null at the end. */
  async claim(partitionId, taskName, dataFields, batchSize, { leaseSeconds, minBatchSize = 1 } = {}) {
    const request = {
      request_id: randomBytes(16), partition_id: partitionId, task_name: taskName, data_fields: dataFields,
      batch_size: batchSize, min_batch_size: minBatchSize, max_wait: { seconds: 10 },
      lease: leaseSeconds === undefined ? null : { seconds: leaseSeconds },
    };
    for (;;) {
      const { meta } = await this.#retried((deadline) => this.#call(this.controller, "GetMeta", request, deadline));
      if (meta.status === "BATCH_STATUS_BATCH") return meta;
      if (meta.status === "BATCH_STATUS_END") return null;
    }
  }

  /** Acknowledge all samples of a leased claim; returns how many there were. */
  async ack(meta, taskName) {
    const request = {
      request_id: randomBytes(16), partition_id: meta.partition_id, incarnation: meta.incarnation,
      task_name: taskName, claim_request_id: meta.claim_request_id,
    };
    const answer = await this.#retried((deadline) => this.#call(this.controller, "AckClaim", request, deadline));
    return answer.acked_count;
  }

  async seal(partitionId) {
    const request = { request_id: randomBytes(16), partition_id: partitionId };
    await this.#retried((deadline) => this.#call(this.controller, "SealPartition", request, deadline));
  }

  /** Read the cells of a batch; returns for each field its rows in the order of the batch. */
  async get(meta) {
    for (let attempts = 3; ; attempts--) {
      try {
        return await this.#cells(meta.locations);
      } catch (error) {
        // Cells are elsewhere once they are overwritten, or were lost with a storage service and put again.
        if (attempts === 1 || ![grpc.status.NOT_FOUND, grpc.status.DATA_LOSS].includes(error.code)) throw error;
        meta = await this.#locate(meta);
      }
    }
  }

  async #locate(meta) {
    const data_fields = [...new Set(meta.locations.runs.flatMap((run) => run.field_names))];
    const { partition_id, incarnation } = meta;
    const request = { partition_id, incarnation, global_indexes: indexesOf(meta), data_fields };
    return (await this.#retried((deadline) => this.#call(this.controller, "Locate", request, deadline))).meta;
  }

  async #cells({ storages, puts, runs }) {
    const fields = new Map(runs.flatMap((each) => each.field_names).map((name) => [name, []]));
    const widths = new Map(); // elements of each row per length in its first dimension
    for (const [index, endpoint] of storages.entries()) {
      const here = puts.flatMap((put, at) => (put.storage_index === index ? [at] : []));
      for (const name of fields.keys()) {
        // One request a field: fields that were put apart may have different numbers of rows in one storage service.
        const request = { boot_id: endpoint.boot_id, put_ids: here.map((at) => puts[at].put_id), runs: [] };
        const run = { field_names: [name], put_indexes: [], first_rows: [], row_counts: [] };
        const positions = [];
        let position = 0;
        for (const each of runs.filter((some) => some.field_names.includes(name))) {
          each.put_indexes.forEach((put, i) => {
            if (puts[put].storage_index === index) {
              run.put_indexes.push(here.indexOf(put));
              run.first_rows.push(each.first_rows[i]);
              run.row_counts.push(each.row_counts[i]);
              for (let row = 0; row < each.row_counts[i]; row++) positions.push(position + row);
            }
            position += each.row_counts[i];
          });
        }
        if (positions.length === 0) continue;
        request.runs.push(run);
        const { header, values } = await this.#read(this.#storage(endpoint), request);
        const rows = rowsOf(header.columns[0], values, positions.length);
        widths.set(name, header.columns[0].spec.row_shape.slice(1).map(Number).reduce((a, b) => a * b, 1));
        positions.forEach((at, i) => (fields.get(name)[at] = rows[i]));
      }
    }
    for (const { field_names, extent_counts, extent_lengths } of runs.filter((each) => each.extent_counts.length)) {
      for (const name of field_names) {
        // Cells that have grown: each is several rows, of which what was truncated does not count.
        const parts = fields.get(name).map((row, i) => row.subarray(0, extent_lengths[i] * widths.get(name)));
        let at = 0;
        fields.set(name, extent_counts.map((count) => joined(parts.slice(at, (at += count)))));
      }
    }
    for (const { field_names, sample_counts } of runs.filter((each) => each.sample_counts.length)) {
      for (const name of field_names) { // shared by the samples of a group
        fields.set(name, fields.get(name).flatMap((row, i) => Array(sample_counts[i]).fill(row)));
      }
    }
    return Object.fromEntries(fields);
  }

  #storage({ address }) {
    const at = address || this.address;
    if (!this.storages.has(at)) {
      this.storages.set(at, new this.services.StorageService(at, this.credentials, OPTIONS));
    }
    return this.storages.get(at);
  }

  #read(stub, request) {
    return this.#retried(async (deadline) => {
      const answer = await this.#call(stub, "GetInline", { get: request }, deadline);
      if (answer.header !== null) return answer;
      let header;
      const frames = [];
      for await (const message of stub.Get(request, this.metadata, { deadline })) {
        if (message.part === "header") header = message.header;
        else frames.push(message.frame);
      }
      return { header, values: Buffer.concat(frames) };
    });
  }

  #stream(stub, header, values, deadline) {
    return new Promise((resolve, reject) => {
      const call = stub.Put(this.metadata, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
      call.on("metadata", async (metadata) => {
        if (metadata.get("tq-send-as")[0] !== "frames") return; // the answer comes instead: the put is there already
        for (let start = 0; start < values.length; start += FRAME_BYTES) {
          const frame = values.subarray(start, start + FRAME_BYTES);
          if (!call.write({ frame })) await new Promise((drained) => call.once("drain", drained));
        }
        call.end();
      });
      call.write({ header });
    });
  }

  #call(stub, name, request, deadline) {
    return new Promise((resolve, reject) => {
      stub[name](request, this.metadata, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
    });
  }

  /** Make calls again while the service cannot be reached, with the ids that they have. */
  async #retried(attempt) {
    const deadline = new Date(Date.now() + this.timeout * 1000);
    for (let pause = 50; ; pause = Math.min(2 * pause, 500)) {
      try {
        return await attempt(deadline);
      } catch (error) {
        if (error.code === undefined) throw error;
        const again = error.code === grpc.status.UNAVAILABLE || error.code === grpc.status.CANCELLED;
        if (!again || Date.now() + pause > deadline) throw new TqError(error);
        await new Promise((passed) => setTimeout(passed, pause));
      }
    }
  }
}
