// The live page: receives frames from the stream "events", each with the complete state, and updates the screen.
// Names of partitions, tasks and fields are user data, so they are written as text, never as markup.
"use strict";

const LONG_WAIT_SECONDS = 10;
const LASTING_INTERVALS = 2.4; // a wait that lasts this many frames is listed under "Waiting"
const MOST_BARS = 96;
const CURVE_POINTS = 90; // three minutes, for totals
const ROW_POINTS = 30; // one minute, for partitions and tasks

// ---- Formatting of numbers ----

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

const count = (value) => whole.format(value);
const counted = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
const compact = (value) => (Math.abs(value) < 1e6 ? count(value) : short.format(value));

function scaled(value, step, units) {
  let power = 0;
  while (Math.abs(value) >= step * 0.9995 && power < units.length - 1) {
    value /= step;
    power += 1;
  }
  const digits = power === 0 || Math.abs(value) >= 100 ? 0 : 1;
  return [value.toFixed(digits), units[power]];
}

const bytes = (value) => scaled(value, 1000, ["bytes", "kB", "MB", "GB", "TB", "PB"]).join(" ");

function perSecond(value) {
  if (value === null) return "–";
  if (value < 0.05) return "0";
  return value < 10 ? value.toFixed(1) : compact(value);
}

function percent(share) {
  const value = share * 100;
  return `${value.toFixed(value < 10 ? 2 : 1)} %`;
}

function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

