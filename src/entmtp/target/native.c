/* Decoder layers of the Llama family for few rows on a CPU. Compiled at first use by entmtp/target/native.py.
 *
 * A step with few rows is bound by reading the weights once, so everything here serves one stream of packed weights, and
 * one parallel region runs the whole stack of layers. What a row computes does not depend on how many rows there are,
 * nor on the number of threads: every sum has one order. So a token's logits are the same bits whether it was
 * decoded alone, verified in a tree or read in a prefill, and exact acceptance is exact by construction.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <omp.h>
#if defined(HALF) && defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define UNIT /* the processor multiplies tiles of 16 by 32 bfloat16 numbers */
#endif

#define LANES 16
#define FEW 12   /* rows of a tile of two blocks, and */
#define WIDE 24  /* of one: 24 accumulators, the weights and a factor fit 32 registers */
#define SHARE 8  /* rows that look at a block of keys or values together */
#define TURN 32  /* values in such a block */
/* What memory is asked for, in elements before it is needed: into the second-level cache, past the pages that the
 * processor's own prefetching stops at. Into the first it would wait for a free line. */
#define AHEAD 2048
#define ASK(p) __builtin_prefetch((p) + AHEAD, 0, 2)
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

INLINE v16 load(const float *p) { return *(const v16 *)p; }
INLINE void store(float *p, v16 v) { *(v16 *)p = v; }
INLINE v16 all(float x) { return x - (v16){0}; }

/* Weights, keys and values are stored as float32 or (-DHALF) bfloat16; all arithmetic is float32, but for what the
 * matrix unit multiplies: bfloat16 by bfloat16, added in float32. */
