// The cost and memory model of titan_train.planner for torch stacks, as it runs in the page.
// It follows cost/block.py, cost/step.py and memory/peak.py line by line; a test holds the two together.
"use strict";

const GIB = 2 ** 30;
const WINDOW_TILE = 256, SPARSE_RATE = 0.4;
const PENALTY = { tensorwise: 1, rowwise: 1.04, mxfp8: 1.04, blockwise: 1.12 };

function span(machine, c, size, stride) {
  const local = machine.local_bytes * c.local;
  if (size * stride <= machine.domain) return { size, rate: local, latency: machine.local_latency, local: true, per: size };
  const per = Math.max(1, Math.min(size, Math.floor(machine.domain / stride)));
  return { size, rate: Math.min(local, machine.network_bytes * c.network * per), latency: machine.network_latency, local: false, per };
}

const treeLatency = (g) => g.latency * (Math.log2(g.size) + 1);

function ringLatency(g) {
  if (g.local || g.per === 1) return treeLatency(g);
  const domains = Math.ceil(g.size / g.per);
  return Math.max(treeLatency(g), 8.4e-6 + (g.size - domains) * 3.4e-6 + (domains - 1) * 14e-6);
}

const movedOnce = (bytes, g) => (bytes * (g.size - 1)) / g.size / g.rate;

function gather(bytes, g, calls = 1) {
  if (g.size <= 1 || bytes <= 0) return 0;
  return movedOnce(bytes, g) + calls * ringLatency(g);
}

function allReduce(bytes, g, calls = 1) {
  if (g.size <= 1 || bytes <= 0) return 0;
  return 2 * (movedOnce(bytes, g) + calls * treeLatency(g));
}

function exchange(bytes, g, machine, share) {
  if (g.size <= 1 || bytes <= 0) return 0;
  const latency = treeLatency(g);
  if (g.local) return movedOnce(bytes, g) + latency;
  const outside = (bytes * (g.size - g.per)) / g.size / (machine.network_bytes * share);
  return Math.max(outside, (bytes * (g.per - 1)) / g.size / machine.local_bytes) + latency;
}

function context(shape, machine, c, s) {
  const plain = machine.bf16 * c.matmul;
  const float8 = s.precision !== "bf16";
  const rates = {
    plain,
    products: float8 ? (machine.fp8 * c.matmul8) / PENALTY[s.precision] : plain,
    attention: machine.bf16 * c.attention,
    stream: machine.bandwidth * c.bandwidth,
    operand: float8 ? 1 : 2,
    cast: float8 ? c.cast_bytes : 0,
  };
  const tokens = Math.floor((s.microbatch * s.seq_len) / s.cp);
  return { shape, machine, c, s, rates, tokens, tp: span(machine, c, s.tp, 1), cp: span(machine, c, s.cp, s.tp), ep: span(machine, c, s.ep, 1) };
}

function product(r, rows, inner, columns, plain) {
  const flops = 2 * rows * inner * columns;
  if (plain || r.cast === 0) return flops / r.plain + (2 * (rows * inner + inner * columns + rows * columns)) / r.stream;
  return flops / r.products + (r.operand * (rows * inner + inner * columns) + 2 * rows * columns) / r.stream;
}

function add(cost, name, forward, backward) {
  cost.f[name] = (cost.f[name] || 0) + forward;
  cost.b[name] = (cost.b[name] || 0) + backward;
}

function products(k, cost, shapes) {
  const { rates: r, s, tokens } = k;
  for (const [inner, columns, cast] of shapes) {
    const forward = product(r, tokens, inner, columns / s.tp);
    const weight = product(r, inner, tokens, columns / s.tp) + (2 * inner * columns) / s.tp / r.stream;
    const casts = (r.cast * tokens * cast) / (cast !== k.shape.dim ? s.tp : 1) / r.stream;
    const back = (r.cast * tokens * columns) / s.tp / r.stream;
    add(cost, "products", forward + casts, forward + back + weight);
    cost.last = { products: forward + casts };
  }
}

