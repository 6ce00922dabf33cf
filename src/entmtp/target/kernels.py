"""Elementwise work of a decoder layer on the CPU, one compiled kernel each.

A step streams the layer's weights through all caches; afterwards every further operator first has to fetch its own
instructions and page tables, which costs more than the few thousand numbers it works on (docs/LOG.md). So what lies
between two matrix products is one kernel here, not a chain of tensor operators. Arithmetic is float32 throughout;
bfloat16 is only how numbers are stored (as int16 bit patterns: NumPy has no bfloat16), rounded to nearest even.
"""

import numba
import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic, overload

# torch's own threads: a second pool would fight with them for the cores
numba.config.THREADING_LAYER = "omp"


def _reinterpret(context, builder, signature, args):
    """The argument's bits as the signature's return type."""
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic
def _as_float(context, bits):
    return types.float32(types.int32), _reinterpret


@intrinsic
def _as_bits(context, value):
    return types.int32(types.float32), _reinterpret


def load(array, row, column):
    """array[row, column] as float32."""
    raise NotImplementedError


def store(array, row, column, value):
    """Write a float32, rounded to what the array holds."""
    raise NotImplementedError


@overload(load, inline="always")
def _load(array, row, column):
    if array.dtype == types.int16:
        return lambda array, row, column: _as_float(np.int32(np.int32(array[row, column]) << np.int32(16)))
    return lambda array, row, column: array[row, column]


@overload(store, inline="always")
def _store(array, row, column, value):
    if array.dtype == types.int16:

        def rounded(array, row, column, value):
            bits = _as_bits(np.float32(value))
            even = (bits >> np.int32(16)) & np.int32(1)
            array[row, column] = np.int16((bits + np.int32(0x7FFF) + even) >> np.int32(16))

        return rounded

    def exact(array, row, column, value):
        array[row, column] = value

    return exact


# sums may be reordered, so that they vectorise; infinities and NaN keep their meaning
FAST = {"reassoc", "contract", "arcp", "nsz"}
LOG2E = np.float32(1.4426950408889634)
# 2^f on [-1/2, 1/2] by its Taylor polynomial: below 2e-7 relative error, and it vectorises, unlike libm's exp
C1, C2, C3 = np.float32(0.6931471805599453), np.float32(0.2402265069591007), np.float32(0.05550410866482158)
C4, C5, C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428441), np.float32(0.00015403530393381608)


@njit(inline="always", fastmath=FAST, error_model="numpy")
def exp(x):
    """e^x in float32; flushed to 2^-126 and clamped at 2^127."""
    y = min(max(x * LOG2E, np.float32(-126.0)), np.float32(126.99))
    whole = np.int32(np.floor(y + np.float32(0.5)))
    f = y - np.float32(whole)
    p = np.float32(1.0) + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * (C5 + f * C6)))))
    return p * _as_float((whole + np.int32(127)) << np.int32(23))