// ---- The screen ----

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function draw(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const show = (node, isShown) => {
  if (node.hidden === isShown) node.hidden = !isShown;
};

const shownOf = new WeakMap();

// Updates the children of a node to match the items, by key. Children that remain are neither recreated nor moved, which
// preserves focus, selection and scrolling. Items with the same key are told apart by their order.
function list(parent, items, keyOf, create, update) {
  if (!shownOf.has(parent)) shownOf.set(parent, new Map());
  const known = shownOf.get(parent);
  const times = new Map();
  const keys = items.map((item) => {
    const key = keyOf(item);
    const time = times.get(key) ?? 0;
    times.set(key, time + 1);
    return JSON.stringify([key, time]);
  });
  const wanted = new Set(keys);
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstElementChild;
  items.forEach((item, position) => {
    let node = known.get(keys[position]);
    if (!node) {
      node = create(item);
      known.set(keys[position], node);
    }
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
    update(node, item, position);
  });
}

// ---- Curves and bars ----

function makeSpark(width = CURVE_POINTS) {
  const svg = draw("svg", { class: "spark", viewBox: `0 0 ${width - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(draw("path", { class: "area" }), draw("path"));
  return svg;
}

// The newest point is on the right. A curve has a gap while the service was away; a curve of zeros is not drawn.
function updateSpark(svg, allPoints, width = CURVE_POINTS) {
  const points = allPoints.slice(-width);
  const most = Math.max(...points, 0);
  if (most === 0) points.fill(null);
  const first = width - points.length;
  let line = "";
  let area = "";
  let began = null;
  points.forEach((point, index) => {
    if (point === null) {
      if (began !== null) area += `L${first + index - 1} 20Z`;
      began = null;
      return;
    }
    const place = `${first + index} ${(19 - (18 * point) / most).toFixed(2)}`;
    line += `${began === null ? "M" : "L"}${place}`;
    area += began === null ? `M${first + index} 20L${place}` : `L${place}`;
    began ??= index;
  });
  if (began !== null) area += `L${width - 1} 20Z`;
  mark(svg.firstChild, "d", area);
  mark(svg.lastChild, "d", line);
}

function makeBar(kinds, className = "bar") {
  const bar = make("div", className, ...kinds.map((kind) => make("span", kind)));
  bar.setAttribute("aria-hidden", "true");
  return bar;
}

function updateBar(bar, amounts, total) {
  amounts.forEach((amount, index) => {
    const width = total > 0 ? `${((100 * amount) / total).toFixed(2)}%` : "0%";
    if (bar.children[index].style.width !== width) bar.children[index].style.width = width;
  });
}

const fill = (share) => (share >= 0.97 ? "full" : share >= 0.85 ? "much" : "used");

function makeTokens() {
  return draw("svg", { class: "chart", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img" });
}

// Draws one group of bars per batch and one bar per rank, for as many of the last batches as fit.
function updateTokens(svg, batches) {
  const known = batches.filter((batch) => batch.tokens_per_rank.length > 0);
  const ranks = known.length ? known[known.length - 1].tokens_per_rank.length : 1;
  const last = known.slice(-Math.max(1, Math.min(16, Math.floor(MOST_BARS / ranks))));
  const most = Math.max(1, ...last.flatMap((batch) => batch.tokens_per_rank));
  const slots = Math.max(last.length, Math.min(16, Math.floor(MOST_BARS / ranks)));
  const step = 100 / slots;
  const bars = last.flatMap((batch, group) =>
    batch.tokens_per_rank.map((tokens, rank) => {
      const width = (step * 0.82) / batch.tokens_per_rank.length;
      return {
        key: `${group}/${rank}`,
        x: (step * (group + slots - last.length) + step * 0.09 + width * rank).toFixed(3),
        y: (39 - (38 * tokens) / most).toFixed(2),
        width: (width * (batch.tokens_per_rank.length > 24 ? 1 : 0.86)).toFixed(3),
        height: ((38 * tokens) / most).toFixed(2),
        isOld: group < last.length - 1,
      };
    }),
  );
  if (!svg.firstChild) svg.append(draw("g"), draw("line", { x1: 0, x2: 100, y1: 39.5, y2: 39.5 }));
  list(
    svg.firstChild,
    bars,
    (bar) => bar.key,
    () => draw("rect"),
    (rect, bar) => {
      for (const name of ["x", "y", "width", "height"]) mark(rect, name, bar[name]);
      mark(rect, "class", bar.isOld ? "old" : "new");
    },
  );
  mark(svg, "aria-label", `Tokens of each rank in the last ${counted(last.length, "batch", "batches")}`);
}

// ---- Header and banner ----

const view = { frame: null, receivedAt: 0, isLost: false, lostAt: 0, opened: new Set(), filter: "", run: "", eventAt: new Map() };

const STATES = { serving: "serving", away: "unreachable", refused: "refused", connecting: "connecting", lost: "page server unreachable" };

function renderFacts(frame) {
  const service = frame.status?.service;
  const facts = [["service", frame.address]];
  if (frame.namespace) facts.push(["namespace", frame.namespace]);
  if (frame.prefix) facts.push(["prefix", frame.prefix]);
  if (service) {
    if (service.version) facts.push(["version", service.version]);
    facts.push(["up", span(service.uptime_seconds)]);
    if (service.instance_id) facts.push(["instance", service.instance_id.slice(0, 8)]);
    facts.push(["durability", service.durability]);
    facts.push(["TLS", service.tls ? (service.client_certificates ? "mutual" : "on") : "off"]);
    facts.push(["tokens", service.auth ? "required" : "off"]);
    facts.push(["shared memory", service.shared_memory ? "on" : "off"]);
  }
  list(
    byId("facts"),
    facts,
    ([name]) => name,
    ([name]) => make("div", "", make("dt", "", name), make("dd")),
    (node, [, value]) => write(node.lastChild, value),
  );
}

function renderBanner() {
  const { frame, isLost, lostAt, receivedAt } = view;
  const now = Date.now();
  let state = frame ? frame.state : "connecting";
  let title = "";
  let text = "";
  if (isLost) {
    state = "lost";
    title = "The page server does not respond";
    text = `since ${clock(lostAt)}. Is tq-service ui still running? The page reconnects automatically.`;
  } else if (frame && frame.away_seconds !== null) {
    const since = receivedAt - frame.away_seconds * 1000;
    const seen = frame.seen_seconds === null ? "It has not responded yet." : "The page shows its last known state.";
    title = frame.state === "refused" ? `The service at ${frame.address} rejects this page` : `The service at ${frame.address} is unreachable`;
    text = `since ${clock(since)}, for ${span(Math.max(0, (now - since) / 1000))}: ${frame.problem}. ${seen}`;
  }
  mark(document.body, "data-state", state);
  write(byId("state-text"), STATES[state] ?? state);
  write(byId("banner-title"), title);
  write(byId("banner-text"), text);
  show(byId("banner"), title !== "");
  document.getElementById("main").classList.toggle("stale", title !== "");
  const name = frame ? frame.address : "";
  const heading = state === "serving" ? `${name} · tq-service` : `${STATES[state] ?? state} · ${name} · tq-service`;
  if (document.title !== heading) document.title = heading;
  write(byId("updated"), frame ? `last update ${clock(receivedAt)}, one every ${frame.interval_seconds} s` : "waiting for the first update");
}

// ---- Totals ----

function tiles(status) {
  const totals = status.totals;
  const used = totals.max_bytes ? totals.used_bytes / totals.max_bytes : null;
  const [amount, unit] = scaled(totals.used_bytes, 1000, ["bytes", "kB", "MB", "GB", "TB", "PB"]);
  const longest = Math.max(0, ...status.waits.map((wait) => wait.seconds));
  const open = totals.open_count;
  return [
    { key: "inserted", title: "Inserted", value: perSecond(totals.inserted_per_second), unit: "samples/s", note: counted(totals.partition_count, "partition", "partitions") + `, ${count(open)} open`, curve: totals.curves.inserted },
    { key: "delivered", title: "Delivered", value: perSecond(totals.delivered_per_second), unit: "samples/s", note: "to all tasks", curve: totals.curves.delivered },
    { key: "present", title: "Samples", value: compact(totals.present_count), unit: "", note: `${count(totals.held_count)} held, ${count(totals.failed_count)} failed`, tone: "", curve: totals.curves.present },
    { key: "storage", title: "Storage", value: amount, unit: totals.max_bytes ? `${unit} of ${bytes(totals.max_bytes)}` : unit, note: used === null ? "no quota" : `${percent(used)} of the quota`, tone: used >= 0.97 ? "is-bad" : used >= 0.85 ? "is-warn" : "", curve: totals.curves.used },
    { key: "waiting", title: "Waiting", value: compact(totals.waiting_claim_count), unit: totals.waiting_claim_count === 1 ? "claim" : "claims", note: longest >= 1 ? `longest for ${span(longest)}` : "none for long", tone: longest >= LONG_WAIT_SECONDS ? "is-warn" : "", foot: counted(totals.waiting_put_count, "put waits", "puts wait") + " for capacity" },
    { key: "leased", title: "Leased", value: compact(totals.leased_count), unit: totals.leased_count === 1 ? "sample" : "samples", note: `${count(totals.redelivered_count)} redelivered`, foot: `${count(totals.dead_lettered_count)} dead-lettered`, footTone: totals.dead_lettered_count ? "is-bad" : "" },
  ];
}

function makeTile(tile) {
  const value = make("p", "value", make("span", "number"), make("span", "unit"));
  const foot = make("div", "foot");
  foot.append(tile.curve ? makeSpark() : make("span", "note"));
  return make("article", "tile", make("h2", "", tile.title), value, make("p", "note"), foot);
}

function updateTile(node, tile) {
  const [, value, note, foot] = node.children;
  write(value.children[0], tile.value);
  write(value.children[1], tile.unit);
  value.className = `value ${tile.tone ?? ""}`;
  write(note, tile.note);
  if (tile.curve) updateSpark(foot.firstChild, tile.curve);
  else {
    write(foot.firstChild, tile.foot);
    foot.firstChild.className = `note ${tile.footTone ?? ""}`;
  }
}

// ---- Waits ----

const waitKey = (wait) => JSON.stringify([wait.partition_id, wait.task_name, wait.code, wait.data_fields]);

function renderWaits(status, interval) {
  // Short waits are normal in a queue; listing them would only make the page below jump.
  const lasting = status.waits.filter((wait) => wait.seconds >= interval * LASTING_INTERVALS);
  list(
    byId("waits"),
    lasting,
    waitKey,
    () => {
      const where = make("p", "where", make("span"), " ", make("span", "chip"), " ", make("span", "chip"));
      return make("li", "", make("span", "since"), where, make("p", "text"));
    },
    (node, wait) => {
      const isLong = wait.seconds >= LONG_WAIT_SECONDS;
      node.className = isLong ? "long" : "";
      write(node.children[0], span(wait.seconds));
      const [, where, text] = node.children;
      write(where.children[0], wait.task_name ? `${wait.task_name} of ${wait.partition_id}` : wait.partition_id);
      write(where.children[1], wait.code.toLowerCase().replaceAll("_", " "));
      where.children[1].className = `chip ${isLong ? (wait.code === "FIELD_NEVER_PUT" ? "bad" : "warn") : ""}`;
      write(where.children[2], counted(wait.waiting_count, "call", "calls"));
      const put = wait.put_waits_for ? `; a put is waiting: ${wait.put_waits_for}` : "";
      write(text, wait.text + put);
    },
  );
  show(byId("waits-none"), lasting.length === 0);
  const hidden = status.hidden_wait_count;
  write(byId("waits-count"), lasting.length ? `${count(lasting.length)}${hidden ? ` and ${count(hidden)} more` : ""}` : "");
}

// ---- Partitions and their tasks ----

const nameOf = (partition) => partition.summary.partition_id;
const byName = new Intl.Collator("en", { numeric: true });

// Sorts by name; partitions whose names differ only in the step are sorted newest first.
function inOrder(one, other) {
  const [group, otherGroup] = [nameOf(one).split("@", 1)[0], nameOf(other).split("@", 1)[0]];
  return byName.compare(group, otherGroup) || byName.compare(nameOf(other), nameOf(one)) || (nameOf(one) < nameOf(other) ? 1 : -1);
}

function cell(className, label) {
  const node = make("span", className);
  node.setAttribute("role", "cell");
  if (label) node.dataset.label = label;
  return node;
}

function setNumber(node, text) {
  write(node, text ?? "–");
  node.classList.toggle("nothing", text === null);
}

function makeRow(className, kinds) {
  const row = make("div", `row ${className}`);
  row.setAttribute("role", "row");
  const name = make("span", "name");
  name.setAttribute("role", "rowheader");
  const progress = cell("progress");
  progress.append(makeBar(kinds));
  const trend = cell("trend");
  trend.append(makeSpark(ROW_POINTS));
  const rest = [cell("right", "samples"), cell("right", className === "task" ? "delivered" : "inserted")];
  row.append(name, progress, ...rest, trend, cell("right", className === "task" ? "left" : "present"), cell("right", "leased"), cell("reason"));
  return row;
}

function makePartition(partition) {
  const row = makeRow("whole", ["cleared", "live", "held", "failed"]);
  const more = make("button", "more", make("span"));
  more.type = "button";
  more.addEventListener("click", () => {
    if (!view.opened.delete(nameOf(partition))) view.opened.add(nameOf(partition));
    render();
  });
  row.firstChild.append(more, " ", make("span", "chip"));
  const tasks = make("div", "tasks");
  tasks.setAttribute("role", "presentation");
  const group = make("div", "partition", row, tasks);
  group.setAttribute("role", "rowgroup");
  return group;
}

const totalOf = (partition) => Math.max(partition.expected_samples ?? 0, partition.summary.inserted_count);

function stateOf(partition) {
  if (partition.summary.sealed) return "sealed";
  return partition.samples_per_round === null ? "open" : `rounds of ${count(partition.samples_per_round)}`;
}

function notesOf(partition) {
  const complete = partition.fields.filter((field) => field.produced_count >= partition.live_count + partition.held_count && partition.summary.present_count > 0).length;
  const notes = [bytes(partition.used_bytes)];
  if (partition.field_count) notes.push(`${complete} of ${counted(partition.field_count, "field", "fields")} complete`);
  if (partition.waiting_put_count) notes.push(counted(partition.waiting_put_count, "put waits", "puts wait"));
  return notes.join(" · ");
}

function updatePartition(node, partition, waits) {
  const [row, tasks] = node.children;
  const [name, progress, samples, rate, trend, left, leased, notes] = row.children;
  const isOpen = view.opened.has(nameOf(partition));
  const [more, chip] = name.children;
  write(more.firstChild, nameOf(partition));
  mark(more, "aria-expanded", String(isOpen));
  write(chip, stateOf(partition));
  chip.className = partition.summary.sealed ? "chip" : "chip open";
  const total = totalOf(partition);
  updateBar(progress.firstChild, [partition.summary.inserted_count - partition.summary.present_count, partition.live_count, partition.held_count, partition.failed_count], total);
  write(samples, partition.expected_samples === null ? compact(partition.summary.inserted_count) : `${compact(partition.summary.inserted_count)} / ${compact(partition.expected_samples)}`);
  const speed = partition.inserted_per_second;
  setNumber(rate, speed ? `${perSecond(speed)}/s` : null);
  updateSpark(trend.firstChild, partition.curve, ROW_POINTS);
  setNumber(left, compact(partition.summary.present_count));
  setNumber(leased, null);
  write(notes, notesOf(partition));
  notes.classList.toggle("long", partition.waiting_put_count > 0);
  list(
    tasks,
    partition.tasks,
    (task) => task.task_name,
    () => makeTask(),
    (taskNode, task) => updateTask(taskNode, task, total, waits.filter((wait) => wait.task_name === task.task_name)),
  );
  if (isOpen && node.children.length === 2) node.append(makeDetails());
  if (!isOpen && node.children.length === 3) node.lastChild.remove();
  if (isOpen) updateDetails(node.lastChild, partition, waits);
}

function makeTask() {
  const row = makeRow("task", ["delivered", "leased", "skipped"]);
  row.firstChild.append(make("b"));
  return row;
}

function updateTask(row, task, total, waits) {
  const [name, progress, samples, rate, trend, left, leased, reason] = row.children;
  write(name.firstChild, task.task_name);
  updateBar(progress.firstChild, [task.consumed_count - task.leased_count, task.leased_count, task.skipped_count], total);
  write(samples, `${compact(task.consumed_count)} / ${compact(total)}`);
  setNumber(rate, task.delivered_per_second >= 0.05 ? `${perSecond(task.delivered_per_second)}/s` : null);
  updateSpark(trend.firstChild, task.curve, ROW_POINTS);
  setNumber(left, compact(task.pending_count));
  setNumber(leased, task.leased_count ? compact(task.leased_count) : null);
  const isLong = waits.some((wait) => wait.seconds >= LONG_WAIT_SECONDS);
  write(reason, waits.length ? waits.map(inShort).join("; ") : doing(task));
  mark(reason, "title", waits.length ? waits.map((wait) => wait.text).join("\n") : null);
  reason.classList.toggle("long", isLong);
  row.classList.toggle("complete", task.complete);
}

// Summarizes the reason of a wait in the few words that fit in a row; "Waiting" and the details show the full sentence.
function inShort(wait) {
  if (wait.code === "FIELD_NEVER_PUT") return wait.data_fields.length === 1 ? `field ${wait.data_fields[0]}, which was never put` : "fields that were never put";
  if (wait.code === "NO_SAMPLES") return "the first samples";
  if (wait.code === "ALL_CONSUMED") return "new samples (all are consumed)";
  const unit = wait.counts_groups ? " groups" : "";
  const lacks = wait.not_ready.map(({ kind, name, sample_count: samples }) => {
    if (kind === "field") return `${count(samples)} lack ${name}`;
    if (kind === "where") return `${count(samples)} not matching ${name}`;
    if (kind === "length") return `${count(samples)} without length`;
    return kind === "group" ? `${count(samples)} in incomplete groups` : `${count(samples)} ${kind}`;
  });
  if (wait.code === "SAMPLER_WAITS") return `its sampler, ${count(wait.ready_count)}${unit} ready`;
  return [`${count(wait.ready_count)} of ${count(wait.needed_count)}${unit} ready`, ...lacks].join(", ");
}

function doing(task) {
  const facts = [];
  if (task.complete) facts.push("complete");
  if (task.dp_size) facts.push(`${counted(task.planned_batch_count, "batch", "batches")} to ${counted(task.dp_size, "rank", "ranks")}`);
  if (task.oldest_version !== null) facts.push(`oldest version ${version(task.oldest_version)}, ${ahead(task.staleness_versions)}`);
  if (task.epoch) facts.push(`epoch ${count(task.epoch)}`);
  if (task.skipped_count) facts.push(`${count(task.skipped_count)} skipped`);
  if (task.redelivered_count) facts.push(`${count(task.redelivered_count)} redelivered`);
  if (task.dead_lettered_count) facts.push(`${count(task.dead_lettered_count)} dead-lettered`);
  return facts.join(" · ");
}

const version = (value) => (Number.isInteger(value) ? count(value) : String(value));

// Returns the difference between the newest version and the oldest version left for a task, as text.
const ahead = (versions) => (versions === null ? "" : versions ? `producers ${version(versions)} ahead` : "producers not ahead");

function leasesOf(task) {
  const hidden = task.leasing_claim_count - task.leases.length;
  const shown = task.leases.map((lease) => `${lease.claim_name || lease.claim_id}: ${count(lease.leased_count)} for ${count(lease.delivered_ago_seconds)} s, ${count(lease.ends_in_seconds)} s left`);
  return [...shown, ...(hidden ? [counted(hidden, "more claim", "more claims")] : [])].join(" · ");
}

function makeDetails() {
  const table = make("table", "fields");
  const head = make("tr", "", ...["field", "dtype", "layout", "row shape", "produced", ""].map((name) => make("th", name === "produced" ? "right" : "", name)));
  for (const th of head.children) th.scope = "col";
  table.append(make("thead", "", head), make("tbody"));
  const inner = make("div", "details", make("dl"), table, make("ul", "waits"));
  inner.setAttribute("role", "cell");
  inner.setAttribute("aria-colspan", "8");
  const row = make("div", "", inner);
  row.setAttribute("role", "row");
  return row;
}

function releasesOf(partition) {
  const { when, tasks, ttl_seconds: age } = partition.release ?? { when: null, ttl_seconds: null };
  return [
    ...(when === null ? [] : [[`${when} by ${tasks.join(", ")}, released`, count(partition.released_count)]]),
    ...(age === null ? [] : [[`${age} s old, released`, count(partition.expired_count)]]),
  ];
}

function updateDetails(node, partition, waits) {
  const [facts, table, reasons] = node.firstChild.children;
  const shown = [
    ["live", count(partition.live_count)],
    ["held", count(partition.held_count)],
    ["failed", count(partition.failed_count)],
    ["cleared", count(partition.summary.inserted_count - partition.summary.present_count)],
    ...releasesOf(partition),
    ["groups", count(partition.group_count)],
    ["rollouts", count(partition.rollout_count)],
    ["bytes", partition.max_bytes === null ? bytes(partition.used_bytes) : `${bytes(partition.used_bytes)} of at most ${bytes(partition.max_bytes)}`],
    ["incarnation", partition.summary.incarnation.slice(0, 8)],
    ["custom_meta", partition.custom_meta_columns.map((column) => column.name).join(", ") || "none"],
    ...partition.tasks.map((task) => [`task ${task.task_name}`, doing(task) || "active"]),
    ...partition.tasks.filter((task) => task.leases.length).map((task) => [`leased by ${task.task_name}`, leasesOf(task)]),
  ];
  list(
    facts,
    shown,
    ([name]) => name,
    ([name]) => make("div", "", make("dt", "", name), make("dd")),
    (each, [, value]) => write(each.lastChild, value),
  );
  list(
    table.tBodies[0],
    partition.fields,
    ({ spec }) => spec.name,
    () => {
      const last = make("td", "", makeBar(["delivered"], "bar thin"));
      return make("tr", "", make("td"), make("td"), make("td"), make("td"), make("td", "right"), last);
    },
    (row, field) => {
      const { name, dtype, layout, row_shape } = field.spec;
      const shape = row_shape === null ? "" : row_shape.length ? row_shape.map((size) => (size < 0 ? "any" : size)).join(" × ") : "scalar";
      const texts = [name, dtype, layout, layout === "object" ? "" : shape, `${count(field.produced_count)} / ${count(partition.summary.present_count)}`];
      texts.forEach((text, index) => write(row.children[index], text));
      updateBar(row.lastChild.firstChild, [field.produced_count], partition.summary.present_count);
    },
  );
  show(table, partition.fields.length > 0);
  list(
    reasons,
    waits,
    waitKey,
    () => make("li", "", make("span", "since"), make("span", "text")),
    (each, wait) => {
      write(each.firstChild, span(wait.seconds));
      write(each.lastChild, `${wait.task_name || "a look-up"} waits: ${wait.text}`);
    },
  );
  show(reasons, waits.length > 0);
}

function renderPartitions(status) {
  const wanted = view.filter.trim().toLowerCase();
  const sorted = [...status.partitions].sort(inOrder);
  const shown = sorted.filter((partition) => !wanted || nameOf(partition).toLowerCase().includes(wanted));
  const waitsOf = new Map();
  for (const wait of status.waits) waitsOf.set(wait.partition_id, [...(waitsOf.get(wait.partition_id) ?? []), wait]);
  list(
    byId("partition-list"),
    shown,
    nameOf,
    makePartition,
    (node, partition) => updatePartition(node, partition, waitsOf.get(nameOf(partition)) ?? []),
  );
  const total = status.totals.partition_count;
  write(byId("partitions-count"), shown.length === total ? count(total) : `${count(shown.length)} of ${count(total)}`);
  show(byId("partitions-none"), shown.length === 0 && total > 0);
  const hidden = status.hidden_partition_count;
  write(byId("partitions-more"), hidden ? `${counted(hidden, "partition that has", "partitions that have")} not changed recently ${hidden === 1 ? "is" : "are"} hidden; use --prefix to select partitions.` : "");
  show(byId("partitions-more"), hidden > 0);
}

// ---- The narrow column ----

function renderBalances(status) {
  const balances = status.balances.filter((balance) => balance.batches.length > 0);
  list(
    byId("balances"),
    balances,
    (balance) => JSON.stringify([balance.group, balance.task]),
    () => make("article", "balance", make("h3"), makeTokens(), make("p", "numbers"), make("p", "soft")),
    (node, balance) => {
      const [title, chart, numbers, last] = node.children;
      const batches = balance.batches;
      const newest = batches[batches.length - 1];
      const mean = batches.reduce((sum, batch) => sum + batch.imbalance, 0) / batches.length;
      const padding = batches.reduce((sum, batch) => sum + batch.padding_share, 0) / batches.length;
      write(title, `${balance.task} of ${balance.group}`);
      updateTokens(chart, batches);
      mark(chart, "hidden", batches.some((batch) => batch.tokens_per_rank.length) ? null : "");
      write(numbers, `imbalance ${percent(newest.imbalance)}, mean of ${batches.length}: ${percent(mean)}. Padding ${percent(padding)}, none in jagged fields`);
      const tokens = newest.tokens_per_rank;
      const range = tokens.length ? `, ${count(Math.min(...tokens))} to ${count(Math.max(...tokens))} tokens on ${counted(tokens.length, "rank", "ranks")}` : "";
      const late = newest.staleness === null ? "" : `, at most ${counted(newest.staleness, "version", "versions")} late`;
      write(last, `last: batch ${count(newest.batch_index)} of ${newest.partition_id}${range}${late}`);
    },
  );
  show(byId("balances-none"), balances.length === 0);
}

function renderSteps(status) {
  list(
    byId("steps"),
    status.steps,
    (step) => JSON.stringify([step.group, step.task]),
    () => make("li", "", make("p", "pair", make("span"), make("span")), makeBar(["delivered", "leased", "failed"], "bar thin"), make("p", "advice"), make("p", "soft")),
    (node, step) => {
      const [pair, bar, advice, note] = node.children;
      write(pair.children[0], `${step.task} of ${step.group}`);
      write(pair.children[1], counted(step.rank_count, "rank", "ranks"));
      updateBar(bar, [step.shares.work, step.shares.rollouts, step.data_plane_share], 1);
      write(advice, step.advice);
      write(note, step.text);
    },
  );
  show(byId("steps-panel"), status.steps.length > 0);
}

function renderLimits(status) {
  const open = [...status.partitions].filter((partition) => !partition.summary.sealed).sort(inOrder); // sealed partitions receive no samples
  const limits = open.flatMap((partition) =>
    partition.admissions.map((admission) => {
      const task = partition.tasks.find((each) => each.task_name === admission.task_name);
      return { partition, admission, outstanding: task?.outstanding_count ?? 0, held: task?.running_count ?? 0 };
    }),
  );
  list(
    byId("limits"),
    limits,
    ({ partition, admission }) => JSON.stringify([nameOf(partition), admission.task_name]),
    () => make("li", "", make("p", "pair", make("span"), make("span")), makeBar(["used"], "bar thin"), make("p", "soft")),
    (node, { partition, admission, outstanding, held }) => {
      const [pair, bar, note] = node.children;
      write(pair.children[0], `${admission.task_name} of ${nameOf(partition)}`);
      write(pair.children[1], `${count(outstanding)} of ${count(admission.most)} ${admission.unit}s outstanding`);
      updateBar(bar, [Math.min(outstanding, admission.most)], admission.most);
      mark(bar.firstChild, "class", outstanding >= admission.most ? "much" : "used");
      const waiting = partition.waiting_put_count ? counted(partition.waiting_put_count, "put waits", "puts wait") : "no put waits";
      const late = admission.max_staleness === null ? "" : `, at most ${counted(admission.max_staleness, "version", "versions")} late`;
      const running = admission.most_running ? `, ${count(held)} of ${count(admission.most_running)} held` : "";
      const drops = admission.overflow === "drop_lowest" ? ", then the lowest are dropped" : "";
      const ratio = admission.samples_per_insert ? `, ${admission.samples_per_insert} deliveries per insert` : "";
      write(note, `until ${admission.given_back}, ${waiting}${late}${running}${drops}${ratio}`);
    },
  );
  show(byId("admissions-panel"), limits.length > 0);
}

function mirrorFacts(mirror) {
  const answers = mirror.is_reachable === null ? "not contacted yet" : mirror.is_reachable ? "answers" : "does not answer";
  const facts = [`mirror ${mirror.url} ${answers}`, `${bytes(mirror.unmirrored_bytes)} unmirrored`];
  if (mirror.short_put_count) facts.push(`${counted(mirror.short_put_count, "put", "puts")} with fewer copies than requested`);
  if (mirror.unfetched_put_count) facts.push(`${counted(mirror.unfetched_put_count, "put", "puts")} not fetched yet`);
  if (mirror.spilled_bytes) facts.push(`${bytes(mirror.spilled_bytes)} only in the mirror`);
  return facts.join(" · ");
}

function mirrorTone(mirror) {
  if (mirror.is_reachable === false) return "is-bad";
  return mirror.short_put_count ? "is-warn" : "soft";
}

function renderStorages(status) {
  list(
    byId("storages"),
    status.storages,
    (storage) => JSON.stringify([storage.storage_id, storage.is_adopted]), // puts that were taken over keep the old name
    () => make("li", "", make("p", "pair", make("span"), make("span")), makeBar(["used"], "bar thin"), make("p", "soft"), make("p", "soft mirror")),
    (node, storage) => {
      const [pair, bar, note, mirror] = node.children;
      const share = storage.max_bytes ? storage.used_bytes / storage.max_bytes : 0;
      const used = storage.max_bytes ? `${bytes(storage.used_bytes)} of ${bytes(storage.max_bytes)}` : bytes(storage.used_bytes);
      write(pair.children[0], storage.storage_id);
      write(pair.children[1], storage.is_adopted ? `taken over by ${storage.successor ?? "another service"}` : used);
      updateBar(bar, [share], 1);
      mark(bar.firstChild, "class", fill(share));
      mark(node, "class", storage.is_adopted ? "adopted" : null);
      show(bar, !storage.is_adopted); // its successor counts these bytes
      const notes = [counted(storage.put_count, "put", "puts"), storage.address || "in the controller"];
      if (storage.heard_ago_seconds !== null) notes.push(`heard ${span(storage.heard_ago_seconds)} ago`);
      if (storage.is_silent) notes.push("silent");
      write(note, notes.join(" · "));
      note.className = storage.is_silent ? "is-bad" : "soft";
      write(mirror, storage.mirror ? mirrorFacts(storage.mirror) : "");
      mirror.className = `mirror ${storage.mirror ? mirrorTone(storage.mirror) : "soft"}`;
      show(mirror, storage.mirror !== null);
    },
  );
  show(byId("storages-none"), status.storages.length === 0);
}

function renderEvents(frame) {
  if (view.run !== frame.run) {
    view.run = frame.run;
    view.eventAt.clear();
  }
  for (const event of frame.events) {
    if (!view.eventAt.has(event.number)) view.eventAt.set(event.number, view.receivedAt - event.seconds * 1000);
  }
  list(
    byId("events"),
    [...frame.events].reverse(),
    (event) => `${frame.run}/${event.number}`,
    (event) => {
      const time = make("time", "", clock(view.eventAt.get(event.number)));
      time.dateTime = new Date(view.eventAt.get(event.number)).toISOString();
      const name = event.name ? [make("b", "", event.name), " "] : [];
      return make("li", event.kind, time, make("span", "what", ...name, event.text));
    },
    () => {},
  );
  show(byId("events-none"), frame.events.length === 0);
}

function renderEmpty(frame) {
  const isEmpty = frame.status !== null && frame.status.totals.partition_count === 0;
  show(byId("empty"), isEmpty);
  show(byId("partitions"), !isEmpty && frame.status !== null);
  if (!isEmpty) return;
  write(byId("empty-title"), frame.prefix ? `No partition name begins with “${frame.prefix}”` : "No partitions yet");
  const name = JSON.stringify(`${frame.prefix || "train"}${frame.prefix ? "0" : "@0"}`);
  write(
    byId("empty-code"),
    `import numpy as np\nimport tq_service as tq\n\nwith tq.Client(${JSON.stringify(frame.address)}) as client:\n    client.put({"reward": np.zeros(8)}, partition_id=${name})`,
  );
  write(byId("empty-demo"), `python -m examples.demo --address ${frame.address}`);
}

// ---- From frame to screen ----

function render() {
  const frame = view.frame;
  renderBanner();
  if (!frame) return;
  renderFacts(frame);
  renderEvents(frame);
  renderEmpty(frame);
  const status = frame.status;
  show(byId("waits-panel"), status !== null);
  if (!status) return;
  list(byId("tiles"), tiles(status), (tile) => tile.key, makeTile, updateTile);
  renderWaits(status, frame.interval_seconds);
  renderPartitions(status);
  renderBalances(status);
  renderSteps(status);
  renderLimits(status);
  renderStorages(status);
}

let stream = null;

// Connects only while the page is visible: a browser opens at most six connections to a server, so a seventh tab would not
// load. The next frame contains all changes missed while the page was hidden.
function connect() {
  stream?.close();
  stream = null;
  if (document.hidden) return;
  const opened = new EventSource("events");
  stream = opened;
  opened.addEventListener("frame", (event) => {
    view.frame = JSON.parse(event.data);
    view.receivedAt = Date.now();
    view.isLost = false;
    render();
  });
  opened.addEventListener("error", () => {
    if (stream !== opened) return;
    if (!view.isLost) view.lostAt = Date.now();
    view.isLost = true;
    renderBanner();
    // The browser reconnects automatically, but not after an error response.
    if (opened.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  });
}

// ---- User input ----

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  write(byId("theme-name"), theme);
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  setTheme(next);
  try {
    localStorage.setItem("tq-theme", next);
  } catch {
    // Local storage is unavailable, so the choice lasts only until the page is closed.
  }
});

byId("filter").addEventListener("input", (event) => {
  view.filter = event.target.value;
  render();
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("filter").focus();
  } else if (event.key === "Escape" && event.target === byId("filter")) {
    byId("filter").value = "";
    view.filter = "";
    render();
  }
});

document.addEventListener("visibilitychange", connect);

setInterval(renderBanner, 1000);
setTheme(document.documentElement.dataset.theme ?? "system");
connect();