function attention(k, a, cost) {
  const { s, c, rates, tokens } = k;
  const dim = k.shape.dim;
  const q = a.heads * a.head_dim;
  if (a.kv_lora > 0) {
    const nope = a.head_dim - a.rope_dim;
    const input = a.q_lora || dim;
    products(k, cost, [
      [input, q, input],
      [a.kv_lora, a.heads * (nope + a.v_dim), a.kv_lora],
      [dim, (a.q_lora + a.kv_lora + a.rope_dim) * s.tp, dim],
      [a.heads * a.v_dim, dim, a.heads * a.v_dim],
    ]);
  } else {
    const kv = (a.shared_kv ? 1 : 2) * a.kv_heads * a.head_dim;
    const out = a.o_groups * a.o_lora;
    products(k, cost, [
      ...(a.q_lora ? [[a.q_lora, q, a.q_lora], [dim, (a.q_lora + kv) * s.tp, dim]] : [[dim, q + kv, dim]]),
      ...(a.o_lora ? [[q / a.o_groups, out, q], [out, dim, out]] : [[q, dim, q]]),
    ]);
  }
  let seen = s.seq_len * (a.causal ? 0.5 : 1);
  if (a.window) seen = Math.min(seen, a.window + (a.sparse ? 0 : WINDOW_TILE));
  const flops = (2 * tokens * seen * a.heads * (a.head_dim + a.v_dim)) / s.tp;
  const narrow = Math.min(1, (a.head_dim + a.v_dim) / 256) ** 0.5;
  const rate = rates.attention * narrow * (s.cp > 1 ? c.context : 1) * (a.sparse ? SPARSE_RATE : 1);
  add(cost, "attention", flops / rate, (2.5 * flops) / (rate * c.attention_backward));
  if (s.cp > 1) {
    const kv = (2 * tokens * a.kv_heads * (a.head_dim + a.v_dim)) / Math.min(s.tp, a.kv_heads);
    const hop = (s.cp - 1) * ((kv / k.cp.rate) * (k.cp.local ? 1 : k.cp.per) + k.cp.latency);
    add(cost, "cp", Math.max(0, hop - flops / rate), Math.max(0, 3 * hop - (2.5 * flops) / rate));
  }
}

function experts(k, e, cost) {
  const { s, c, rates: r } = k;
  const dim = k.shape.dim;
  const tokens = k.tokens / s.tp;
  const local = e.num_experts / s.ep;
  const routed = tokens * e.per_token * s.imbalance;
  const rows = Math.max(1, routed / local);
  const fill = rows / (rows + c.expert_rows);
  const part = { ...r, products: r.products * fill, plain: r.plain * fill };
  const up = product(part, rows, dim, (e.matrices - 1) * e.hidden);
  const down = product(part, rows, e.hidden, dim);
  const accumulate = (2 * e.matrices * dim * e.hidden) / r.stream;
  const casts = (r.cast * rows * (dim + e.hidden)) / r.stream;
  const forward = local * (up + down + casts);
  const backward = local * (2 * (up + down) + accumulate + 2 * casts);
  const passes = (2 * c.routing_passes * routed * dim) / r.stream + (2 * c.pointwise * 3 * routed * e.hidden) / r.stream;
  const router = product(r, tokens, dim, e.num_experts, true) + (20 * tokens * e.num_experts) / r.stream;
  add(cost, "experts", c.expert_scale * (forward + passes + router + c.sync_s), c.expert_scale * (backward + 2 * passes + 2 * router));
  const last = { experts: c.expert_scale * local * (down + (r.cast * rows * e.hidden) / r.stream) };
  if (e.shared_hidden) products(k, cost, [[dim, (e.matrices - 1) * e.shared_hidden, dim], [e.shared_hidden, dim, e.shared_hidden]]);
  if (s.ep > 1) {
    let once = exchange(2 * routed * dim, k.ep, k.machine, c.network * c.exchange);
    if (k.ep.local) once = exchange(2 * routed * dim, k.ep, k.machine, c.exchange) / c.exchange;
    add(cost, "ep", c.expert_scale * 2 * once, c.expert_scale * 2 * once);
    last.ep = c.expert_scale * once;
  }
  cost.last = last;
}

