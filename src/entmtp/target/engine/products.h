/* Matrix products of few rows with packed weights, by vectors or by the processor's matrix unit. */
#pragma once
#include "tiles.h"

#define FEW 12  /* rows of a tile of two blocks, and */
#define WIDE 24 /* of one: 24 accumulators, the weights and a factor fit 32 registers */
/* What memory is asked for, in elements before it is needed: into the second-level cache, past the pages that the
 * processor's own prefetching stops at. */
#define AHEAD 2048
#define ASK(p) __builtin_prefetch((p) + AHEAD, 0, 2)

/* weight: [blocks][depth / PAIR][LANES][PAIR], bias: [blocks][LANES] or null, an even number of blocks. Block b holds the
 * output's columns from 16 b on; when `paired` (gates and what they gate), even blocks are of the first half, odd ones
 * of the second. `unit`: multiplied by the matrix unit. `rank`: further inputs, which the rows of masks alone have: `down`
 * of theirs. To other rows they would add zeros, which leave the bits of a sum alone. */
typedef struct Linear {
    const stored *weight;
    const float *bias;
    int64_t in, out, paired, unit, rank;
    const struct Linear *down; /* null without such an adapter */
} Linear;

enum { STORE, ADD, GATE };

INLINE int64_t blocks_of(const Linear *l) { return (l->out + 2 * LANES - 1) / (2 * LANES) * 2; }
INLINE int64_t filled(int64_t in) { return (in + DEEP - 1) / DEEP * DEEP; }
INLINE int64_t stride_of(const Linear *l) { return filled(l->in + l->rank) * LANES; } /* from block to block */
INLINE int64_t column_of(const Linear *l, int64_t b)
{
    return l->paired ? b % 2 * (l->out / 2) + b / 2 * LANES : b * LANES;
}

/* Pairs of blocks that each thread is dealt beforehand, in one stream: not all of them where there are several threads. */
INLINE int64_t dealt(const Linear *l, int threads)
{
    int64_t pairs = blocks_of(l) / 2;
    return threads > 1 ? pairs * 3 / (4 * threads) : pairs;
}

/* The next of the other pairs, for a thread that is free; `taken` counts them, from 0. */
INLINE int64_t claim(const Linear *l, int threads, int32_t *taken)
{
    return dealt(l, threads) * threads + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
}

INLINE void put(float *out, v16 value, int64_t room, int mode)
{
    if (room >= LANES) {
        if (mode == ADD)
            value += load(out);
        store(out, value);
        return;
    }
    for (int64_t j = 0; j < room; j++)
        out[j] = mode == ADD ? out[j] + value[j] : value[j];
}

/* Block b of some rows' products, made [rows][LANES], to the rows of the output. */
static void deliver(const Linear *l, int64_t b, const float *made, int64_t rows, float *out, int64_t os, int mode)
{
    const int64_t column = column_of(l, b), gated = b / 2 * LANES;
    for (int64_t r = 0; r < rows; r++, made += LANES, out += os) {
        v16 value = load(made);
        if (mode != GATE)
            put(out + column, value, l->out - column, mode);
        else if (b % 2 == 0)
            store(out + gated, value / (1.0f + vexp(-value)));
        else
            store(out + gated, load(out + gated) * value);
    }
}

/* C blocks of columns for R rows, x [depth, R]: made [C][R][LANES]. Every element has one accumulator that takes the
 * products in order of k. */