@njit(inline="always", fastmath=FAST, error_model="numpy")
def largest(array, row, start, end):
    """The largest of array[row, start:end] as float32."""
    found = load(array, row, start)
    for j in range(start + 1, end):
        found = max(found, load(array, row, j))
    return found


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def rms_norm(x, weight, eps, out):
    """out[i] = x[i] / rms(x[i]) * weight. x [n, H] float32, weight [H] float32, out [n, H]."""
    rows, size = x.shape
    for i in range(rows):
        total = np.float32(0.0)
        for j in range(size):
            total += x[i, j] * x[i, j]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for j in range(size):
            store(out, i, j, x[i, j] * scale * weight[j])


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def add_rms_norm(x, delta, weight, eps, out):
    """x += delta, then `rms_norm`. delta [n, H]: what a matrix product gave."""
    rows, size = x.shape
    for i in range(rows):
        total = np.float32(0.0)
        for j in range(size):
            value = x[i, j] + load(delta, i, j)
            x[i, j] = value
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for j in range(size):
            store(out, i, j, x[i, j] * scale * weight[j])


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def silu_mul(gate_up, out):
    """out = silu(gate) * up. gate_up [n, 2 I] (gate first), out [n, I]."""
    rows, size = out.shape
    for i in range(rows):
        for j in range(size):
            gate = load(gate_up, i, j)
            store(out, i, j, gate / (np.float32(1.0) + exp(-gate)) * load(gate_up, i, size + j))


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def rotate_store(qkv, cos, sin, positions, heads, kv_heads, keys, values, start, queries):
    """Rotary positions on queries and keys; new keys and values into the cache, queries grouped by key head.

    qkv [n, (heads + 2 kv_heads) d], query heads first · cos, sin [positions, d] float32, the first half of sin
    negated · positions [n] · keys, values [kv_heads, capacity, d]: rows start..start + n are written · queries
    [heads * n, d]: row (kv head, group, node), as one attention problem per key head reads them.
    """
    n, d = qkv.shape[0], keys.shape[2]
    half = d // 2
    for i in range(n):
        at = positions[i]
        for head in range(heads + kv_heads):
            base = head * d
            if head < heads:
                row = head * n + i
                for j in range(d):
                    other = load(qkv, i, base + (j + half) % d)
                    store(queries, row, j, load(qkv, i, base + j) * cos[at, j] + other * sin[at, j])
            else:
                key = keys[head - heads]
                for j in range(d):
                    other = load(qkv, i, base + (j + half) % d)
                    store(key, start + i, j, load(qkv, i, base + j) * cos[at, j] + other * sin[at, j])
        for head in range(kv_heads):
            base = (heads + kv_heads + head) * d
            value = values[head]
            for j in range(d):
                value[start + i, j] = qkv[i, base + j]


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def top1(logits, out):
    """Largest softmax probability of each row of logits [n, V] into out [n]: 1 / sum exp(logit - max)."""
    rows, size = logits.shape
    for row in range(rows):
        most, total = largest(logits, row, 0, size), np.float32(0.0)
        for j in range(size):
            total += exp(load(logits, row, j) - most)
        out[row] = np.float32(1.0) / total


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def argmax(logits, row):
    """Column of the largest logit of one row of logits [n, V], the first of equals: one pass, by blocks."""
    size = logits.shape[1]
    best, at = load(logits, row, 0), 0
    for start in range(0, size, 512):
        end = min(start + 512, size)
        most = largest(logits, row, start, end)
        if most > best:
            best, at = most, start
    for j in range(at, size):
        if load(logits, row, j) == best:
            return j
    return at


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def batch_rotate_store(qkv, cos, sin, slots, positions, heads, kv_heads, keys, values, queries):
    """`rotate_store` for b sequences of one token each: sequence i writes row positions[i] of its slot.

    keys, values [slots, kv_heads, capacity, d] · queries [b, heads d].
    """
    d = keys.shape[3]
    half = d // 2
    for i in range(len(slots)):
        slot, at = slots[i], positions[i]
        for head in range(heads + kv_heads):
            base = head * d
            for j in range(d):
                turned = load(qkv, i, base + j) * cos[at, j] + load(qkv, i, base + (j + half) % d) * sin[at, j]
                if head < heads:
                    store(queries, i, base + j, turned)
                else:
                    store(keys[slot, head - heads], at, j, turned)
        for head in range(kv_heads):
            base = (heads + kv_heads + head) * d
            for j in range(d):
                values[slot, head, at, j] = qkv[i, base + j]


@njit(parallel=True, fastmath=FAST, nogil=True, error_model="numpy", cache=True)
def batch_attend(queries, keys, values, slots, lengths, groups, scale, out):
    """Attention of b sequences over their own slots' first lengths[i] rows: no padding, no gathering.

    queries, out [b, heads d] · keys, values [slots, kv_heads, capacity, d].
    """
    kv_heads, d = keys.shape[1], keys.shape[3]
    for i in prange(len(slots)):
        slot, n = slots[i], lengths[i]
        query, total = np.empty((groups, d), np.float32), np.empty((groups, d), np.float32)
        weight = np.empty((groups, n), np.float32)
        for head in range(kv_heads):
            key, value = keys[slot, head], values[slot, head]
            for g in range(groups):
                for j in range(d):
                    query[g, j] = load(queries, i, (head * groups + g) * d + j) * scale
                    total[g, j] = np.float32(0.0)
            for t in range(n):
                for g in range(groups):
                    score = np.float32(0.0)
                    for j in range(d):
                        score += query[g, j] * load(key, t, j)
                    weight[g, t] = score
            for g in range(groups):
                largest, mass = weight[g, 0], np.float32(0.0)
                for t in range(n):
                    largest = max(largest, weight[g, t])
                for t in range(n):
                    weight[g, t] = exp(weight[g, t] - largest)
                    mass += weight[g, t]
                for t in range(n):
                    weight[g, t] /= mass
            for t in range(n):
                for g in range(groups):
                    for j in range(d):
                        total[g, j] += weight[g, t] * load(value, t, j)
            for g in range(groups):
                for j in range(d):
                    store(out, i, (head * groups + g) * d + j, total[g, j])


@njit(cache=True, nogil=True)
def tree_mask(buffer, capacity, parents, low):
    """Additive ancestor mask into the columns from `capacity` on. buffer [groups * n, capacity + n] · parents [n]."""
    n = len(parents)
    for row in range(len(buffer)):
        for j in range(n):
            store(buffer, row, capacity + j, low)
        node = row % n
        while node >= 0:
            store(buffer, row, capacity + node, np.float32(0.0))
            node = parents[node]