function blockCost(k, b) {
  const { s, c, rates, tokens } = k;
  const dim = k.shape.dim;
  const cost = { f: {}, b: {}, r: {}, last: {} };
  attention(k, b.attention, cost);
  if (b.experts) experts(k, b.experts, cost);
  else products(k, cost, [[dim, (b.matrices - 1) * b.hidden, dim], [b.hidden, dim, b.hidden]]);
  const a = b.attention;
  let elements = 10 * dim * (b.norms ? 0.5 * b.norms : 1) + 2 * (a.heads + a.kv_heads) * a.head_dim + 3 * (b.experts ? b.experts.shared_hidden : b.hidden);
  if (b.streams > 1) elements += 2 * (4 * b.streams + 2) * dim;
  const point = (2 * c.pointwise * elements * tokens) / s.tp / rates.stream;
  add(cost, "pointwise", point, 2 * point);
  if (s.tp > 1) {
    const halves = 1 + (b.experts ? (b.experts.shared_hidden ? 1 : 0) : 1);
    const each = gather(2 * tokens * dim * (s.precision === "tensorwise" ? 0.75 : 1), k.tp);
    const exposed = 1 - (s.async_tp ? c.hide_tp : 0);
    add(cost, "tp", 2 * halves * each * exposed, 2 * halves * each * exposed);
    cost.last.tp = each * exposed;
  }
  let parts = {};
  if (s.recompute === "full") for (const n in cost.f) parts[n] = 1;
  if (s.recompute === "selective") parts = { products: 0.37, pointwise: 0.8, tp: 0.5, experts: 0.4 };
  for (const n in parts) cost.r[n] = parts[n] * (cost.f[n] || 0) - (s.recompute === "full" ? cost.last[n] || 0 : 0);
  return cost;
}

const sum = (o) => Object.values(o).reduce((x, y) => x + y, 0);

function heaviest(layers, head, p) {
  let best = Infinity;
  for (let last = 0; last <= Math.floor(layers / p) + 1; last++)
    best = Math.min(best, Math.max(Math.ceil((layers - last) / (p - 1)), last + head));
  return best;
}

// layers of each stage, the largest stage as small as possible; the head counts on the last layer
function balancedCut(layers, head, stages) {
  const total = [0];
  for (let i = 0; i < layers; i++) total.push(total[i] + 1 + (i === layers - 1 ? head : 0));
  let best = total.map((t, i) => (i ? t : Infinity));
  const choices = [];
  for (let k = 2; k <= stages; k++) {
    const following = Array(layers + 1).fill(Infinity), choice = Array(layers + 1).fill(0);
    for (let i = k; i <= layers; i++)
      for (let j = k - 1; j < i; j++) {
        const largest = Math.max(best[j], total[i] - total[j]);
        if (largest < following[i]) { following[i] = largest; choice[i] = j; }
      }
    best = following;
    choices.push(choice);
  }
  const ends = [layers];
  for (const choice of choices.reverse()) ends.push(choice[ends[ends.length - 1]]);
  const bounds = [0, ...ends.reverse()];
  return bounds.slice(1).map((x, i) => x - bounds[i]);
}

const CUTS = new Map();

// parts of the blocks on the rank with embedding and head, and on the fullest other (memory/peak.py)
function sharesOnV(shape, s) {
  const seen = ([each, limit]) => each * (limit ? Math.min(s.seq_len, limit) : s.seq_len);
  const block = (shape.flops + sum(shape.scores.map(seen))) / shape.layers;
  const head = Math.round((600 * shape.head) / block) / 100;
  const key = [shape.layers, head, s.pp].join();
  if (!CUTS.has(key)) {
    const cut = balancedCut(shape.layers, head, 2 * s.pp);
    const ranks = Array.from({ length: s.pp }, (_, r) => (cut[r] + cut[2 * s.pp - 1 - r]) / shape.layers);
    CUTS.set(key, [ranks[0], Math.max(...ranks.slice(1))]);
  }
  return CUTS.get(key);
}

function rankParameters(shape, s, first, share = 1 / s.pp) {
  const ends = first || s.pp === 1 ? shape.head * ((s.pp > 1 && !onFirst(s)) || shape.tied ? 1 : 2) : 0;
  const fuller = onFirst(s) && !first && shape.routed ? Math.min(1 / share, shape.layers / shape.routed) : 1;
  return [(shape.dense * share + ends) / s.tp, (shape.experts * fuller * share) / s.ep];
}