INLINE void tile(const int R, const int C, const Linear *l, int64_t b, const float *x, int64_t depth, float *made)
{
    const int64_t block = stride_of(l);
    const stored *w = l->weight + b * block;
    v16 acc[WIDE][2];
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) {
        v16 bias = l->bias ? load(l->bias + (b + c) * LANES) : all(0);
#pragma GCC unroll 24
        for (int r = 0; r < R; r++)
            acc[r][c] = bias;
    }
    for (int64_t k = 0; k < depth; k += PAIR, w += PAIR * LANES, x += PAIR * R) {
#pragma GCC unroll 2
        for (int c = 0; c < C; c++)
            ASK(w + c * block);
#pragma GCC unroll 2
        for (int which = 0; which < PAIR; which++) {
            v16 weight[2];
#pragma GCC unroll 2
            for (int c = 0; c < C; c++)
                weight[c] = weights(w + c * block, which);
#pragma GCC unroll 24
            for (int r = 0; r < R; r++) {
                v16 factor = all(x[which * R + r]);
#pragma GCC unroll 2
                for (int c = 0; c < C; c++)
                    acc[r][c] += factor * weight[c];
            }
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; c++)
#pragma GCC unroll 24
        for (int r = 0; r < R; r++)
            store(made + (c * R + r) * LANES, acc[r][c]);
}

/* Rows of x [n, in] by tiles: [depth, rows] each, so that a tile reads one stream. Writes up to LANES floats further. */
static void arrange(const float *x, int64_t n, int64_t in, int64_t depth, int64_t tiles, float *panel)
{
    const int64_t whole = in / LANES * LANES;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = n * t / tiles, rows = n * (t + 1) / tiles - row;
        const float *from = x + row * in;
        float *to = panel + row * depth;
        for (int64_t k = 0; k < whole; k += LANES) {
            v16 v[2][LANES]; /* the first 16 rows and the others; what is stored too much is stored again */
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                v[0][r] = r < rows ? load(from + r * in + k) : all(0);
                v[1][r] = r + LANES < rows ? load(from + (r + LANES) * in + k) : all(0);
            }
            transpose(v[0]);
            if (rows > LANES)
                transpose(v[1]);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                store(to + (k + j) * rows, v[0][j]);
                if (rows > LANES)
                    store(to + (k + j) * rows + LANES, v[1][j]);
            }
        }
        for (int64_t k = whole; k < depth; k++)
            for (int64_t r = 0; r < rows; r++)
                to[k * rows + r] = k < in ? from[r * in + k] : 0;
    }
}

/* Inputs in, … of the rows from `first` on: low [n - first, rank]. The others' are zeros already. */
static void arrange_low(const float *low, int64_t first, int64_t n, int64_t in, int64_t rank, int64_t depth,
                        int64_t tiles, float *panel)
{
    for (int64_t t = 0; t < tiles; t++) {
        int64_t row = n * t / tiles, end = n * (t + 1) / tiles;
        for (int64_t i = row > first ? row : first; i < end; i++)
            for (int64_t j = 0; j < rank; j++)
                panel[row * depth + (in + j) * (end - row) + i - row] = low[(i - first) * rank + j];
    }
}

#ifdef UNIT
enum { HEIGHT = 16, AT_ONCE = 4 }; /* rows of a tile at most, and tiles of rows that share a tile of weights */

/* Rows of x [n, in], rounded: [tiles][depth / 32][rows][32], those past n zeros. */
static void arrange_halves(const float *x, int64_t n, int64_t in, int64_t deep, int64_t tiles, int64_t rows,
                           stored *panel)
{
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t d = 0; d < deep; d++)
            for (int64_t r = 0; r < rows; r++, panel += DEEP) {
                const int64_t row = t * rows + r, left = row < n ? in - d * DEEP : 0;
                const float *from = x + row * in + d * DEEP;
                if (left >= DEEP)
                    for (int j = 0; j < DEEP; j++)
                        panel[j] = rounded(from[j]);
                else
                    for (int j = 0; j < DEEP; j++)
                        panel[j] = j < left ? rounded(from[j]) : 0;
            }
}

/* As `arrange_low`. */
static void arrange_low_halves(const float *low, int64_t first, int64_t n, int64_t in, int64_t rank, int64_t deep,
                               int64_t rows, stored *panel)
{
    for (int64_t i = first; i < n; i++)
        for (int64_t j = 0; j < rank; j++) {
            int64_t d = (in + j) / DEEP, k = (in + j) % DEEP;
            panel[((i / rows * deep + d) * rows + i % rows) * DEEP + k] = rounded(low[(i - first) * rank + j]);
        }
}