#ifdef HALF
typedef uint16_t stored;
#define PAIR 2  /* inputs whose weights lie side by side, as the matrix unit wants them */
#define DEEP 32 /* inputs are filled up to a multiple with zeros */
INLINE v16 fetch(const stored *p) { return (v16)(__builtin_convertvector(*(const h16 *)p, u16) << 16); }
INLINE v16 weights(const stored *p, int which)
{
    u16 both = *(const u16 *)p;
    return which ? (v16)(both & 0xffff0000u) : (v16)(both << 16);
}
INLINE stored rounded(float x) /* to nearest, ties to even */
{
    union { float f; uint32_t u; } bits = {x};
    return (stored)((bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16);
}
#else
typedef float stored;
#define PAIR 1
#define DEEP 1
INLINE v16 fetch(const stored *p) { return load(p); }
INLINE v16 weights(const stored *p, int which) { (void)which; return load(p); }
INLINE stored rounded(float x) { return x; }
#endif
INLINE v16 pick(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }

INLINE float sum(v16 v)
{
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    union { v16 v; v8 h[2]; } a = {v};
    union { v8 v; v4 h[2]; } b = {a.h[0] + a.h[1]};
    v4 c = b.h[0] + b.h[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Lane j of the result is the sum of v[j], always in the same order: four rounds of adding neighbours, v changed. */
INLINE v16 sums(v16 v[LANES])
{
    const i16 even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, odd = even + 1;
#pragma GCC unroll 4
    for (int left = LANES / 2; left; left /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < left; j++) {
            v16 a = v[2 * j], b = v[2 * j + 1];
            v[j] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
        }
    return v[0];
}

/* v[i][j] <-> v[j][i] */
INLINE void transpose(v16 v[LANES])
{
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        const i16 second = (lane & step) != 0; /* -1 where a lane's number has this bit */
        const i16 low = lane + (second & (LANES - step)), high = lane + step + (second & (LANES - step));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                v16 a = v[i], b = v[i + step];
                v[i] = __builtin_shuffle(a, b, low);
                v[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* e^x, below 2e-7 relative error; flushed to 2^-126 and clamped at 2^127 */
INLINE v16 vexp(v16 x)
{
    v16 y = x * 1.4426950408889634f;
    y = pick(y < -126.0f, all(-126.0f), y);
    y = pick(y > 126.99f, all(126.99f), y);
    v16 shifted = y + 12582912.0f; /* 1.5 * 2^23: the sum's last bits are y, rounded to an integer */
    v16 f = y - (shifted - 12582912.0f);
    i16 whole = (i16)shifted - (i16)all(12582912.0f);
    v16 p = 1.0f + f * (0.6931471805599453f + f * (0.2402265069591007f + f * (0.05550410866482158f
          + f * (0.009618129107628477f + f * (0.0013333558146428441f + f * 0.00015403530393381608f)))));
    return p * (v16)((whole + 127) << 23);
}

/* ---- matrix products ---- */

/* weight: [blocks][depth / PAIR][LANES][PAIR], bias: [blocks][LANES] or null, an even number of blocks. Block b holds the
 * output's columns from 16 b on; when `paired` (gates and what they gate), even blocks are of the first half, odd ones
 * of the second. `unit`: multiplied by the matrix unit. */
typedef struct {
    const stored *weight;
    const float *bias;
    int64_t in, out, paired, unit;
} Linear;

enum { STORE, ADD, GATE };

INLINE int64_t blocks_of(const Linear *l) { return (l->out + 2 * LANES - 1) / (2 * LANES) * 2; }
INLINE int64_t filled(int64_t in) { return (in + DEEP - 1) / DEEP * DEEP; }
INLINE int64_t column_of(const Linear *l, int64_t b)
{
    return l->paired ? b % 2 * (l->out / 2) + b / 2 * LANES : b * LANES;
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
INLINE void tile(const int R, const int C, const Linear *l, int64_t b, const float *x, float *made)
{
    const int64_t depth = filled(l->in), block = depth * LANES;
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
static void arrange(const float *x, int64_t n, int64_t in, int64_t tiles, float *panel)
{
    const int64_t depth = filled(in), whole = in / LANES * LANES;
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

#ifdef UNIT
enum { HEIGHT = 16, AT_ONCE = 4 }; /* rows of a tile at most, and tiles of rows that share a tile of weights */

/* Whether this process may use the matrix unit: the kernel wants to be asked. */
int matrix_unit(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

/* Rows of x [n, in], rounded: [tiles][depth / 32][rows][32], those past n zeros. */
static void arrange_halves(const float *x, int64_t n, int64_t in, int64_t tiles, int64_t rows, stored *panel)
{
    const int64_t deep = filled(in) / DEEP;
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
static void unit_columns(const Linear *l, int64_t n, const stored *panel, int64_t tiles, int64_t rows, float *out,
                         int64_t os, int mode, int64_t first, int64_t last)
{
    const int64_t depth = filled(l->in);
    float made[AT_ONCE * HEIGHT * LANES] __attribute__((aligned(64)));
    for (int64_t b = first; b < last; b++) {
        v16 bias = l->bias ? load(l->bias + b * LANES) : all(0);
        for (int64_t t = 0; t < tiles; t += AT_ONCE) {
            int64_t count = tiles - t < AT_ONCE ? tiles - t : AT_ONCE, row = t * rows;
            int64_t own = count * rows < n - row ? count * rows : n - row;
            unit_block(l->weight + b * depth * LANES, depth / DEEP, panel + row * depth, count, rows, made);
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
#else
int matrix_unit(void) { return 0; }
#endif

/* Blocks first .. last; panel as `arrange` made it, or one row. Few rows take two blocks at once; more take one, so that
 * memory still delivers the next weights while all rows use these. */
static void columns(const Linear *l, int64_t n, const float *panel, int64_t tiles, float *out, int64_t os, int mode,
                    int64_t first, int64_t last)
{
    const int64_t depth = filled(l->in), step = n <= FEW ? 2 : 1;
    float made[2 * WIDE * LANES] __attribute__((aligned(64)));
    for (int64_t b = first; b < last; b += step)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = n * t / tiles, rows = n * (t + 1) / tiles - row;
            const float *from = panel + row * depth;
            switch (step * 32 + rows) {
#define CASE(R, C) case C * 32 + R: tile(R, C, l, b, from, made); break;
            CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2) CASE(9, 2)
            CASE(10, 2) CASE(11, 2) CASE(12, 2) CASE(12, 1) CASE(13, 1) CASE(14, 1) CASE(15, 1) CASE(16, 1) CASE(17, 1)
            CASE(18, 1) CASE(19, 1) CASE(20, 1) CASE(21, 1) CASE(22, 1) CASE(23, 1) CASE(24, 1)
#undef CASE
            }
            for (int64_t c = 0; c < step; c++)
                deliver(l, b + c, made + c * rows * LANES, rows, out + row * os, os, mode);
        }
}

/* This thread's columns, for n rows; panel: room for [n, depth] and LANES more. Most columns are shared out beforehand, in
 * long streams; the last of them go to whichever thread is free: `taken` counts these, from 0. */
static void multiply(const Linear *l, const float *x, int64_t n, float *panel, float *out, int64_t os, int mode, int me,
                     int threads, int32_t *taken)
{
    const int64_t pairs = blocks_of(l) / 2, own = threads > 1 ? pairs * 3 / (4 * threads) : pairs, depth = filled(l->in);
    int64_t tiles = (n + WIDE - 1) / WIDE, rows = 0, next = own * me, count = own;
#ifdef UNIT
    if (l->unit) {
        tiles = (n + HEIGHT - 1) / HEIGHT;
        rows = (n + tiles - 1) / tiles;
        arrange_halves(x, n, l->in, tiles, rows, (stored *)panel);
        unit_begin(rows);
    } else
#endif
    if (n > 1 || depth > l->in) {
        arrange(x, n, l->in, tiles, panel);
        x = panel;
    }
    for (; next < pairs; count = 1) {
#ifdef UNIT
        if (l->unit)
            unit_columns(l, n, (stored *)panel, tiles, rows, out, os, mode, 2 * next, 2 * (next + count));
        else
#endif
            columns(l, n, x, tiles, out, os, mode, 2 * next, 2 * (next + count));
        next = threads > 1 ? own * threads + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED) : pairs;
    }
#ifdef UNIT
    if (l->unit)
        _tile_release();
#endif
    (void)rows;
}

void linear(const Linear *l, const float *x, int64_t n, float *out, int64_t threads)
{
    int32_t taken = 0;
#pragma omp parallel num_threads(threads)
    {
        float *panel = malloc((n * filled(l->in) + LANES) * sizeof(float));
        multiply(l, x, n, panel, out, l->out, STORE, omp_get_thread_num(), omp_get_num_threads(), &taken);
        free(panel);
    }
}

/* weight [out, in] row by row -> packed */
void pack(const stored *weight, int64_t in, int64_t out, int64_t paired, stored *packed)
{
    const Linear l = {0, 0, in, out, paired, 0};
    const int64_t depth = filled(in);
    for (int64_t b = 0; b < blocks_of(&l); b++)
        for (int64_t j = 0; j < LANES; j++) {
            int64_t column = column_of(&l, b) + j;
            for (int64_t k = 0; k < depth; k++)
                packed[(b * depth + k / PAIR * PAIR) * LANES + j * PAIR + k % PAIR] =
                    column < out && k < in ? weight[column * in + k] : 0;
        }
}

/* ---- decoder layers ---- */

typedef struct {
    const float *norm1, *norm2;
    Linear qkv, out, up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *final_norm, *cos, *sin; /* cos, sin [positions, dim], the first half of sin negated */
    int64_t depth, hidden, heads, kv_heads, dim, inner;
    double eps;
} Model;

INLINE void norm(const float *x, const float *weight, int64_t n, int64_t size, float eps, float *out)
{
    for (int64_t i = 0; i < n; i++, x += size, out += size) {
        v16 total = all(0);
        for (int64_t j = 0; j < size; j += LANES)
            total += load(x + j) * load(x + j);
        float scale = 1.0f / sqrtf(sum(total) / (float)size + eps);
        for (int64_t j = 0; j < size; j += LANES)
            store(out + j, load(x + j) * scale * load(weight + j));
    }
}

/* x [dim] at its position, in place */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t dim, float scale)
{
    int64_t half = dim / 2;
    for (int64_t j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = (a * cos[j] + b * sin[j]) * scale;
        x[j + half] = (b * cos[j + half] + a * sin[j + half]) * scale;
    }
}

INLINE void keep(const float *x, int64_t dim, stored *row)
{
    for (int64_t j = 0; j < dim; j++)
        row[j] = rounded(x[j]);
}

/* Scores of G query heads, q [G, 16 N], over sixteen keys [16, 16 N]: scores [G, stride] */
INLINE void score(const int N, const int G, const float *q, const float *keys, float *scores, int64_t stride)
{
    const int64_t dim = LANES * N;
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) {
        v16 s[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            s[i] = load(q + g * dim) * load(keys + i * dim);
#pragma GCC unroll 8
            for (int j = 1; j < N; j++)
                s[i] += load(q + g * dim + j * LANES) * load(keys + i * dim + j * LANES);
        }
        store(scores + g * stride, sums(s));
    }
}

/* e^(score - the largest) over scores [total], in place. Returns their sum. */
INLINE float soften(float *own, int64_t total)
{
    const int64_t padded = (total + LANES - 1) / LANES * LANES;
    for (int64_t t = total; t < padded; t++)
        own[t] = -INFINITY;
    v16 most = load(own), mass = all(0);
    for (int64_t t = LANES; t < padded; t += LANES)
        most = pick(load(own + t) > most, load(own + t), most);
    float largest = most[0];
    for (int j = 1; j < LANES; j++)
        largest = most[j] > largest ? most[j] : largest;
    for (int64_t t = 0; t < padded; t += LANES) {
        v16 s = load(own + t), e = vexp(s - largest);
        e = pick(s == -INFINITY, all(0), e);
        store(own + t, e);
        mass += e;
    }
    return sum(mass);
}

/* Adds `count` values [count, 16 N], weighted, to acc [G][N]. */
INLINE void weigh(const int N, const int G, const float *weights, int64_t stride, const float *values, int64_t count,
                  v16 *acc)
{
    v16 a[4][8];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
            a[g][j] = acc[g * N + j];
    for (int64_t t = 0; t < count; t++, values += LANES * N) {
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            v16 weight = all(weights[g * stride + t]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                a[g][j] += weight * load(values + j * LANES);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
            acc[g * N + j] = a[g][j];
}

/* Both for heads of 16 N numbers, G query heads a key head. */
typedef struct {
    void (*score)(const float *, const float *, float *, int64_t);
    void (*weigh)(const float *, int64_t, const float *, int64_t, v16 *);
} Kernels;

#define EACH(DO) DO(1, 1) DO(1, 2) DO(1, 3) DO(1, 4) DO(2, 1) DO(2, 2) DO(2, 3) DO(2, 4) \
                 DO(4, 1) DO(4, 2) DO(4, 3) DO(4, 4) DO(8, 1) DO(8, 2) DO(8, 3) DO(8, 4)
#define DEFINE(N, G)                                                                                                   \
    static void score_##N##_##G(const float *q, const float *keys, float *scores, int64_t stride)                      \
    {                                                                                                                  \
        score(N, G, q, keys, scores, stride);                                                                          \
    }                                                                                                                  \
    static void weigh_##N##_##G(const float *weights, int64_t stride, const float *values, int64_t count, v16 *acc)    \
    {                                                                                                                  \
        weigh(N, G, weights, stride, values, count, acc);                                                              \
    }
EACH(DEFINE)
#define ENTRY(N, G) {score_##N##_##G, weigh_##N##_##G},
static const Kernels KERNELS[] = {EACH(ENTRY)};

static const Kernels *kernels_for(int64_t n, int64_t groups)
{
    return KERNELS + (n == 1 ? 0 : n == 2 ? 4 : n == 4 ? 8 : 12) + groups - 1;
}

/* Queries and what they see: row i has G query heads at q + i * qs over one key head, count[i] new keys beside the
 * context, those named in seen + i * ss. All rows see the first `shared` keys. Results to out + i * os. */
typedef struct {
    const float *q;
    const stored *keys, *values;
    const int32_t *seen, *count;
    float *out;
    int64_t qs, ss, os, context, shared;
} Queries;

/* `size` stored numbers as float32, in `room` if need be */
INLINE const float *unpacked(const stored *from, int64_t size, float *room)
{
#ifdef HALF
    for (int64_t i = 0; i < size; i += LANES)
        store(room + i, fetch(from + i));
    return room;
#else
    (void)size, (void)room;
    return from;
#endif
}

/* The visible keys or values number first, … of a row, into `room` [count, dim]: the context's, then the new ones it sees. */
INLINE void gather(const stored *from, int64_t first, int64_t count, int64_t dim, int64_t context, const int32_t *seen,
                   float *room)
{
    for (int64_t t = first; t < first + count; t++, room += dim) {
        const stored *row = from + dim * (t < context ? t : context + seen[t - context]);
        for (int64_t j = 0; j < dim; j += LANES)
            store(room + j, fetch(row + j));
    }
}

/* n rows, at most SHARE: all but the first find shared keys and values in the first-level cache. A row sums in order of
 * position, and masked keys are not there at all: so a row of a tree sums as the same token decoded alone would.
 * scores: room for [n, G, stride] */
static void attend(int64_t N, int64_t G, const Queries *of, int64_t n, float *scores, int64_t stride)
{
    const Kernels *with = kernels_for(N, G);
    const int64_t dim = LANES * N, whole = of->shared / LANES * LANES, context = of->context, size = G * stride;
    float room[TURN * LANES * 8] __attribute__((aligned(64)));
    v16 acc[SHARE][4 * 8];
    float mass[SHARE][4];
    for (int64_t first = 0; first < whole; first += LANES) {
        const float *keys = unpacked(of->keys + dim * first, dim * LANES, room);
        for (int64_t i = 0; i < n; i++)
            with->score(of->q + i * of->qs, keys, scores + i * size + first, stride);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t total = context + of->count[i];
        for (int64_t first = whole; first < total; first += LANES) { /* past the end: scores that are overwritten */
            int64_t count = total - first < LANES ? total - first : LANES;
            gather(of->keys, first, count, dim, context, of->seen + i * of->ss, room);
            with->score(of->q + i * of->qs, room, scores + i * size + first, stride);
        }
        for (int64_t g = 0; g < G; g++)
            mass[i][g] = soften(scores + i * size + g * stride, total);
        for (int64_t j = 0; j < G * N; j++)
            acc[i][j] = all(0);
    }
    for (int64_t first = 0; first < of->shared; first += TURN) {
        const int64_t count = of->shared - first < TURN ? of->shared - first : TURN;
        const float *values = unpacked(of->values + dim * first, dim * count, room);
        for (int64_t i = 0; i < n; i++)
            with->weigh(scores + i * size + first, stride, values, count, acc[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t total = context + of->count[i];
        for (int64_t first = of->shared; first < total; first += TURN) {
            int64_t count = total - first < TURN ? total - first : TURN;
            gather(of->values, first, count, dim, context, of->seen + i * of->ss, room);
            with->weigh(scores + i * size + first, stride, room, count, acc[i]);
        }
        for (int64_t j = 0; j < G * N; j++)
            store(of->out + i * of->os + j * LANES, acc[i][j] / mass[i][j / N]);
    }
}

/* Inputs of the layers' widest matrix. */
INLINE int64_t widest(const Model *m)
{
    int64_t wide = m->heads * m->dim > m->hidden ? m->heads * m->dim : m->hidden;
    return filled(wide > m->inner ? wide : m->inner);
}

/* Floats of scratch that `forward` needs for n rows. */
int64_t scratch_size(const Model *m, int64_t n, int64_t capacity, int64_t masked, int64_t threads)
{
    int64_t qkv = (m->heads + 2 * m->kv_heads) * m->dim, wide = m->heads * m->dim;
    int64_t rows = n * (m->hidden * (1 + threads) + qkv + wide + m->inner + threads * widest(m)) + threads * LANES;
    return rows + threads * SHARE * m->heads / m->kv_heads * (capacity + LANES) + n * (masked ? n + 1 : 2)
           + 4 * m->depth;
}

/* Final-norm hidden states [n, hidden] of x [n, hidden] at `positions`, whose rows go to `context`, … of the cache
 * [depth, 2, kv_heads, capacity, dim]. A row sees the context and those new rows whose entry in `mask` [n, …] (its columns
 * context, … count) is 0; without a mask itself and the rows before it. */
void forward(const Model *m, const float *x, const int64_t *positions, int64_t n, int64_t context, const stored *mask,
             int64_t mask_stride, stored *cache, int64_t capacity, float *hidden, float *scratch, int64_t threads)
{
    const int64_t h = m->hidden, d = m->dim, groups = m->heads / m->kv_heads, wide = m->heads * d;
    const int64_t qkv_size = wide + 2 * m->kv_heads * d, stride = capacity + LANES;
    float *residual = scratch, *qkv = residual + n * h, *attended = qkv + n * qkv_size;
    float *active = attended + n * wide, *normed = active + n * m->inner, *panels = normed + threads * n * h;
    float *scores = panels + threads * (n * widest(m) + LANES);
    int32_t *count = (int32_t *)(scores + threads * SHARE * groups * stride), *seen = count + n, *taken = seen + (mask ? n * n : n);
    const float scale = 1.0f / sqrtf((float)d);
    memcpy(residual, x, n * h * sizeof(float));
    memset(taken, 0, 4 * m->depth * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        if (!mask) { /* all rows share one list */
            seen[i] = (int32_t)i;
            count[i] = (int32_t)i + 1;
            continue;
        }
        count[i] = 0;
        for (int64_t j = 0; j < n; j++)
            if (mask[i * mask_stride + context + j] == 0)
                seen[i * n + count[i]++] = (int32_t)j;
    }
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), all_threads = omp_get_num_threads();
        float *own = normed + me * n * h, *panel = panels + me * (n * widest(m) + LANES);
        float *own_scores = scores + me * SHARE * groups * stride;
        for (int64_t index = 0; index < m->depth; index++) {
            const Layer *l = m->layers + index;
            int32_t *left = taken + 4 * index;
            stored *keys = cache + (2 * index) * m->kv_heads * capacity * d, *values = keys + m->kv_heads * capacity * d;
            norm(residual, l->norm1, n, h, (float)m->eps, own);
            multiply(&l->qkv, own, n, panel, qkv, qkv_size, STORE, me, all_threads, left);
#pragma omp barrier
            int64_t vectors = qkv_size / d;
            for (int64_t item = n * vectors * me / all_threads; item < n * vectors * (me + 1) / all_threads; item++) {
                int64_t i = item / vectors, head = item % vectors, key = head - m->heads, value = key - m->kv_heads;
                const float *cos = m->cos + positions[i] * d, *sin = m->sin + positions[i] * d;
                float *vector = qkv + item * d;
                if (value < 0)
                    rotate(vector, cos, sin, d, key < 0 ? scale : 1.0f);
                if (value >= 0)
                    keep(vector, d, values + (value * capacity + context + i) * d);
                else if (key >= 0)
                    keep(vector, d, keys + (key * capacity + context + i) * d);
            }
#pragma omp barrier
            int64_t items = n * m->kv_heads, item = items * me / all_threads, end = items * (me + 1) / all_threads;
            while (item < end) { /* rows of one head, as many as share */
                int64_t head = item / n, i = item % n, rows = n - i < end - item ? n - i : end - item;
                rows = rows < SHARE ? rows : SHARE;
                for (int64_t g = 0; g < groups; g += 4) {
                    int64_t first = (head * groups + g) * d;
                    Queries of = {qkv + i * qkv_size + first, keys + head * capacity * d, values + head * capacity * d,
                                  mask ? seen + i * n : seen, count + i, attended + i * wide + first, qkv_size,
                                  mask ? n : 0, wide, context, mask ? context : context + i + 1};
                    attend(d / LANES, groups - g < 4 ? groups - g : 4, &of, rows, own_scores, stride);
                }
                item += rows;
            }
#pragma omp barrier
            multiply(&l->out, attended, n, panel, residual, h, ADD, me, all_threads, left + 1);
#pragma omp barrier
            norm(residual, l->norm2, n, h, (float)m->eps, own);
            multiply(&l->up, own, n, panel, active, m->inner, GATE, me, all_threads, left + 2);
#pragma omp barrier
            multiply(&l->down, active, n, panel, residual, h, ADD, me, all_threads, left + 3);
#pragma omp barrier
        }
        for (int64_t i = n * me / all_threads; i < n * (me + 1) / all_threads; i++)
            norm(residual + i * h, m->final_norm, 1, h, (float)m->eps, hidden + i * h);
    }
}
