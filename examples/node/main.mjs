// Puts samples, claims them under a lease, reads them and acknowledges them. Run: `npm install && npm start`.
import assert from "node:assert/strict";
import { fileURLToPath } from "node:url";
import { Client, dense, indexesOf, jagged, text } from "./tq.mjs";

const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const client = new Client(process.env.TQ_ADDRESS ?? "localhost:50051", { protos, token: process.env.TQ_TOKEN });
const partition = process.env.TQ_PARTITION ?? "node";

const tokens = [[1, 2], [3], [4, 5, 6], []].map((row) => Int32Array.from(row));
const rewards = [[0.5], [1], [-1], [0]].map((row) => Float32Array.from(row));
const prompts = ["hi", "grüß dich", "a longer prompt of more than thirty-two bytes", ""];
const keys = prompts.map((_, row) => `größe-${row}`);
const put = await client.put(partition, [jagged("tokens", "int32", tokens), text("prompt", prompts)], { keys });
const large = Array.from({ length: 4 }, (_, row) => new Float32Array(300_000).fill(row));
const global_indexes = indexesOf(put);
await client.put(partition, [dense("reward", "float32", rewards), dense("hidden", "float32", large)], {
  incarnation: put.incarnation,
  global_indexes,
});
await client.seal(partition);

let count = 0;
for (let meta; (meta = await client.claim(partition, "reader", ["tokens", "prompt", "reward", "hidden"], 3, { leaseSeconds: 60 })); ) {
  const data = await client.get(meta);
  const indexes = indexesOf(meta);
  indexes.forEach((index, i) => {
    assert.equal(meta.keys[i], keys[index]);
    assert.deepEqual(data.tokens[i], tokens[index]);
    assert.deepEqual(data.reward[i], rewards[index]);
    assert.deepEqual(data.hidden[i], large[index]);
    assert.equal(data.prompt[i], prompts[index]);
  });
  count += await client.ack(meta, "reader");
  console.log(`read and acknowledged samples ${indexes.join(", ")}`);
}
console.log(`acknowledged ${count} of ${global_indexes.length}`);
client.close();