/* One block of columns for up to AT_ONCE tiles of rows: made [tiles][rows][LANES]. Tile registers 0 to 3 hold the sums, 4
 * the weights. An instruction adds 32 products to every sum, in an order that does not depend on how many rows there are. */
static void unit_block(const stored *w, int64_t deep, const stored *x, int64_t tiles, int64_t rows, float *made)
{
    const int64_t size = rows * DEEP, next = deep * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < deep; d++, w += DEEP * LANES, x += size) {
        for (int line = 0; line < DEEP * LANES; line += 32)
            ASK(w + line);
        _tile_loadd(4, w, 64);
        _tile_loadd(5, x, 64);
        _tile_dpbf16ps(0, 5, 4);
        if (tiles > 1) {
            _tile_loadd(6, x + next, 64);
            _tile_dpbf16ps(1, 6, 4);
        }
        if (tiles > 2) {
            _tile_loadd(7, x + 2 * next, 64);
            _tile_dpbf16ps(2, 7, 4);
        }
        if (tiles > 3) {
            _tile_loadd(5, x + 3 * next, 64);
            _tile_dpbf16ps(3, 5, 4);
        }
    }
    _tile_stored(0, made, 64);
    if (tiles > 1)
        _tile_stored(1, made + rows * LANES, 64);
    if (tiles > 2)
        _tile_stored(2, made + 2 * rows * LANES, 64);
    if (tiles > 3)
        _tile_stored(3, made + 3 * rows * LANES, 64);
}

/* Blocks first .. last by the matrix unit; panel as `arrange_halves` made it, for tiles of `rows` rows. */
static void unit_columns(const Linear *l, int64_t n, const stored *panel, int64_t depth, int64_t tiles, int64_t rows,
                         float *out, int64_t os, int mode, int64_t first, int64_t last)
{
    float made[AT_ONCE * HEIGHT * LANES] __attribute__((aligned(64)));
    for (int64_t b = first; b < last; b++) {
        v16 bias = l->bias ? load(l->bias + b * LANES) : all(0);
        for (int64_t t = 0; t < tiles; t += AT_ONCE) {
            int64_t count = tiles - t < AT_ONCE ? tiles - t : AT_ONCE, row = t * rows;
            int64_t own = count * rows < n - row ? count * rows : n - row;
            unit_block(l->weight + b * stride_of(l), depth / DEEP, panel + row * depth, count, rows, made);
            for (int64_t r = 0; r < own; r++)
                store(made + r * LANES, load(made + r * LANES) + bias);
            deliver(l, b, made, own, out + row * os, os, mode);
        }
    }
}

/* Tile registers of `rows` rows, but for the weights'. */
static void unit_begin(int64_t rows)
{
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shape.bytes[t] = 64;
        shape.rows[t] = t == 4 ? DEEP / PAIR : rows;
    }
    __asm__ volatile("" ::: "memory"); /* gcc's tile instructions do not say what memory they read */
    _tile_loadconfig(&shape);
}

/* As `multiply`, by the matrix unit: x is rounded to bfloat16. */
static void multiply_unit(const Linear *l, const float *x, int64_t n, int64_t first, const float *low, stored *panel,
                          float *out, int64_t os, int mode, int me, int threads, int32_t *taken)
{
    const int64_t tiles = (n + HEIGHT - 1) / HEIGHT, rows = (n + tiles - 1) / tiles, pairs = blocks_of(l) / 2;
    const int64_t depth = filled(low ? l->in + l->rank : l->in);
    arrange_halves(x, n, l->in, depth / DEEP, tiles, rows, panel);
    if (low)
        arrange_low_halves(low, first, n, l->in, l->rank, depth / DEEP, rows, panel);
    unit_begin(rows);
    for (int64_t next = dealt(l, threads) * me, count = dealt(l, threads); next < pairs;
         next = claim(l, threads, taken), count = 1)
        unit_columns(l, n, panel, depth, tiles, rows, out, os, mode, 2 * next, 2 * (next + count));
    _tile_release();
}
#endif