const V_SHAPED = ["zbv", "v_half", "v_min", "1f1b_v", "dualpipe_v"];
const SPLIT = ["zb_h1", "zbv", "v_half", "v_min", "dualpipe_v"];
const onFirst = (s) => s.pp > 1 && V_SHAPED.includes(s.schedule);

// bubble in microbatches of one rank, microbatches in flight on the first and on the last rank (cost/schedules.py)
function scheduleCost(name, p, v, m) {
  const idle = p - 1;
  const both = (bubble, held) => ({ bubble, first: Math.min(m, held), last: Math.min(m, held) });
  if (name === "zb_h1") return both(idle / 3, p);
  if (name === "zbv") return both(idle / (m === p ? 3 : 6), p);
  if (name === "v_half") return both((p % 2 ? 3 * p - 4 : 3 * idle) / 6, Math.floor((p + 2) / 2));
  if (name === "v_min") return both((4 * p - (p % 3 ? 5 : 3)) / 6, Math.floor((p + 4) / 3));
  if (name === "1f1b_v") return both(idle + ((p - 1) % 3) / 6, Math.floor((2 * p) / 3) + 1);
  if (name === "dualpipe_v") return both(idle / 6, p + 0.5);
  if (v === 1) return { bubble: idle, first: Math.min(m, p), last: 1 };
  return { bubble: idle / v, first: Math.min(m, p + idle / v), last: Math.min(m, p - idle / v) };
}

function stepTime(k, costs) {
  const { shape, machine, c, s, rates } = k;
  const dp = s.dp_replicate * s.dp_shard;
  const m = Math.max(1, Math.floor(s.global_batch / (dp * s.microbatch)));
  const p = s.pp;
  const all = {};
  let forward = 0, backward = 0;
  shape.blocks.forEach((b, i) => {
    const x = costs[i];
    for (const part of [x.f, x.b]) for (const n in part) all[n] = (all[n] || 0) + b.count * part[n];
    for (const n in x.r) {
      const key = ["tp", "cp", "ep"].includes(n) ? n : "recompute";
      all[key] = (all[key] || 0) + b.count * x.r[n];
    }
    forward += b.count * sum(x.f);
    backward += b.count * (sum(x.b) + sum(x.r));
  });
  let head = 0;
  if (shape.vocab) {
    const perLogit = { eager: 40, compiled: 16 }[s.loss];
    head = 3 * product(rates, k.tokens, shape.dim, shape.vocab / s.tp, true) + (perLogit * k.tokens * shape.vocab) / s.tp / rates.stream;
  }
  forward += head / 3;
  backward += (2 * head) / 3;
  const compute = sum(all) + head;
  const terms = {};
  for (const n in all) terms[n] = (m * all[n]) / p;
  terms.head = (m * head) / p;
  const layers = shape.layers;
  const launches = layers * c.kernels * c.kernel_s * (3 + (s.recompute === "full" ? 1 : 0)) + shape.routed * c.routed_launch_s;
  const waiting = Math.max(0, launches - compute);
  terms.host = c.step_s + m * (c.microbatch_s + waiting / p);
  forward += waiting / 3;
  backward += (2 * waiting) / 3;
  if (p > 1) {
    const v = s.stages_per_rank;
    const one = sum(all) / layers;
    const load = heaviest(layers, head / one, p) * one;
    const even = compute / p;
    const idle = (scheduleCost(s.schedule, p, v, m).bubble / (p - 1)) * Math.max(0, p * even - load);
    terms.bubble = m * (load - even) + idle + (SPLIT.includes(s.schedule) ? 0.03 * m * even : 0);
    const link = span(machine, c, p, (p * dp * s.cp * s.tp) / p);
    const hop = ((2 * k.tokens * shape.dim) / s.tp / (link.rate / Math.max(1, link.per))) + link.latency;
    terms.pp = (v > 1 ? 0.25 : 0.5) * hop * 2 * (m * v + (p - 1));
  }
  const shard = s.dp_shard * s.cp;
  const group = span(machine, c, shard, s.tp);
  const replicas = span(machine, c, s.dp_replicate, s.tp * shard);
  const expertShards = Math.max(1, Math.floor((shard * s.tp) / s.ep));
  const expertGroup = span(machine, c, expertShards, s.ep);
  const [dense, routed] = rankParameters(shape, s, true);
  const bytes = s.precision === "tensorwise" ? 1 : 2;
  const calls = layers / p + 1;
  const g = gather(dense * bytes, group, calls) + gather(routed * bytes, expertGroup, calls);
  const reduce = gather(dense * 4, group, calls) + gather(routed * 4, expertGroup, calls);
  const across = allReduce((dense * 4) / shard, replicas, calls) + allReduce((routed * 4) / expertShards, replicas, calls);
  const f = forward / p, b = backward / p;
  if (p === 1) {
    const exposed = Math.max(0, g - f) + Math.max(0, g + reduce + across - b);
    terms.dp = m * (exposed + c.contention * (2 * g + reduce + across - exposed)) + (g + reduce + across) / Math.max(1, layers);
  } else {
    const chunks = Math.max(1, Math.min(m, p));
    const exposed = Math.max(0, g - (f * chunks) / p) + Math.max(0, reduce + across - (b * chunks) / p);
    terms.dp = exposed + c.contention * (g + reduce + across - exposed);
  }
  terms.optimizer = (30 * (dense / shard + routed / expertShards)) / rates.stream;
  for (const n in terms) terms[n] *= c.software;
  return { terms, m };
}