/* Whether this process may use the matrix unit. */
int matrix_unit(void) { return matrix_unit_allowed(); }

/* Blocks first .. last; panel as `arrange` made it, or one row. Few rows take two blocks at once; more take one, so that
 * memory still delivers the next weights while all rows use these. */
static void columns(const Linear *l, int64_t n, const float *panel, int64_t depth, int64_t tiles, float *out, int64_t os,
                    int mode, int64_t first, int64_t last)
{
    const int64_t step = n <= FEW ? 2 : 1;
    float made[2 * WIDE * LANES] __attribute__((aligned(64)));
    for (int64_t b = first; b < last; b += step)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = n * t / tiles, rows = n * (t + 1) / tiles - row;
            const float *from = panel + row * depth;
            switch (step * 32 + rows) {
#define CASE(R, C) case C * 32 + R: tile(R, C, l, b, from, depth, made); break;
            CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2) CASE(9, 2)
            CASE(10, 2) CASE(11, 2) CASE(12, 2) CASE(12, 1) CASE(13, 1) CASE(14, 1) CASE(15, 1) CASE(16, 1) CASE(17, 1)
            CASE(18, 1) CASE(19, 1) CASE(20, 1) CASE(21, 1) CASE(22, 1) CASE(23, 1) CASE(24, 1)
#undef CASE
            }
            for (int64_t c = 0; c < step; c++)
                deliver(l, b + c, made + c * rows * LANES, rows, out + row * os, os, mode);
        }
}

/* This thread's columns, for n rows, of which those from `first` on are masks; panel: room for [n, depth] and LANES more,
 * low: for the [n, rank] inputs that they have further. `taken` as in `claim`. */
static void multiply(const Linear *l, const float *x, int64_t n, int64_t first, float *panel, float *low, float *out,
                     int64_t os, int mode, int me, int threads, int32_t *taken)
{
    if (l->down && first < n) { /* every thread for itself: less than waiting for one another */
        int32_t alone = 0;
        multiply(l->down, x + first * l->in, n - first, n - first, panel, 0, low, l->rank, STORE, 0, 1, &alone);
    } else
        low = 0;
#ifdef UNIT
    if (l->unit) {
        multiply_unit(l, x, n, first, low, (stored *)panel, out, os, mode, me, threads, taken);
        return;
    }
#endif
    const int64_t tiles = (n + WIDE - 1) / WIDE, pairs = blocks_of(l) / 2, depth = filled(low ? l->in + l->rank : l->in);
    if (n > 1 || depth > l->in) {
        arrange(x, n, l->in, depth, tiles, panel);
        x = panel;
    }
    if (low)
        arrange_low(low, first, n, l->in, l->rank, depth, tiles, panel);
    for (int64_t next = dealt(l, threads) * me, count = dealt(l, threads); next < pairs;
         next = claim(l, threads, taken), count = 1)
        columns(l, n, x, depth, tiles, out, os, mode, 2 * next, 2 * (next + count));
}

void linear(const Linear *l, const float *x, int64_t n, float *out, int64_t threads)
{
    int32_t taken = 0;
#pragma omp parallel num_threads(threads)
    {
        float *panel = malloc((n * filled(l->in) + LANES) * sizeof(float));
        multiply(l, x, n, n, panel, 0, out, l->out, STORE, omp_get_thread_num(), omp_get_num_threads(), &taken);
        free(panel);
    }
}

/* weight [out, in] row by row -> packed */
void pack(const stored *weight, int64_t in, int64_t out, int64_t paired, stored *packed)
{
    const Linear l = {.in = in, .out = out, .paired = paired};
    const int64_t depth = filled(in);
    for (int64_t b = 0; b < blocks_of(&l); b++)
        for (int64_t j = 0; j < LANES; j++) {
            int64_t column = column_of(&l, b) + j;
            for (int64_t k = 0; k < depth; k++)
                packed[(b * depth + k / PAIR * PAIR) * LANES + j * PAIR + k % PAIR] =
                    column < out && k < in ? weight[column * in + k] : 0;
        }
}