function rankPeak(k, first, m) {
  const { shape, s, tokens } = k;
  const share = onFirst(s) ? sharesOnV(shape, s)[first ? 0 : 1] : 1 / s.pp;
  const [dense, routed] = rankParameters(shape, s, first || !onFirst(s), share);
  const shard = s.dp_shard * s.cp;
  const expertShard = Math.max(1, Math.floor((shard * s.tp) / s.ep));
  const local = dense / shard + routed / expertShard;
  const parts = { parameters: 4 * local, gradients: 4 * local, optimizer: 8 * local };
  if (s.pp > 1) {
    parts.gathered = shard * expertShard > 1 ? 2 * (dense + routed) : 0;
    parts.gradients = 4 * (dense + routed) + (shard * expertShard > 1 ? 4 * local : 0);
  }
  const recompute = s.recompute + (s.ep > 1 ? " ep" : "");
  const v = s.stages_per_rank;
  const flight = s.pp > 1 ? scheduleCost(s.schedule, s.pp, v, m)[first ? "first" : "last"] : 1;
  parts.activations = ((shape.kept[recompute] * share * tokens) / s.tp) * flight;
  if (s.tp > 1) parts["tp buffers"] = 6 * tokens * shape.dim;
  if (s.pp > 1) parts["messages"] = (12 * tokens * shape.dim) / s.tp;
  parts.workspace = GIB;
  const backward = { "block working set": (shape.working[recompute] * tokens) / s.tp };
  let loss = {};
  if (s.pp === 1) {
    const ahead = shard > 1 ? 2 : 0;
    const around = (unit, before) => 4 * unit + (ahead + 4) * before;
    backward["gathered block"] = Math.max(...shape.sizes.map(([d, e]) => {
      const here = d / s.tp, there = e / s.ep;
      return s.ep > 1 && there ? Math.max(around(here, there), around(there, here)) : around(here + there, here + there);
    }));
    backward["gathered head"] = loss["gathered head"] = (4 * shape.head) / s.tp;
  }
  if (shape.vocab && (s.pp === 1 || first === onFirst(s))) {
    loss.logits = ((s.loss === "eager" ? (s.tp > 1 ? 20 : 14) : 6) * tokens * shape.vocab) / s.tp;
    loss["head input"] = 4 * tokens * shape.dim;
  } else loss = {};
  Object.assign(parts, sum(loss) > sum(backward) ? loss : backward);
  return parts;
}

function estimate(shape, machine, c, s) {
  const k = context(shape, machine, c, s);
  const costs = shape.blocks.map((b) => blockCost(k, b));
  const { terms, m } = stepTime(k, costs);
  const peaks = [rankPeak(k, true, m)];
  if (s.pp > 1) peaks.push(rankPeak(k, false, m));
  const memory = peaks.reduce((x, y) => (sum(y) > sum(x) ? y : x));
  const total = sum(terms);
  const world = s.pp * s.dp_replicate * s.dp_shard * s.cp * s.tp;
  return { terms, total, microbatches: m, memory, bytes: sum(memory), world, speed: (s.global_batch * s.seq_len) / world / total };
}

if (typeof module !== "undefined") module.exports = { estimate };
